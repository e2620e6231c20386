"""`flex` and the bound against the true optimum, by brute force, on small cases: 8 GPUs, 10 to 13 sequences.

Lengths are log-normal, from mild (sigma 0.6) to wild (1.8), scaled to fill 0.3 to 3.2 rounds of the cluster's memory.
Every case is one policy (one choice of what is kept and when gradients are reduced), without what a step costs once:
that would only make the differences look smaller. On every case bound <= optimum <= flex is asserted.

The brute force walks through 3^n pairs of sets and wants the `fast` install; --lengths is not used.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from brute_force import shortest_step
from common import Check, options, progress, show, show_checks
from record import write

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.planners.bounds import policies_bound
from seqloom.planners.flex import searched_ns
from seqloom.planners.problem import fitting_problems

SETTINGS: list[dict[str, Any]] = [
    {"cluster": "1x8xA100-40G", "model": "gpt-7b", "profile": "flexsp-a100", "sharding": "full"},
    {"cluster": "1x8xA100-40G", "model": "gpt-7b", "profile": "flexsp-a100", "sharding": "none", "budget_gib": 140},
    {"cluster": "2x4xH200", "model": "qwen3-4b", "profile": None, "sharding": "hybrid"},
    {"cluster": "2x4xH200", "model": "qwen3-4b", "profile": None, "sharding": "full"},
]
SIGMAS = (0.6, 1.0, 1.4, 1.8)
FILL = (0.3, 3.2)
"""Least and most rounds of memory that a case fills."""


def draw(seed: int, cost: CostModel, sizes: tuple[int, int]) -> np.ndarray:
    """The lengths of a case; no sequence is longer than 0.95 of what the cluster holds at once."""
    random = np.random.default_rng(seed)
    count = int(random.integers(sizes[0], sizes[1] + 1))
    room = cost.ranks * cost.capacity(cost.policies[0])
    lengths = np.exp(random.normal(0, SIGMAS[seed % len(SIGMAS)], count))
    lengths *= random.uniform(*FILL) * room / lengths.sum()
    return np.clip(lengths, 64, 0.95 * room).astype(np.int64)


def case(lengths: np.ndarray, cost: CostModel) -> dict[str, Any]:
    """Optimum, flex and bound of one case, ns."""
    policy = cost.policies[0]
    begin = time.perf_counter()
    optimum = shortest_step(lengths, cost, policy)
    exact_s = time.perf_counter() - begin
    bound = policies_bound(lengths, cost, [policy]) - cost.step_overhead_ns(policy)
    begin = time.perf_counter()
    flex = searched_ns(fitting_problems(lengths, cost, policy)[0])
    flex_s = time.perf_counter() - begin
    assert bound <= optimum <= flex, f"bound {bound}, optimum {optimum}, flex {flex} for lengths {lengths.tolist()}"
    return {
        "sequences": len(lengths),
        "optimum_ns": optimum,
        "flex_above": flex / optimum - 1,
        "bound_share": bound / optimum,
        "exact_s": exact_s,
        "flex_s": flex_s,
    }


def summary(name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and extremes over cases."""
    above, share = (np.array([c[key] for c in cases]) for key in ("flex_above", "bound_share"))
    return {
        "setting": name,
        "cases": len(cases),
        "flex_above_mean": float(above.mean()),
        "flex_above_worst": float(above.max()),
        "flex_optimal_share": float((above < 1e-6).mean()),
        "bound_share_mean": float(share.mean()),
        "bound_share_least": float(share.min()),
        "flex_ms_median": 1e3 * float(np.median([c["flex_s"] for c in cases])),
        "exact_ms_median": 1e3 * float(np.median([c["exact_s"] for c in cases])),
    }


def main(argv: list[str] | None = None) -> None:
    """Run all cases."""
    parser = options(__doc__)
    parser.add_argument("--cases", type=int, default=100, help="per setting; there are four")
    arguments = parser.parse_args(argv)
    count, sizes = (1, (5, 6)) if arguments.quick else (arguments.cases, (10, 13))
    summaries, everything = [], []
    for setting in SETTINGS[: 2 if arguments.quick else None]:
        name = f"{setting['cluster']} {setting['model']} {setting['sharding']}"
        cost = cost_model(**setting)
        cases = []
        for seed in range(arguments.seed, arguments.seed + count):
            if seed % 25 == 0:
                progress(f"{name}: case {len(cases)} of {count}")
            cases.append(case(draw(seed, cost, sizes), cost))
        summaries.append(summary(name, cases))
        everything += cases
    summaries.append(summary("overall", everything))
    show(
        "flex and the bound against the optimum",
        ("setting", "cases", "flex above, mean", "worst", "optimal", "bound / optimum", "least", "flex ms", "exact ms"),
        [
            (
                s["setting"],
                str(s["cases"]),
                f"{s['flex_above_mean']:.2%}",
                f"{s['flex_above_worst']:.2%}",
                f"{s['flex_optimal_share']:.0%}",
                f"{s['bound_share_mean']:.3f}",
                f"{s['bound_share_least']:.3f}",
                f"{s['flex_ms_median']:.1f}",
                f"{s['exact_ms_median']:.0f}",
            )
            for s in summaries
        ],
        ["bound <= optimum <= flex held on every case."],
    )
    total = summaries[-1]
    checks = [
        Check("flex above the optimum on average, %", 100 * total["flex_above_mean"], 2),
        Check("flex above the optimum at worst, %", 100 * total["flex_above_worst"], 6),
        Check("bound / optimum on average", total["bound_share_mean"], 0.93, at_least=True),
    ]
    show_checks(checks)
    write(arguments.out, __file__, arguments, {"settings": summaries}, checks)


if __name__ == "__main__":
    main()
