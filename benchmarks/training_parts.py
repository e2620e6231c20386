"""The parts of gpu_training.py: packs, a long document, the share of the peak."""

from __future__ import annotations

import argparse
import itertools
import sys
from statistics import mean, median

import torch
from common import Check, progress
from gpu_packs import drawn_packs
from training_inputs import Pack, Step
from training_sides import Sides

SOURCES = ("wikipedia", "prolong", "github")
PEAK = 989e12
FEW = 12
"""Where a pack has more documents, a call for each is measured on a source's first pack only: every new length costs
cuDNN a plan, and the GPU waits for the host."""


class Run:
    """The sides, and what was found so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.tokens, self.long_tokens = (4096, 256) if arguments.quick else (32_768, 131_072)
        model = "tiny" if arguments.quick else arguments.model
        self.sides = Sides(model, self.device, compiled=arguments.compile)
        self.size = sum(each.numel() for each in self.sides.parameters)
        self.figures: dict = {"model": {"name": model, "parameters": self.size}, "compiled": arguments.compile}
        self.checks: list[Check] = []
        progress(f"{model}: {self.size / 1e9:.2f} billion parameters")

    def step(self, name: str, side: str, pack: Pack, keep: str) -> Step:
        """One step, with a line of progress."""
        found = self.sides.run(side, pack, keep)
        rate = f"{found.seconds:.3f} s, {len(pack.ids) / found.seconds:,.0f} tokens/s, {found.peak_gib:.1f} GiB"
        progress(f"{name}: {side}, recompute {keep}: {rate}, loss {found.loss:.4f}, norm {found.norm:.3f}")
        return found

    def agree(self, name: str, found: Step, wanted: Step) -> None:
        """Compare our step with plain transformers'."""
        self.near(f"{name}, loss, relative difference to", found.loss / wanted.loss - 1, 0.01)
        self.near(f"{name}, gradient norm, relative difference to", found.norm / wanted.norm - 1, 0.05)

    def near(self, what: str, apart: float, limit: float) -> None:
        """Stop where the sides do not compute the same."""
        check = Check(f"{what} plain transformers", abs(apart), limit)
        self.checks.append(check)
        if not check.passed:
            sys.exit(f"{check.what} is {apart:.3g}, above {limit}; times of different computations mean nothing")

    def packed(self) -> None:
        """Packs of documents as they come."""
        rivals = ["flex", "documents"] if self.device.type == "cuda" else ["documents"]
        extra = [f"{rivals[0]} compiled"] if self.arguments.compile == "both" else []
        draw, seed, count = self.sides.pack, self.arguments.seed, 1 if self.arguments.quick else self.arguments.packs
        places = {source: self.arguments.lengths if source == "wikipedia" else source for source in SOURCES}
        packs = {source: drawn_packs(place, count + 1, seed, self.tokens) for source, place in places.items()}
        warm = [draw(each.pop()) for each in packs.values()]
        built = self.sides.warm_up(self.tokens, lambda done, total: done % 50 or progress(f"{done}/{total} kernels"))
        progress(f"{built} kernels are built")
        ours, plain = self.sides.errors(min(warm, key=lambda pack: max(pack.lengths)))  # float32 needs room
        self.near(f"packed, error of hidden states ({ours:.3g}) over that of", ours / plain, 2.0)
        keep = "none"
        try:
            self.step("warm-up", rivals[0], warm[0], keep)
        except torch.OutOfMemoryError:
            keep = "full"
        for pack in warm:
            wanted, *_, found = (self.step("warm-up", side, pack, keep) for side in (rivals[0], *extra, "ours"))
            self.agree("packed", found, wanted)
        ratios: dict[str, list[float]] = {name: [] for name in (*SOURCES, *extra)}
        for source, number in itertools.product(SOURCES, range(count)):
            pack = draw(packs[source][number])
            name, among = f"{source} {number}, {len(pack.lengths)} documents", list(rivals)
            if len(pack.lengths) > FEW and number > 0:
                among.remove("documents")
            order = ["ours", *among, *extra][:: 1 if number % 2 else -1]
            steps = {side: self.step(name, side, pack, keep) for side in order}
            ratios[source].append(min(steps[side].seconds for side in among) / steps["ours"].seconds)
            for side in extra:
                ratios[side].append(steps[side].seconds / steps["ours"].seconds)
            self.figures[f"packed, {name}"] = {side: each._asdict() for side, each in steps.items()}
        every = [ratio for source in SOURCES for ratio in ratios[source]]
        means = {name: mean(each) for name, each in ratios.items()}
        self.figures["packed"] = {"recompute": keep, "means": means, "median": median(every), "ratios": ratios}
        what = f"packs of {self.tokens} tokens, to the better of flex and a call per document, mean"
        self.checks.append(Check(what, mean(every), 1.25, at_least=True))

    def alone(self, name: str, side: str, keep: str, pack: Pack) -> Step:
        """The fastest step of one document: the first also builds what its length needs."""
        self.step("warm-up", side, self.sides.pack([self.long_tokens // 8]), keep)
        steps = [self.step(f"one document, {name}", side, pack, keep) for _ in range(self.arguments.repeats)]
        fastest = min(steps, key=lambda step: step.seconds)
        self.figures[f"one document, {name}"] = {"all": [each.seconds for each in steps], **fastest._asdict()}
        return fastest

    def long(self) -> None:
        """One document, side by side."""
        pack = self.sides.pack([self.long_tokens])
        plain = self.alone("plain transformers", "documents", "full", pack)
        if self.arguments.compile == "both":
            self.alone("plain transformers, compiled", "documents compiled", "full", pack)
        for keep, target in (("full", 1.0), ("selective", 1.15)):
            found = self.alone(keep, "ours", keep, pack)
            self.agree(f"one document, {keep}", found, plain)
            what = f"one document of {self.long_tokens} tokens, {keep} to plain transformers with full checkpointing"
            self.checks.append(Check(what, plain.seconds / found.seconds, target, at_least=True))

    def mfu(self) -> None:
        """The share of the GPU's peak that the model's own arithmetic is."""
        if "one document, selective" not in self.figures:
            self.alone("selective", "ours", "selective", self.sides.pack([self.long_tokens]))
        c = self.sides.config
        width = c.num_hidden_layers * c.num_attention_heads * c.head_dim
        forward = 4 * width * self.long_tokens**2 / 2  # two products; a causal mask leaves half of them
        work = 6 * self.size * self.long_tokens + 3 * forward
        share = work / self.figures["one document, selective"]["seconds"] / PEAK
        self.checks.append(Check(f"causal MFU at {self.long_tokens} tokens, %", 100 * share, 42, at_least=True))

    def profile(self) -> None:
        """Where the time of a pack goes: the GPU's kernels by their time, side by side."""
        pack = self.sides.pack(drawn_packs(self.arguments.lengths, 1, self.arguments.seed, self.tokens)[0])
        for side in ("ours", "flex"):
            self.step("warm-up", side, pack, "none")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                self.step("profiled", side, pack, "none")
            print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=90))
