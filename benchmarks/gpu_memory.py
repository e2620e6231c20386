"""The longest document that a GPU holds, and what a step of one takes: recomputing, activations in host memory, both.

The first half is predicted by the cost model, for one H200 and for eight, and needs no GPU. The second runs those steps
of the one on this machine's GPU, with the reference model's layers: seconds and peak memory of documents as long as is
predicted to fit, and longer ones until memory runs out. Without a GPU it is left out, and the result says so.

    python benchmarks/gpu_memory.py --out benchmarks/results/gpu_memory.json
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from common import options, progress, show
from record import has_gpu, write

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.errors import MemoryBudgetError
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.simulate import predicted_ns, simulate

CLUSTERS, MODELS = ("1x1xH200", "1x8xH200"), ("qwen3-1.7b", "llama3-8b")
CHOICES: dict[str, dict[str, bool]] = {  # what may be in host memory
    "nothing": {"offload": False, "offload_optimiser": False},
    "activations": {"offload": True, "offload_optimiser": False},
    "optimiser": {"offload": False, "offload_optimiser": True},
    "both": {"offload": True, "offload_optimiser": True},
}
LENGTHS = (65_536, 131_072, 262_144, 524_288, 1_048_576)
MOST, GIB = 1 << 26, 1024**3
LONGER = (1.0, 1.05, 1.1, 1.2, 1.4)  # lengths to try on a GPU, over what is predicted to fit


def cost_of(cluster: str, model: str, choice: str, budget_gib: float | None = None) -> CostModel | None:
    """The cost model; None: the model does not fit."""
    try:
        return cost_model(cluster, model, budget_gib=budget_gib, **CHOICES[choice])
    except MemoryBudgetError:
        return None


def plan_of(cost: CostModel | None, tokens: int) -> Plan | None:
    """The plan of one document; None: it does not fit."""
    try:
        return None if cost is None else make_plan("flex", np.array([tokens]), cost)
    except MemoryBudgetError:
        return None


def longest_document(cost: CostModel | None) -> int:
    """Tokens of the longest document that has a plan."""
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan_of(cost, middle) is not None else (low, middle)
    return low


def figures_of(cost: CostModel, plan: Plan) -> dict[str, Any]:
    """Predicted seconds and memory of a step, and what its layers do."""
    found, [work] = simulate(plan, cost), plan.pipelines[0].rounds[0].by_stage
    return {
        "seconds": predicted_ns(plan, cost) / 1e9,
        "gpu_gib": int(found.peak_memory.max()) / GIB,
        "host_gib": int(found.peak_host_memory.max()) / GIB,
        "checkpoint": work.checkpoint.value,
        "lighter_layers": work.lighter_layers,
        "offloaded_layers": work.offloaded_layers,
    }


def predict(clusters: Sequence[str], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """The longest document, and steps of some lengths, of every cluster, model and choice."""
    rows = []
    for cluster, model, choice in ((c, m, k) for c in clusters for m in MODELS for k in CHOICES):
        progress(f"{cluster}, {model}, in host memory: {choice}")
        cost = cost_of(cluster, model, choice)
        plans = {tokens: plan_of(cost, tokens) for tokens in lengths}
        steps = {str(tokens): figures_of(cost, plan) for tokens, plan in plans.items() if cost and plan}
        longest = longest_document(cost)
        row = {"cluster": cluster, "model": model, "in_host_memory": choice, "longest": longest, "steps": steps}
        rows.append(
            row | {"longest_step": figures_of(cost, plan) if cost and (plan := plan_of(cost, longest)) else None}
        )
    return rows


def run_step_on_gpu(process: Any, model: str, choice: str, tokens: int, budget_gib: float) -> dict[str, float] | None:
    """Seconds and peak memory of a step as the only rank; None: memory ran out, or no plan holds the document."""
    import torch

    from seqloom.dist import Communicators, TorchTransport
    from seqloom.plan import GroupFamily
    from seqloom.profiling.calibration import StepTimer

    cost = cost_of("1x1xH200", model, choice, budget_gib)
    plan = plan_of(cost, tokens)
    if cost is None or plan is None:
        return None
    try:
        transport = TorchTransport(Communicators(GroupFamily(1, 1)))
        timer = StepTimer(cost, transport, process.device, torch.bfloat16)
        timer.seconds(make_plan("flex", np.array([1_024]), cost))  # builds kernels
        torch.cuda.reset_peak_memory_stats()
        seconds = timer.seconds(plan)
    except torch.OutOfMemoryError:
        return None
    return {"seconds": seconds, "gpu_gib": torch.cuda.max_memory_allocated() / GIB}


def measure(predicted: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the longest documents of one GPU, and longer ones until memory runs out; each in a process of its own."""
    from seqloom.train.launch import run_on_processes

    rows = []
    for row in (row for row in predicted if row["cluster"] == "1x1xH200" and row["longest"]):
        for factor in LONGER:
            tokens, budget = int(factor * row["longest"]), factor * 126.0
            progress(f"{row['model']}, in host memory: {row['in_host_memory']}, {tokens:,} tokens")
            found = run_on_processes(run_step_on_gpu, 1, row["model"], row["in_host_memory"], tokens, budget)
            rows.append(
                {"model": row["model"], "in_host_memory": row["in_host_memory"], "tokens": tokens, "step": found}
            )
            if found is None:
                break
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Print and write both tables."""
    given = options(__doc__, lengths=False).parse_args(arguments)
    predicted = predict(CLUSTERS[:1] if given.quick else CLUSTERS, LENGTHS[2:3] if given.quick else LENGTHS)
    names = ("cluster, model, in host memory", "longest", *(f"{tokens // 1024}K, s" for tokens in LENGTHS))
    table = []
    for row in predicted:
        times = (row["steps"].get(str(tokens)) for tokens in LENGTHS)
        cells = ("-" if each is None else f"{each['seconds']:.1f}" for each in times)
        table.append((f"{row['cluster']}, {row['model']}, {row['in_host_memory']}", f"{row['longest']:,}", *cells))
    show("predicted: tokens of the longest document, and seconds of a step of one document", names, table)
    measured = measure(predicted) if has_gpu() and not given.quick else None
    print(*(measured or ["measured: nothing, since that needs a GPU"]), sep="\n")
    write(given.out, __file__, given, {"predicted": predicted, "measured": measured}, [], lengths="one document")


if __name__ == "__main__":
    main()
