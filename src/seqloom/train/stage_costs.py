"""What stages cost beside their work: a handover to the next one, and a backward in two halves instead of one.

A message has its bytes and its link's latency, and somebody must notice that it has come. On a CPU that is another
thread, which waits for its turn on the core. So it is measured where it matters: in a step whose stages are busy. The
same units with split backwards tell what splitting costs.

Parameters stay with their stages meanwhile, also for runs under free sharding: in a step that moves them, whatever the
prediction misses of that would be taken for handovers, of which a step has few.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from seqloom.comm import Transport
from seqloom.cost import CostModel
from seqloom.cost.calibrate import under
from seqloom.cost.profile import AnalyticProfile
from seqloom.plan import Plan, Sharding
from seqloom.planners.pipelines import plan_pipeline
from seqloom.simulate import predicted_ns, simulate
from seqloom.train.trials import StepTimer

UNITS, TOKENS, REPEATS = 4, 256, 7
"""Units per stage, tokens of each, steps that are timed."""
MOST_US = 1 << 17
"""No handover takes longer."""


class Taken(NamedTuple):
    """What a step took: the fastest of several."""

    step_ns: float
    """The slowest rank, from beginning to end."""
    busy_ns: float
    """In forwards and backwards, the mean over ranks."""


def with_stage_costs(
    cost: CostModel, transport: Transport, device: torch.device, dtype: torch.dtype, stages: int
) -> AnalyticProfile:
    """Return the profile of `cost` with `handover_us` and `split_us` measured. All ranks call it and find the same.

    Args:
        cost: of the machine; everything else of its profile is measured already.
        transport: this rank's, over torch.distributed.
        device: where the model runs.
        dtype: that its layers compute in.
        stages: of the pipeline that is timed.
    """
    profile = cost.profile
    assert isinstance(profile, AnalyticProfile)
    if cost.sharding == Sharding.FREE:
        cost = under(cost, profile, Sharding.FULL)
    documents = np.full(UNITS * stages, TOKENS)
    whole, split = (
        plan_pipeline(documents, cost, stages=stages, schedule=name, pieces=1) for name in ("1f1b", "zb-h1")
    )
    timer = StepTimer(cost, transport, device, dtype, whole.pipelines[0].stages)
    taken = [[_taken(timer, plan) for plan in (whole, split)] for _ in range(REPEATS + 1)][1:]
    at_once, in_halves = (Taken(*map(min, zip(*turns, strict=True))) for turns in zip(*taken, strict=True))
    passes = len(whole.pipelines[0].rounds) * cost.model.layers / stages  # of a layer by a unit, on a rank
    found = {
        "handover_us": solved(whole, cost, *at_once),
        "split_us": max(0.0, in_halves.busy_ns - at_once.busy_ns) / passes / 1e3,
    }
    source = f"a pipeline of {stages} stages with {UNITS * stages} documents of {TOKENS} tokens, "
    sources = {"handover_us": source + "1F1B", "split_us": source + "ZB-H1 less 1F1B"}
    return replace(profile, **found, sources=profile.sources | sources)


def solved(plan: Plan, cost: CostModel, step_ns: float, busy_ns: float) -> float:
    """Return the microseconds of a handover at which a plan takes as long as it did, to one; 0 where it was faster.

    Where forwards and backwards themselves took another time than predicted, the step is scaled by as much: their
    error is not a handover's.

    Args:
        plan: of one pipeline.
        cost: its handovers may cost something already, which does not count.
        step_ns: that the step took.
        busy_ns: that a rank spent in forwards and backwards, the mean over ranks.
    """
    profile = cost.profile
    assert isinstance(profile, AnalyticProfile)

    def predicted(us: float) -> int:
        return predicted_ns(plan, under(cost, replace(profile, handover_us=us)))

    expected = simulate(plan, cost)
    wanted = step_ns * float((expected.busy_ns + expected.comm_ns).mean()) / busy_ns
    low, high = 0, MOST_US
    while low < high:  # the least whole number that is enough
        middle = (low + high) // 2
        low, high = (low, middle) if predicted(middle) >= wanted else (middle + 1, high)
    return float(low)


def _taken(timer: StepTimer, plan: Plan) -> Taken:
    """Run a step."""
    seconds = timer.seconds(plan)
    return Taken(1e9 * seconds, 1e9 * timer.mean_busy())
