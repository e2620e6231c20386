"""Packed documents on one GPU, forward and backward, beside what users call today. Every pack has new lengths.

Needs torch and a CUDA device of compute capability 9.0 or more; without them it says so and stops. FlashAttention-4 is
a rival where it is installed.

    python benchmarks/gpu_attention.py --heads 32/8 --lengths LENGTHS --out benchmarks/results/gpu_attention_gqa.json
    python benchmarks/gpu_attention.py --heads 32/32 --lengths LENGTHS --out benchmarks/results/gpu_attention_mha.json
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from statistics import mean

import numpy as np
import record
from common import Check, options, progress, show, show_checks
from gpu_packs import TOKENS, drawn_packs, uniform_pack

UNIFORM = (1_024, 2_048, 4_096, 8_192, 32_768, 131_072)
SOURCES = ("wikipedia", "prolong", "github", "short")


class Arena:
    """The contestants for one head count."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        import gpu_rivals
        import torch

        from seqloom.attention.kernels.dispatch import default_dispatcher
        from seqloom.attention.kernels.interface import AttentionShape

        self.shape = AttentionShape(heads, kv_heads, 128, torch.bfloat16, torch.device("cuda", 0), 128**-0.5)
        self.kernels = default_dispatcher(self.shape.device)
        self.inputs = gpu_rivals.tensors(TOKENS, heads, kv_heads)
        self.rivals, self.flex, self.has_fa4 = gpu_rivals, gpu_rivals.Flex(), find_spec("flash_attn") is not None

    def warm_up(self) -> tuple[int, float]:
        """(shapes, seconds) of building the grid."""
        import torch

        from seqloom.attention.kernels.interface import KernelUse

        begin = time.perf_counter()
        builds = self.kernels.builds(self.shape, KernelUse(TOKENS))
        for done, build in enumerate(builds, 1):
            build()
            if done % 50 == 0:
                progress(f"{done}/{len(builds)} shapes")
        torch.cuda.synchronize()
        return len(builds), time.perf_counter() - begin

    def ours(self, lengths: list[int]):
        """The engine on one rank. Index work is done beforehand, as for all: once per pack, not once per layer."""
        from seqloom.attention import attention, prepare_attention
        from seqloom.dist import bind_single_rank

        context, shape = bind_single_rank(lengths, device=self.shape.device), self.shape
        prepare_attention(context, shape.heads, shape.kv_heads, shape.dim, shape.dtype, kernels=self.kernels)
        return lambda q, k, v: attention(q, k, v, context, kernels=self.kernels)

    def run(self, lengths: list[int], *, sdpa: bool = False) -> dict[str, float]:
        """Milliseconds of every contestant on one pack; `sdpa` cold and, as sdpa_warm, the second time."""
        time_ms = self.rivals.time_ms
        times = {
            "varlen": time_ms(self.rivals.varlen(lengths), self.inputs),
            "flex": time_ms(self.flex(lengths), self.inputs),
            "seqloom": time_ms(self.ours(lengths), self.inputs),
        }
        if self.has_fa4:
            times["fa4"] = time_ms(self.rivals.fa4(lengths), self.inputs)
        if sdpa:
            attend = self.rivals.sdpa(lengths)
            times |= {"sdpa": time_ms(attend, self.inputs), "sdpa_warm": time_ms(attend, self.inputs)}
        return times


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Ratios to the rivals: above 1 we are faster. The best rival is that of every pack."""
    best = [min(ms for name, ms in row.items() if name != "seqloom") for row in rows]
    to_best = [top / row["seqloom"] for top, row in zip(best, rows, strict=True)]
    ratios = {name: mean(row[name] / row["seqloom"] for row in rows) for name in ("varlen", "fa4") if name in rows[0]}
    ratios |= {"best rival": mean(to_best), "worst pack to best rival": min(to_best)}
    return ratios | {f"{name} ms": float(np.median([row[name] for row in rows])) for name in rows[0]}


def uniform(arena: Arena, label: str, rng: np.random.Generator, figures: dict) -> list[Check]:
    """Packs of documents of one length; the best rival has run the pack before, we have not."""
    checks = []
    for length in UNIFORM:
        rows = [arena.run(uniform_pack(length, rng), sdpa=True) for _ in range(2 if length == max(UNIFORM) else 3)]
        name = f"{label}, uniform {length // 1024}K"
        cold = float(np.median([row.pop("sdpa") for row in rows]))
        figures[name] = found = summary(rows) | {"sdpa ms, first call": cold}
        if arena.has_fa4:
            checks.append(Check(f"{name}, to FlashAttention-4", found["fa4"], 1.0, at_least=True))
        checks.append(Check(f"{name}, worst pack, to best rival, warm", found["worst pack to best rival"], 0.98, True))
    return checks


def drawn(arena: Arena, label: str, arguments: argparse.Namespace, figures: dict) -> list[Check]:
    """Packs of documents as they come."""
    checks = []
    for source in SOURCES:
        where, name = arguments.lengths if source == "wikipedia" else source, f"{label}, {source}"
        rows = [arena.run(lengths) for lengths in drawn_packs(where, arguments.packs, arguments.seed)]
        figures[name] = ratios = summary(rows)
        figures[f"{name}, packs"] = rows
        if arena.has_fa4:
            checks.append(Check(f"{name}, to FlashAttention-4", ratios["fa4"], 1.1 if source == "short" else 1.0, True))
        checks.append(Check(f"{name}, worst pack, to best rival", ratios["worst pack to best rival"], 0.98, True))
        if source == "prolong":  # once: a call per document builds a plan per document, seconds in all
            cold = arena.run(drawn_packs(where, 1, arguments.seed + 1)[0], sdpa=True)
            figures[f"{label}, {source}, document by document, ms"] = {"sdpa": cold["sdpa"], "again": cold["sdpa_warm"]}
    return [*checks, Check(f"{label}, wikipedia, to varlen", figures[f"{label}, wikipedia"]["varlen"], 1.9, True)]


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--heads", default="32/8", help="query heads / kv heads, of 128")
    parser.add_argument("--packs", type=int, default=10, help="per source")
    arguments = parser.parse_args(argv)
    record.require_gpu()
    rng, figures, label = np.random.default_rng(arguments.seed), {}, f"heads {arguments.heads}"
    arena = Arena(*map(int, arguments.heads.split("/")))
    shapes, seconds = arena.warm_up()
    figures[f"{label}, warm-up"] = {"shapes": shapes, "seconds": seconds}
    unlike = [uniform_pack(1_000, rng), uniform_pack(20_000, rng), *drawn_packs("short", 1, arguments.seed + 1)]
    for lengths in unlike:  # the contestants' own first calls, on lengths that are not timed
        arena.run(lengths)
    checks = [Check(f"{label}, warm-up of {shapes} shapes, s", seconds, 8)]
    checks += drawn(arena, label, arguments, figures) + uniform(arena, label, rng, figures)
    fa4 = ("fa4",) if arena.has_fa4 else ()
    columns = ("varlen", *fa4, "best rival", "worst pack to best rival", "seqloom ms")
    rows = [(name, *(f"{row[key]:.3f}" for key in columns)) for name, row in figures.items() if "varlen" in row]
    show("time of rival / time of seqloom", ("pack", *columns), rows)
    show_checks(checks)
    record.write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
