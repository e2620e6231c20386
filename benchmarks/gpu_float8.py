"""Linear layers in float8 beside bfloat16 on one GPU: the time of training steps, and how the loss falls.

    python benchmarks/gpu_float8.py --lengths LENGTHS --out benchmarks/results/gpu_float8.json

speed    steps of Llama 3 8B's configuration, layers compiled, packs of 32K tokens with lengths that the process has not
         seen, both in turn from the same parameters (the learning rate is 0); selective checkpointing
curve    300 steps of a small model on the sources of Python's standard library, as bytes. The noise of a loss is how
         far runs in bfloat16 with other random parameters are apart at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import record
import torch
from common import Check, options, progress, show, show_checks
from gpu_packs import drawn_packs
from training_sides import FLOAT8, OURS, Sides

from seqloom.data import StoreWriter
from seqloom.dist import Communicators, JobRank, TorchTransport
from seqloom.dist.process_group import init_process_group
from seqloom.plan import GroupFamily
from seqloom.train.config import Config
from seqloom.train.logging import read_steps
from seqloom.train.setup import RunSetup
from seqloom.train.trainer import Trainer

TOKENS, PACKS, BYTES, LAST = 32_768, 5, 8_000_000, 50
"""Tokens of a pack, packs that count, bytes of text, last steps of which the mean is taken."""


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


CONFIG = """
[run]
steps = {steps}
output = "{name}"
[model]
spec = "spec.json"
dtype = "bfloat16"
[data]
source = "store"
tokens = {tokens}
max_length = {longest}
[plan]
capacity = {tokens}
[optimiser]
lr = 6e-4
[schedule]
warmup = {warmup}
kind = "constant"
"""


def write_library(folder: Path, longest: int, seed: int) -> None:
    """Write the sources of Python's standard library as documents of bytes, of very unequal length."""
    draw, total = np.random.default_rng(seed), 0
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.int64)
            while len(text) > 1 and total < BYTES:
                length = int(np.clip(draw.lognormal(6, 1.2), 16, longest))
                writer.add(text[:length])
                text, total = text[length:], total + length


@contextmanager
def job_of_one() -> Iterator[TorchTransport]:
    """Make this process the only rank of a job."""
    init_process_group(JobRank(0, 1, 0, 1), store=torch.distributed.HashStore())
    communicators = Communicators(GroupFamily(1, 1))
    communicators.warm_up()
    yield TorchTransport(communicators)
    communicators.close()
    torch.distributed.destroy_process_group()


def train(transport: TorchTransport, device: torch.device, folder: Path, name: str, **model: object) -> list[float]:
    """Train one model in this process; return the losses."""
    settings = [f"run.output={folder / name}", *(f"model.{key}={json.dumps(value)}" for key, value in model.items())]
    config = Config.load(folder / "run.toml", settings)
    with Trainer(RunSetup.load(config, 1), transport, device=device) as trainer:
        trainer.train()
    losses = [step.loss for step in read_steps(config.metrics)]
    progress(f"{name}: loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last of {len(losses)}")
    return losses


def curve(arguments: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], list[Check]]:
    """Train in bfloat16 from several random models, and in float8 from the same ones, on the same batches."""
    sizes = {"layers": 12, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "ffn": 4096}
    steps, tokens, seeds = arguments.steps, 16_384, range(3)
    if arguments.quick:
        sizes = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512}
        steps, tokens, seeds = 3, 1_024, range(1)
    curves: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, job_of_one() as transport:
        folder = Path(name)
        write_library(folder, tokens // 4, arguments.seed)
        (folder / "spec.json").write_text(json.dumps(sizes | {"gated": True, "vocabulary": 257, "tied": True}))
        sized = {"steps": steps, "tokens": tokens, "longest": tokens // 4, "warmup": min(20, steps)}
        (folder / "run.toml").write_text(CONFIG.format(**sized, name="run"))
        for kind, seed in itertools.product(("bfloat16", "float8"), seeds):
            options = {"seed": seed, "compile": not arguments.quick, "float8": kind == "float8"}
            curves[kind, seed] = train(transport, device, folder, f"{kind}-{seed}", **options)
    plain, changed = ([fmean(curves[kind, seed][-LAST:]) for seed in seeds] for kind in ("bfloat16", "float8"))
    noise, apart = max(plain) - min(plain), max(abs(a - b) for a, b in zip(plain, changed, strict=True))
    figures: dict[str, Any] = {f"{kind}, seed {seed}": losses for (kind, seed), losses in curves.items()}
    figures |= {"mean loss at the end": {"bfloat16": plain, "float8": changed}, "noise": noise}
    what = "mean loss at the end, float8 to bfloat16 over the noise of seeds"
    return figures, [] if arguments.quick else [Check(what, apart / noise, 1.0)]


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
