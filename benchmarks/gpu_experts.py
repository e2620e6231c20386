"""Experts of Qwen3-30B-A3B's shapes on one GPU, beside dense matrix products of the same FLOPs.

Needs torch and a CUDA device; `--quick` runs anywhere, with small shapes. All in bf16, forward and backward, the sides
in turn: a ratio is that of neighbouring runs, and the median of them counts.

    python benchmarks/gpu_experts.py --out benchmarks/results/gpu_experts.json

products  the grouped products of gate, up and down alone, rows sorted already, beside the faster of two dense ones: the
          same rows times one expert's matrix, and a row per token times matrices as wide as its experts together
layers    whole layers, router, sort, gate and weighted sums included, beside feed-forwards of the same FLOPs; nothing
          is compiled on either side
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import record
import torch
from common import Check, options, progress, show, show_checks
from experts_sides import Side, layers, products

from seqloom.describe import ModelSpec

MODEL, WANTED = "qwen3-30b-a3b", 0.9
TOKENS, SKEWS = (4_096, 8_192, 16_384, 32_768), (0.0, 1.0)
"""Tokens of a pack; standard deviations of the experts' log popularity, of which the targets take the first."""


def timed(side: Side, device: torch.device) -> float:
    """Seconds of one run."""
    if device.type == "cpu":
        start = time.perf_counter()
        side()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    side()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def in_turns(sides: Mapping[str, Side], device: torch.device, turns: int) -> dict[str, list[float]]:
    """Seconds of every side, turn by turn; the first two turns warm up and do not count."""
    rounds = [{name: timed(side, device) for name, side in sides.items()} for _ in range(turns + 2)]
    return {name: [each[name] for each in rounds[2:]] for name in sides}


def compare(found: dict[str, list[float]], flops: float) -> dict[str, Any]:
    """TFLOP/s of every side, and the rate of the first over that of the fastest other one, median of the turns."""
    own, *others = found.values()
    ratio = statistics.median(min(each) / mine for mine, *each in zip(own, *others, strict=True))
    return {"tflops": {name: flops / statistics.median(times) / 1e12 for name, times in found.items()}, "ratio": ratio}


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--layers", type=int, default=4, help="of the stack; the model has 48")
    parser.add_argument("--turns", type=int, default=20, help="runs of every side that count")
    measure(parser.parse_args(argv))


def measure(arguments: argparse.Namespace) -> None:
    """Measure all numbers of tokens."""
    if not arguments.quick:
        record.require_gpu()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    spec, every = ModelSpec.load(MODEL), TOKENS
    if arguments.quick:
        spec, every = replace(spec, hidden=64, experts=8, active_experts=2, expert_ffn=32), (128,)
    torch.manual_seed(arguments.seed)
    figures: list[dict[str, Any]] = []
    checks: list[Check] = []
    for tokens in every:
        flops = 6.0 * tokens * spec.expert_parameters(spec.active_experts)
        for skew in SKEWS:
            sides, unequal = products(spec, tokens, skew, device, arguments.seed)
            found = compare(in_turns(sides, device, arguments.turns), flops)
            figures.append({"part": "products", "tokens": tokens, "busiest expert over mean": unequal, **found})
            if skew == SKEWS[0]:
                checks.append(Check(f"{tokens} tokens, products / dense", found["ratio"], WANTED, at_least=True))
        sides = layers(spec, tokens, device, arguments.layers)
        found = compare(in_turns(sides, device, arguments.turns), arguments.layers * flops)
        figures.append({"part": "layers", "tokens": tokens, **found})
        checks.append(Check(f"{tokens} tokens, layers / dense", found["ratio"], WANTED, at_least=True))
        progress(f"{tokens} tokens: {checks[-2].measured:.3f} products, {checks[-1].measured:.3f} layers")
        shapes = {"hidden": spec.hidden, "experts": spec.experts, "active": spec.active_experts, "ffn": spec.expert_ffn}
        result = {"model": MODEL, **shapes, "runs": figures}
        record.write(arguments.out, __file__, arguments, result, checks, lengths="none: packs of tokens")
    rows = [
        (each["part"], f"{each['tokens']:,}", name, f"{rate:.0f}", f"{each['ratio']:.3f}")
        for each in figures
        for name, rate in each["tflops"].items()
    ]
    show(f"{MODEL}, forward and backward", ("", "tokens", "side", "TFLOP/s", "ratio"), rows)
    show_checks(checks)


if __name__ == "__main__":
    main()
