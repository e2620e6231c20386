"""The curve of gpu_float8.py: a small model trained on the sources of Python's standard library, as bytes."""

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
import torch
from common import Check, progress

from seqloom.data import StoreWriter
from seqloom.dist import Communicators, JobRank, TorchTransport
from seqloom.dist.process_group import init_process_group
from seqloom.plan import GroupFamily
from seqloom.train.config import Config
from seqloom.train.logging import read_steps
from seqloom.train.setup import RunSetup
from seqloom.train.trainer import Trainer

BYTES, LAST = 8_000_000, 50
"""Bytes of text, last steps of which the mean is taken."""
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
