"""What it takes to hand something from stage to stage: a pipeline of small units, timed, beside what its parts say.

A message has its bytes and its link's latency, and somebody must notice that it has come. On a CPU that is another
thread, which waits for its turn on the core. So it is measured where it matters: in a step whose stages are busy.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import torch

from seqloom.comm import Transport
from seqloom.cost import CostModel
from seqloom.cost.calibrate import under
from seqloom.cost.profile import AnalyticProfile
from seqloom.plan import Plan
from seqloom.planners.pipelines import plan_pipeline
from seqloom.simulate import predicted_ns, simulate
from seqloom.train.trials import StepTimer

UNITS, TOKENS, REPEATS = 4, 256, 7
"""Units per stage, tokens of each, steps that are timed."""
MOST_US = 1 << 17
"""No handover takes longer."""


def measured_handover(
    cost: CostModel, transport: Transport, device: torch.device, dtype: torch.dtype, stages: int
) -> AnalyticProfile:
    """Return the profile of `cost` with its `handover_us` measured. All ranks call it and find the same.

    Args:
        cost: of the machine; everything else of its profile is measured already.
        transport: this rank's, over torch.distributed.
        device: where the model runs.
        dtype: that its layers compute in.
        stages: of the pipeline that is timed.
    """
    profile = cost.profile
    assert isinstance(profile, AnalyticProfile)
    plan = plan_pipeline(np.full(UNITS * stages, TOKENS), cost, stages=stages, schedule="1f1b", pieces=1)
    timer = StepTimer(cost, transport, device, dtype, plan.pipelines[0].stages)
    timer.seconds(plan)
    seconds, busy = zip(*((timer.seconds(plan), _mean_busy(timer, transport)) for _ in range(REPEATS)), strict=True)
    found = solved(plan, cost, 1e9 * statistics.median(seconds), 1e9 * statistics.median(busy))
    source = f"a pipeline of {stages} stages with {UNITS * stages} documents of {TOKENS} tokens, 1F1B"
    return replace(profile, handover_us=found, sources=profile.sources | {"handover_us": source})


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


def _mean_busy(timer: StepTimer, transport: Transport) -> float:
    """Seconds that ranks spent in forwards and backwards of the last step, their mean."""
    assert timer.last is not None
    total = torch.tensor([timer.last.forward_s + timer.last.backward_s], dtype=torch.float64)
    transport.all_reduce(total, range(transport.ranks))
    return float(total) / transport.ranks
