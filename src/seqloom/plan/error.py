"""The error of this package: a plan that breaks a rule, or a plan file that cannot be read."""

from __future__ import annotations

from seqloom.errors import SeqloomError


class PlanError(SeqloomError):
    """A plan, or a part of one, that breaks a rule.

    Attributes:
        rule: short name of the broken rule, as listed in ``seqloom.plan.RULES``; ``"format"`` when a file
            cannot be read and ``"value"`` when a single value (a layout, a family) cannot be built.
        at: (host, number of the action in its row) of the step that breaks it, where there is one.
    """

    def __init__(self, message: str, *, rule: str = "value", at: tuple[int, int] | None = None) -> None:
        """Keep the rule beside the message, which holds the value, the rule in words and the way out."""
        super().__init__(message)
        self.rule = rule
        self.at = at

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the rule, so that the error survives a trip from a worker process."""
        return (_rebuild, (str(self), self.rule, self.at))


def _rebuild(message: str, rule: str, at: tuple[int, int] | None) -> PlanError:
    return PlanError(message, rule=rule, at=at)


def broken(rule: str, value: str, must: str, way_out: str, at: tuple[int, int] | None = None) -> PlanError:
    """Build the error of a broken rule: the value, what must hold, and the nearest legal choice."""
    return PlanError(f"plan rule '{rule}': {value}; {must}; {way_out}", rule=rule, at=at)
