"""What a slow rank costs, and what a run wins back that learns its speed: one of eight H200 at 0.7 times the speed.

Qwen3 4B, batches of 64 Wikipedia lengths up to 32K. Steps are measured by the simulator with the true speeds and noise
of 1 %; plans are made four steps ahead, by what has been learned, with `auto`. "Unaware" plans the same batches as if
all ranks were equal. Won back: of the time that unaware plans lose over equal ranks, from the step on that was planned
with the speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from common import Check, options, progress, show, show_checks
from record import write

from seqloom.cost import CostModel
from seqloom.cost.feedback import FactorCosts, Feedback, Measurement
from seqloom.cost.speeds import BusyTime
from seqloom.describe import MODELS, SAMPLERS, Cluster
from seqloom.planners import make_plan
from seqloom.simulate import simulate

AHEAD = 4
"""Steps that are planned before the first of them is run."""
NOISE = 0.01
SLOW = (1, 1, 1, 1, 1, 0.7, 1, 1)


def busy_times(slowness: Any, random: np.random.Generator, noise: float) -> list[BusyTime]:
    """Times of ranks whose tokens differ, by this slowness."""
    tokens = random.integers(2_000, 8_000, len(slowness))
    noises = np.exp(noise * random.normal(size=len(slowness)))
    return [BusyTime(s * t * 1e-6 * n, t) for s, t, n in zip(slowness, tokens, noises, strict=True)]


def trained(cost: CostModel, true: CostModel, steps: int, seed: int, feedback: Feedback) -> dict[str, np.ndarray]:
    """Run steps that are planned by what has been learned.

    Returns, each of every step: ns on equal ranks, with the run's plan, with an unaware plan; whether a speed has been
    found by its end, and whether its plan knew one.
    """
    random, sampler = np.random.default_rng(seed), SAMPLERS.lookup("wikipedia")
    batches = [sampler.sample(64, seed=seed * 1_000 + step, max_length=32_768) for step in range(steps)]
    costs, plans, rows = FactorCosts(cost), [], []
    for step, lengths in enumerate(batches):
        for later in range(len(plans), min(step + AHEAD + 1, steps)):
            costs = costs.with_factors(feedback.factors, feedback.speeds.values)
            plans.append((costs, make_plan("auto", batches[later], costs.cost)))
        made, plan = plans[step]
        measured = simulate(plan, true).step_ns * (1 + NOISE * random.normal())
        derivatives = made.derivatives(plan, lambda p, c: c.plan_ns(p))
        own = Measurement.of(made.factors, derivatives, made.cost.plan_ns(plan), round(measured))
        feedback.observe(own, busy_times(true.speeds.slowness, random, NOISE))
        unaware = make_plan("auto", lengths, cost)
        times = (cost.plan_ns(unaware), true.plan_ns(plan), true.plan_ns(unaware))
        rows.append((*times, bool(feedback.speeds.values), bool(made.cost.speeds)))
    names = ("even_ns", "own_ns", "unaware_ns", "found", "used")
    return dict(zip(names, np.array(rows, dtype=float).T, strict=True))


def won_back(found: dict[str, np.ndarray], first: int) -> float:
    """Share of what unaware plans lose over equal ranks that the run's plans win back, from this step on."""
    even, own, unaware = (found[name][first:].sum() for name in ("even_ns", "own_ns", "unaware_ns"))
    return float((unaware - own) / (unaware - even))


def main(argv: list[str] | None = None) -> None:
    """Run the steps of one seed."""
    arguments = options(__doc__, lengths=False).parse_args(argv)
    cost = CostModel(Cluster.parse("8xH200"), MODELS.lookup("qwen3-4b"))
    progress("auto plans every batch twice")
    found = trained(cost, cost.with_speeds(SLOW), 14 if arguments.quick else 24, arguments.seed, Feedback(cost))
    used = int(found["used"].argmax())
    figures = {
        "unaware_over_equal": float(found["unaware_ns"].sum() / found["even_ns"].sum()),
        "found_after_steps": int(found["found"].argmax()) + 1,
        "used_from_step": used + 1,
        "won_back": won_back(found, used),
    }
    show("one rank of eight at 0.7", ("", ""), [(name, f"{value:.3g}") for name, value in figures.items()])
    checks = [Check("share won back", figures["won_back"], 0.8, at_least=True)]
    show_checks(checks)
    write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="sampler wikipedia")


if __name__ == "__main__":
    main()
