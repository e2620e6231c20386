"""Files edited by hand: whatever is changed, the answer is a plan or a `PlanError`, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.errors import PlanError
from seqloom.plan import RULES, Plan
from support.strategies import plans

relaxed = settings(max_examples=150, deadline=None)
ODD = st.sampled_from((-1, 0, 1, 2, 3, 5, 7, 100, 10**12, None, "x", 1.5, True, [], {}))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in pairs for place in ((value, key), *places(inner))]


def assert_read_or_refused(read: Callable[[str], Plan], text: str) -> None:
    """Read and check a file: it is refused by a rule that has a name, or a plan that both forms can hold."""
    try:
        plan = read(text)
        plan.validate()
    except PlanError as error:
        assert error.rule in {"format", *RULES}
    else:
        assert Plan.from_text(plan.to_text()) == plan == Plan.from_json(plan.to_json())


@relaxed
@given(plans(), st.data())
def test_edited_files(plan: Plan, data: st.DataObject) -> None:
    assert_read_or_refused(Plan.from_json, edited_json(plan, data))
    text = plan.to_text()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 12)))
    fresh = data.draw(st.text(alphabet="0123456789 -,:[)\nFBxrankstge", max_size=4))
    assert_read_or_refused(Plan.from_text, text[:start] + fresh + text[stop:])
    lines = text.splitlines()
    first, second = (data.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    lines[first], lines[second] = lines[second], lines[first]
    assert_read_or_refused(Plan.from_text, "\n".join(lines))


def edited_json(plan: Plan, data: st.DataObject) -> str:
    value = json.loads(plan.to_json())
    container, key = data.draw(st.sampled_from(places(value)))
    if data.draw(st.booleans()):
        container[key] = data.draw(ODD)
    else:
        del container[key]
    return json.dumps(value)


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    for read in (Plan.from_json, Plan.from_text):
        assert_read_or_refused(read, text)
