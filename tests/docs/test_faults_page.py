"""docs/faults.md names tests and faults that exist, and every kind of fault."""

import re
from pathlib import Path

from faults.campaign import FAULTS
from faults.nodes import NODE_FAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 10
    assert [name for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_every_kind_of_fault_has_a_row():
    assert [fault.name for fault in (*FAULTS, *NODE_FAULTS) if f"`{fault.name}`" not in PAGE] == []
