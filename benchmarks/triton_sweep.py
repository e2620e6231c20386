"""Block sizes of the Triton attention kernels, timed on this GPU beside torch's varlen flash attention.

Needs torch, triton and a CUDA device. Every kernel is timed by itself (median of 10), for packs of equal documents, a
mix like Wikipedia's, and full tiles of a ring; what is slow to compile is compiled beforehand, in parallel.

    PYTHONPATH=src python benchmarks/triton_sweep.py --seconds 500 --output sweep.jsonl
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from attention_timing import DIM, make_packs, median_ms, pairs_of, tensors_for, varlen_ms

from seqloom.attention.kernels.interface import AttentionShape, Saved
from seqloom.attention.kernels.triton_attention import Config, TritonSegments
from seqloom.attention.masks import Segments

FLOPS = {"forward": 4, "dq": 6, "dkdv": 8, "backward": 10}  # per visible pair and width; of matmuls that are run
SHAPES = [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 4, 3)]
CANDIDATES = {
    "forward": [
        *SHAPES,
        (128, 32, 8, 2),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 8, 4),
    ],
    "dq": [*SHAPES, (128, 32, 8, 2), (64, 128, 8, 2), (128, 128, 8, 1)],
    "dkdv": [*SHAPES, (128, 32, 8, 2), (64, 128, 8, 2), (32, 64, 4, 3), (128, 64, 8, 1)],
}


def kernel_with(config: Config) -> TritonSegments:
    """All kernels with one Config; documents of at most half a tile share tiles."""
    return TritonSegments(
        pick=lambda kind, dim, dtype, length: replace(config, join=True) if 2 * length <= config.rows else config
    )


def call_of(kind: str, config: Config, segments: Segments, heads: tuple[int, int], tensors, saved=None):
    """One kernel ready to be timed. `saved` is (out, lse)."""
    shape = AttentionShape(*heads, DIM, torch.bfloat16, torch.device("cuda"), DIM**-0.5)
    prepared = kernel_with(config).prepare(segments, shape)
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    if kind == "forward":
        return lambda: prepared.forward(q, k, v)
    out, lse = saved or (dout, torch.zeros(heads[0], len(q), device="cuda"))
    delta = (out.float() * dout.float()).sum(-1).T.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    inputs = Saved(q, k, v, out, lse)
    if kind == "dq":
        return lambda: prepared.dq_into(dout, inputs, delta, dq)
    return lambda: prepared.dkdv_into(dout, inputs, delta, dk, dv)


def compile_one(job: tuple[str, Config, tuple[int, int]]) -> None:
    """Run a kernel once on little, so that its binaries are in Triton's cache."""
    kind, config, heads = job
    for segments in (Segments.packed([20, 20, 200]), Segments.of([(0, 200, 0, 200, 0)], causal=False)):
        try:
            call_of(kind, config, segments, heads, tensors_for(segments, heads))()
        except Exception as error:  # too much shared memory: the sweep records it
            print(f"{kind} {config}: {type(error).__name__}", flush=True)


def sweep_pack(name: str, segments: Segments, heads: tuple[int, int], deadline: float, write) -> None:
    tensors, work = tensors_for(segments, heads), pairs_of(segments) * heads[0] * DIM
    head = {"pack": name, "heads": heads[0], "kv_heads": heads[1]}
    forward, backward = varlen_ms(segments, tensors)
    for kind, ms in (("forward", forward), ("backward", backward)):
        write(head | {"kernel": "varlen", "kind": kind, "ms": ms, "tflops": FLOPS[kind] * work / ms / 1e9})
    saved = call_of("forward", Config(64, 64, 4, 2), segments, heads, tensors)()
    best: dict[str, float] = {}
    for kind, shapes in CANDIDATES.items():
        for config in (Config(*shape) for shape in shapes):
            if time.monotonic() > deadline:
                return
            try:
                ms = median_ms(call_of(kind, config, segments, heads, tensors, saved))
            except Exception as error:
                write(head | {"kernel": "triton", "kind": kind, **asdict(config), "error": type(error).__name__})
                continue
            best[kind] = min(ms, best.get(kind, ms))
            write(
                head
                | {
                    "kernel": "triton",
                    "kind": kind,
                    **asdict(config),
                    "ms": ms,
                    "tflops": FLOPS[kind] * work / ms / 1e9,
                }
            )
    ms = best["dq"] + best["dkdv"]
    rates = {
        "tflops": FLOPS["backward"] * work / ms / 1e9,
        "times_varlen": (forward + backward) / (ms + best["forward"]),
    }
    write(head | {"kernel": "triton best", "kind": "backward", "ms": ms, **rates, "forward_ms": best["forward"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=500, help="stop starting new timings after this")
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--packs", help="names with commas between; all if left out")
    parser.add_argument("--heads", default="32/32,32/8")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile beforehand; 0: none")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    all_heads = [tuple(int(number) for number in pair.split("/")) for pair in arguments.heads.split(",")]
    jobs = [(kind, Config(*shape), heads) for heads in all_heads for kind in CANDIDATES for shape in CANDIDATES[kind]]
    if arguments.workers:
        with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
            pool.map(compile_one, jobs, chunksize=1)
    print(f"compiled after {time.monotonic() - deadline + arguments.seconds:.0f} s", flush=True)
    packs = make_packs(arguments.tokens)
    names = arguments.packs.split(",") if arguments.packs else list(packs)
    with arguments.output.open("w") as file:

        def write(record: dict) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(
                " ".join(f"{value:.3f}" if isinstance(value, float) else f"{value}" for value in record.values()),
                flush=True,
            )

        for heads in all_heads:
            for name in names:
                sweep_pack(name, packs[name], heads, deadline, write)


if __name__ == "__main__":
    main()
