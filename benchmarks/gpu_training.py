"""Training steps of a transformers model on one GPU, beside plain transformers with the same loss and optimiser.

Needs torch, transformers and a CUDA device of compute capability 9.0 or more; `--quick` runs anywhere.

    python benchmarks/gpu_training.py --lengths LENGTHS --out benchmarks/results/gpu_training.json

packed   packs of 32K tokens with lengths that the process has not seen, beside the better of flex attention and one
         call per document. Everything is kept for backward on both sides, or, where that does not fit, nothing.
long     one document of 128K tokens, beside SDPA with full gradient checkpointing
mfu      6 x parameters x tokens + 3 x causal attention forward, over time and 989 TFLOP/s
"""

from __future__ import annotations

import argparse
import sys
from statistics import mean, median

import record
from common import Check, options, progress, show, show_checks
from gpu_packs import drawn_packs

PARTS = ("packed", "long", "mfu")
SOURCES = ("wikipedia", "prolong", "github")
PEAK = 989e12
FEW = 12
"""Where a pack has more documents, a call for each is measured on a source's first pack only: every new length costs
cuDNN a plan, and the GPU waits for the host."""


class Run:
    """The sides, and what was found so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        import training_sides

        self.arguments, self.out_of_memory = arguments, torch.OutOfMemoryError
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.tokens, self.long_tokens = (4096, 1024) if arguments.quick else (32_768, 131_072)
        self.sides = training_sides.Sides("tiny" if arguments.quick else arguments.model, self.device)
        self.size = sum(each.numel() for each in self.sides.parameters)
        self.figures: dict = {"model": {"name": arguments.model, "parameters": self.size}}
        self.checks: list[Check] = []
        progress(f"{arguments.model}: {self.size / 1e9:.2f} billion parameters")

    def step(self, name: str, side: str, pack, keep: str):
        """One step, with a line of progress."""
        found = self.sides.run(side, pack, keep)
        rate = f"{found.seconds:.3f} s, {len(pack.ids) / found.seconds:,.0f} tokens/s, {found.peak_gib:.1f} GiB"
        progress(f"{name}: {side}, recompute {keep}: {rate}, loss {found.loss:.4f}, norm {found.norm:.3f}")
        return found

    def agree(self, name: str, found, wanted) -> None:
        """Stop where the sides do not compute the same."""
        for what, limit in (("loss", 0.01), ("norm", 0.05)):
            apart = abs(getattr(found, what) / getattr(wanted, what) - 1)
            self.checks.append(Check(f"{name}, {what} beside plain transformers: relative difference", apart, limit))
        if not all(check.passed for check in self.checks):
            show_checks(self.checks)
            sys.exit(f"{name}: the sides do not compute the same, so their times mean nothing")

    def packed(self) -> None:
        """Packs of documents as they come."""
        rivals = ("flex", "documents") if self.device.type == "cuda" else ("documents",)
        draw, seed, count = self.sides.pack, self.arguments.seed, 1 if self.arguments.quick else self.arguments.packs
        places = {source: self.arguments.lengths if source == "wikipedia" else source for source in SOURCES}
        built = self.sides.warm_up(self.tokens, lambda done, total: done % 50 or progress(f"{done}/{total} kernels"))
        progress(f"{built} kernels are built")
        packs = {source: drawn_packs(place, count + 1, seed, self.tokens) for source, place in places.items()}
        warm = [draw(each.pop()) for each in packs.values()]
        apart, keep = self.sides.difference(warm[-1]), "none"
        self.checks.append(Check("packed, hidden states beside plain transformers: relative difference", apart, 0.03))
        try:
            self.step("warm-up", rivals[0], warm[0], keep)
        except self.out_of_memory:
            keep = "full"
        for pack in warm:
            wanted, found = (self.step("warm-up", side, pack, keep) for side in (rivals[0], "ours"))
            self.agree("packed", found, wanted)
        ratios: dict[str, list[float]] = {source: [] for source in SOURCES}
        for source in SOURCES:
            for number, lengths in enumerate(packs[source]):
                pack, name = draw(lengths), f"{source} {number}, {len(lengths)} documents"
                among = [each for each in rivals if each != "documents" or len(lengths) <= FEW or number == 0]
                steps = {side: self.step(name, side, pack, keep) for side in ("ours", *among)}
                ratios[source].append(min(steps[side].seconds for side in among) / steps["ours"].seconds)
                self.figures[f"packed, {name}"] = {side: each._asdict() for side, each in steps.items()}
        every = [ratio for each in ratios.values() for ratio in each]
        means = {source: mean(each) for source, each in ratios.items()}
        self.figures["packed"] = {"recompute": keep, "means": means, "median": median(every), "ratios": ratios}
        what = f"packs of {self.tokens} tokens, to the better of flex and a call per document, mean"
        self.checks.append(Check(what, mean(every), 1.25, at_least=True))

    def alone(self, name: str, side: str, keep: str, pack) -> list:
        """Steps of one document; the first also builds what its length needs, so the fastest counts."""
        self.step("warm-up", side, self.sides.pack([self.long_tokens // 8]), keep)
        steps = [self.step(f"one document, {name}", side, pack, keep) for _ in range(self.arguments.repeats)]
        fastest = min(steps, key=lambda step: step.seconds)
        self.figures[f"one document, {name}"] = {"all": [each.seconds for each in steps], **fastest._asdict()}
        return fastest

    def long(self) -> None:
        """One document, side by side."""
        pack = self.sides.pack([self.long_tokens])
        plain = self.alone("plain transformers", "documents", "full", pack)
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


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas between")
    parser.add_argument("--model", default="qwen3-1.7b", help="qwen3-1.7b or llama-1.3b")
    parser.add_argument("--packs", type=int, default=4, help="per source of lengths")
    parser.add_argument("--repeats", type=int, default=2, help="steps of the long document")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    arguments = parser.parse_args(argv)
    if not record.has_gpu() and not arguments.quick:
        sys.exit("this benchmark needs torch and a CUDA device")
    run = Run(arguments)
    for part in arguments.parts.split(","):
        getattr(run, part)()
        record.write(arguments.out, __file__, arguments, run.figures, run.checks)
    rows = [(name, f"{ratio:.3f}") for name, ratio in run.figures.get("packed", {}).get("means", {}).items()]
    show("time of plain transformers / time of seqloom", ("packs", "mean"), rows)
    show_checks(run.checks)


if __name__ == "__main__":
    main()
