"""The parts of gpu_training.py: packs, a long document, the share of the peak."""

from __future__ import annotations

import argparse
import itertools
import sys
from functools import partial
from statistics import median

import numpy as np
import torch
from common import Check, progress, show
from gpu_packs import drawn_packs
from kernel_shares import profiled, shares
from training_inputs import Pack, Step
from training_rivals import PACKED, Rival, missing
from training_sides import OURS, Sides

SOURCES = ("wikipedia", "prolong", "github")
PEAK = 989e12
DOCUMENTS = Rival("documents", "plain")


class Run:
    """The sides, and what was found so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.tokens, self.long_tokens = (4096, 256) if arguments.quick else (32_768, 131_072)
        model = "tiny" if arguments.quick else arguments.model
        self.sides = Sides(model, self.device, compiled=not arguments.quick)
        self.size = sum(each.numel() for each in self.sides.parameters)
        absent = {str(rival): missing(rival, self.device) for rival in PACKED}
        self.rivals = [rival for rival in PACKED if absent[str(rival)] is None] or [DOCUMENTS]
        self.figures: dict = {"model": {"name": model, "parameters": self.size}}
        self.figures["rivals left out"] = {name: why for name, why in absent.items() if why}
        self.checks: list[Check] = []
        progress(f"{model}: {self.size / 1e9:.2f} billion parameters; rivals: {'; '.join(map(str, self.rivals))}")

    def step(self, name: str, side: Rival | str, pack: Pack, keep: str) -> Step:
        """One step, with a line of progress."""
        found = self.sides.run(side, pack, keep)
        rate = f"{found.seconds:.3f} s, {len(pack.ids) / found.seconds:,.0f} tokens/s, {found.peak_gib:.1f} GiB"
        progress(f"{name}: {side}, recompute {keep}: {rate}, loss {found.loss:.4f}, norm {found.norm:.3f}")
        return found

    def agree(self, name: str, found: Step, wanted: Step, rival: Rival) -> None:
        """Compare our step with a rival's from the same parameters."""
        self.near(f"{name}, loss, relative difference to {rival}", found.loss / wanted.loss - 1, 0.001)
        self.near(f"{name}, gradient norm, relative difference to {rival}", found.norm / wanted.norm - 1, 0.02)

    def near(self, what: str, apart: float, limit: float) -> None:
        """Stop where the sides do not compute the same."""
        check = Check(what, abs(apart), limit)
        self.checks.append(check)
        if not check.passed:
            sys.exit(f"{check.what} is {apart:.3g}, above {limit}; times of different computations mean nothing")

    def packed(self) -> None:
        """Packs of documents as they come: every side in turn, on every pack."""
        draw, seed, count = self.sides.pack, self.arguments.seed, 1 if self.arguments.quick else self.arguments.packs
        places = {source: self.arguments.lengths if source == "wikipedia" else source for source in SOURCES}
        packs = {source: drawn_packs(place, count + 2, seed, self.tokens) for source, place in places.items()}
        warm = [draw(each.pop()) for each in packs.values() for _ in range(2)]  # compilers see two lengths of a kind
        built = self.sides.warm_up(self.tokens, lambda done, total: done % 50 or progress(f"{done}/{total} kernels"))
        progress(f"{built} kernels are built")
        ours, plain = self.sides.errors(min(warm, key=lambda pack: max(pack.lengths)))  # float32 needs room
        self.near(f"packed, error of hidden states ({ours:.3g}) over that of plain transformers", ours / plain, 2.0)
        keep = self._what_fits(warm[0])
        for pack in warm:
            steps = {side: self.step("warm-up", side, pack, keep) for side in (*self.rivals, OURS)}
            for rival in self.rivals:
                self.agree("packed", steps[OURS], steps[rival], rival)
        seconds: dict[str, list[dict[str, float]]] = {source: [] for source in SOURCES}
        for source, number in itertools.product(SOURCES, range(count)):
            pack = draw(packs[source][number])
            name, order = f"{source} {number}, {len(pack.lengths)} documents", [OURS, *self.rivals]
            steps = {str(side): self.step(name, side, pack, keep) for side in order[:: 1 if number % 2 else -1]}
            seconds[source].append({side: each.seconds for side, each in steps.items()})
            self.figures[f"packed, {name}"] = {side: each._asdict() for side, each in steps.items()}
        self.figures["packed"] = {"recompute": keep, "sources": {name: compare(each) for name, each in seconds.items()}}
        for source, found in self.figures["packed"]["sources"].items():
            what = f"{source}, packs of {self.tokens} tokens, times as fast as"
            self.checks.append(Check(f"{what} the strongest rival", found["strongest"][1], 1.0, at_least=True))
            self.checks.append(Check(f"{what} the median of rivals", found["median of rivals"][1], 1.1, at_least=True))

    def _what_fits(self, pack: Pack) -> str:
        """Keep everything for the backward, or nothing where that does not fit the first rival."""
        try:
            self.step("warm-up", self.rivals[0], pack, "none")
        except torch.OutOfMemoryError:
            return "full"
        return "none"

    def alone(self, name: str, side: Rival | str, keep: str, pack: Pack) -> Step:
        """The fastest step of one document: the first also builds what its length needs."""
        self.step("warm-up", side, self.sides.pack([self.long_tokens // 8]), keep)
        steps = [self.step(f"one document, {name}", side, pack, keep) for _ in range(self.arguments.repeats)]
        fastest = min(steps, key=lambda step: step.seconds)
        self.figures[f"one document, {name}"] = {"all": [each.seconds for each in steps], **fastest._asdict()}
        return fastest

    def long(self) -> None:
        """One document, side by side: the fastest rival with full checkpointing."""
        pack = self.sides.pack([self.long_tokens])
        rivals = [DOCUMENTS, *(rival for rival in self.rivals if rival == Rival("fa4", "compiled"))]
        steps = {rival: self.alone(str(rival), rival, "full", pack) for rival in rivals}
        fastest = min(steps, key=lambda rival: steps[rival].seconds)
        for keep, target in (("full", 1.0), ("selective", 1.15)):
            found = self.alone(keep, OURS, keep, pack)
            self.agree(f"one document, {keep}", found, steps[fastest], fastest)
            what = f"one document of {self.long_tokens} tokens, {keep} to {fastest} with full checkpointing"
            self.checks.append(Check(what, steps[fastest].seconds / found.seconds, target, at_least=True))

    def mfu(self) -> None:
        """The share of the GPU's peak that the model's own arithmetic is."""
        if "one document, selective" not in self.figures:
            self.alone("selective", OURS, "selective", self.sides.pack([self.long_tokens]))
        c = self.sides.config
        width = c.num_hidden_layers * c.num_attention_heads * c.head_dim
        forward = 4 * width * self.long_tokens**2 / 2  # two products; a causal mask leaves half of them
        work = 6 * self.size * self.long_tokens + 3 * forward
        share = work / self.figures["one document, selective"]["seconds"] / PEAK
        self.checks.append(Check(f"causal MFU at {self.long_tokens} tokens, %", 100 * share, 52, at_least=True))

    def profile(self) -> None:
        """Where the time of a pack goes: the GPU's kernels by what they are for, ours beside the strongest rivals."""
        pack = self.sides.pack(drawn_packs(self.arguments.lengths, 1, self.arguments.seed, self.tokens)[0])
        self.figures["profile"] = found = {}
        for side in (OURS, *(rival for rival in self.rivals if rival.layers != "plain")):
            for _ in range(2):
                self.step("warm-up", side, pack, "none")
            found[str(side)] = shares(profiled(partial(self.step, "profiled", side, pack, "none")))
        times = found[OURS]["ms"]
        share = times["matrix products"] / times["whole step"]
        what = f"matrix products, share of a step of {self.tokens} tokens"
        self.checks.append(Check(what, share, 0.8, at_least=True))
        rows = [(kind, *(f"{side['ms'][kind]:.1f}" for side in found.values())) for kind in times]
        show("milliseconds of kernels in a step", ("", *found), rows)


def compare(packs: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the quartiles of rivals' times over ours, pack by pack: of each, of the strongest, of their median."""
    ratios = [{name: each / pack[OURS] for name, each in pack.items() if name != OURS} for pack in packs]
    columns = {name: [pack[name] for pack in ratios] for name in ratios[0]}
    columns["strongest"] = [min(pack.values()) for pack in ratios]
    columns["median of rivals"] = [median(pack.values()) for pack in ratios]
    return {name: np.quantile(values, [0.25, 0.5, 0.75]).tolist() for name, values in columns.items()}
