"""The learning rate of a step: a pure function, so that a resumed run needs no state of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.train.sections import Schedule


def learning_rate(step: int, *, steps: int, peak: float, schedule: Schedule) -> float:
    """Return the rate of step `step`.

    With warm-up the rate rises evenly and has its peak at step `warmup`; without, at step 1. From there it falls to
    `final * peak` at step `steps`: along half a cosine, along a line, or (constant) not at all. Steps beyond the last
    keep its rate.

    Args:
        step: from 1.
        steps: of the whole run.
        peak: the highest rate.
        schedule: kind, warm-up and final share.
    """
    if step < 1 or steps < 1:
        raise SeqloomError(f"step {step} of {steps}; steps are counted from 1")
    first = max(schedule.warmup, 1)  # the step that has all of the rate
    if step < first:
        return peak * step / first
    if schedule.kind == "constant":
        return peak
    passed = min(1.0, (step - first) / (steps - first)) if steps > first else 0.0
    left = 1 - passed if schedule.kind == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return peak * (schedule.final + (1 - schedule.final) * left)
