"""One entry of a pipeline's table: a stage, what it does, for which round; written as in torch's pipelining.

0F3        stage 0, forward of round 3          1SEND_B2   stage 1 sends the gradient of round 2 on to stage 0
0B3        stage 0, whole backward of round 3   1RECV_F2   stage 1 receives the output of stage 0
0I3, 0W3   the two halves of a backward: with respect to the input, with respect to the weights
0REDUCE3   reduce the gradients of round 3      0REDUCE    reduce the gradients of the whole step
0UNSHARD   gather the parameters                0RESHARD   drop the gathered parameters
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from seqloom.errors import PlanError


class ActionKind(StrEnum):
    """What a stage does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's name for the input half of a backward
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"


F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward

EVALUATION_KINDS = frozenset((F, ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.UNSHARD, ActionKind.RESHARD))
"""Of a step that only runs forward."""

_LONGEST_FIRST = sorted((kind.value for kind in ActionKind), key=len, reverse=True)
_PATTERN = re.compile(rf"(\d+)({'|'.join(_LONGEST_FIRST)})(\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """What `stage` does for `round` (None: for the step as a whole)."""

    stage: int
    kind: ActionKind
    round: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{'' if self.round is None else self.round}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{text!r} is not an action; an action is stage, kind, round, such as 0F3 or 1SEND_F3, "
                f"with a kind among {', '.join(kind.value for kind in ActionKind)}",
                rule="format",
            )
        stage, kind, number = match.groups()
        return cls(int(stage), ActionKind(kind), None if number is None else int(number))
