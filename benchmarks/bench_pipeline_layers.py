"""Stages of models whose layers differ, simulated on 64 H200: level by time, or with equal numbers of layers.

Four models in 8 stages, with the shapes that are published: Gemma 3 27B (five layers with a window of 1,024 tokens,
then one without, 62 in all), DeepSeekMoE 16B (a dense layer, then 27 with experts), Qwen3-Next 80B-A3B (three layers
that scan, then one that attends, with experts) and Bamba 9B (29 layers that scan, three that attend). Documents of
one length, 512K tokens a step, the schedule seq1f1b and the head on all stages, so that layers alone tell stages apart.
The ranks of a stage divide the experts, so that memory makes no stage recompute. A target has 0.005 for how documents
happen to be cut and packed.
Both sides are priced layer by layer. Work is what the ranks of a stage compute and the exchanges that they wait for,
without the end of the step.

    python benchmarks/bench_pipeline_layers.py --out benchmarks/results/pipeline_layers.json
"""

from __future__ import annotations

import numpy as np
from bench_pipeline_head import TOKENS, figures
from bench_scans import BAMBA, QWEN3_NEXT
from common import Check, K, options, progress, show, show_checks
from record import commit, write

from seqloom import cost_model
from seqloom.describe import ModelSpec
from seqloom.planners.pipeline import plan_pipeline, stage_layers

CLUSTER, STAGES, LENGTHS = "8x8xH200", 8, (8 * K, 64 * K)
WINDOWS = ModelSpec(
    "gemma3-27b",
    **{"layers": 62, "hidden": 5376, "heads": 32, "kv_heads": 16, "head_dim": 128, "ffn": 21_504, "gated": True},
    **{"vocabulary": 262_208, "tied": True, "windows": tuple(None if n % 6 == 5 else 1024 for n in range(62))},
)
DENSE_FIRST = ModelSpec(
    "deepseek-moe-16b",
    **{"layers": 28, "hidden": 2048, "heads": 16, "kv_heads": 16, "head_dim": 128, "ffn": 10_944, "gated": True},
    **{"vocabulary": 102_400, "tied": False, "experts": 64, "active_experts": 6, "expert_ffn": 1408},
    shared_ffn=2816,
    moe_layers=tuple(range(1, 28)),
)


def equal_numbers(layers: int) -> tuple[int, ...]:
    """As many layers on every stage, or one more on the last ones."""
    return tuple(layers // STAGES + (stage >= STAGES - layers % STAGES) for stage in range(STAGES))


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    table: dict[str, dict[str, float]] = {}
    for model in (WINDOWS, DENSE_FIRST, QWEN3_NEXT, BAMBA)[: 1 if arguments.quick else None]:
        for length in LENGTHS[: 1 if arguments.quick else None]:
            expert = STAGES if model.experts else 1
            cost = cost_model(CLUSTER, model, stages=STAGES, max_length=length, expert=expert)
            lengths = np.full((TOKENS // 4 if arguments.quick else TOKENS) // length, length)
            level = stage_layers(cost, STAGES, length=length, head_stages=True)
            for how, layers in (("equal numbers", equal_numbers(model.layers)), ("level", level)):
                name = f"{model.name}, {length // K}K, {how} {'-'.join(map(str, layers))}"
                progress(name)
                plan = plan_pipeline(lengths, cost, stages=STAGES, schedule="seq1f1b", layers=layers, head="all")
                table[name] = figures(plan, cost)
    busiest = [row["busiest over mean"] for row in table.values()]
    checks = [
        Check(f"{name}: busiest stage over the mean, against equal numbers", ours, theirs + 0.005)
        for name, ours, theirs in zip(list(table)[1::2], busiest[1::2], busiest[::2], strict=True)
    ]
    columns = ("plan", *next(iter(table.values())))
    show("layers", columns, [(name, *(f"{value:,.4g}" for value in row.values())) for name, row in table.items()])
    show_checks(checks)
    drawn = "documents of one length; see the script"
    write(arguments.out, __file__, arguments, table, checks, gpu=False, lengths=drawn)


if __name__ == "__main__":
    main()
