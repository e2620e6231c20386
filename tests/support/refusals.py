"""How tests see a plan refused: by the rule they broke, with value, rule and way out in the message."""

from __future__ import annotations

import pytest

from seqloom.errors import PlanError
from seqloom.plan import Plan


def refused(plan: Plan, rule: str, text: str) -> None:
    """Assert that `plan` breaks `rule` with a message that matches `text` and has three parts."""
    with pytest.raises(PlanError, match=text) as caught:
        plan.validate()
    assert caught.value.rule == rule
    assert str(caught.value).startswith(f"plan rule '{rule}': ")
    assert str(caught.value).count(";") >= 2, "value; rule; way out"
