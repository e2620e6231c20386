"""Linear layers in float8 beside bfloat16 on one GPU: the time of training steps, and how the loss falls.

    python benchmarks/gpu_float8.py --lengths LENGTHS --out benchmarks/results/gpu_float8.json

speed    steps of Llama 3 8B's configuration, layers compiled, packs of 32K tokens with lengths that the process has not
         seen, both in turn from the same parameters (the learning rate is 0); selective checkpointing
curve    300 steps of a small model on the sources of Python's standard library, as bytes. The noise of a loss is how
         far runs in bfloat16 with other random parameters are apart at the end.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import record
import torch
from common import Check, options, progress, show, show_checks
from float8_curve import curve
from gpu_packs import drawn_packs
from training_sides import FLOAT8, OURS, Sides

TOKENS, PACKS = 32_768, 5
"""Tokens of a pack, packs that count."""


def speed(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[Check]]:
    """Time whole steps, pack by pack."""
    model, tokens = ("small", 2_048) if arguments.quick else ("llama3-8b", TOKENS)
    sides = Sides(model, device, compiled=not arguments.quick)
    packs = drawn_packs(arguments.lengths, (1 if arguments.quick else PACKS) + 2, arguments.seed, tokens)
    ratios, steps = [], []
    for number, lengths in enumerate(packs):
        pack = sides.pack(lengths)
        order = [OURS, FLOAT8][:: 1 if number % 2 else -1]
        found = {side: sides.run(side, pack, "selective") for side in order}
        progress("; ".join(f"{side}: {each.seconds:.3f} s, loss {each.loss:.4f}" for side, each in found.items()))
        if number >= 2:  # compilers see two packs
            ratios.append(found[OURS].seconds / found[FLOAT8].seconds)
            steps.append({side: each._asdict() for side, each in found.items()})
    quartiles = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
    apart = max(abs(each[FLOAT8]["loss"] / each[OURS]["loss"] - 1) for each in steps)
    checks = [
        Check(f"{model}, packs of {tokens} tokens, float8 over bfloat16", quartiles[1], 1.15, at_least=True),
        Check("largest relative difference of a loss", apart, 0.01),
    ]
    return {"model": model, "bfloat16 : float8, quartiles": quartiles, "steps": steps}, checks


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write."""
    parser = options(__doc__)
    parser.add_argument("--parts", default="speed,curve", help="which, with commas between")
    parser.add_argument("--steps", type=int, default=300, help="of a curve")
    arguments = parser.parse_args(argv)
    if not arguments.quick:
        record.require_gpu()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    figures: dict[str, Any] = {}
    checks: list[Check] = []
    for part in arguments.parts.split(","):
        found, more = {"speed": speed, "curve": curve}[part](arguments, device)
        figures[part], checks = found, checks + more
        record.write(arguments.out, __file__, arguments, figures, checks)
    if "curve" in figures:
        rows = [(name, *map("{:.4f}".format, ends)) for name, ends in figures["curve"]["mean loss at the end"].items()]
        show("mean loss of the last steps, by seed", ("", *map(str, range(len(rows[0]) - 1))), rows)
    show_checks(checks)


if __name__ == "__main__":
    main()
