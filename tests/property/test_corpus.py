"""Plans, simulated times and bounds of the committed corpus stay as they are written; see tools/plan_corpus.py."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import plan_corpus

ENTRIES = [json.loads(line) for line in plan_corpus.CORPUS.read_text().splitlines()]
SAMPLED = ENTRIES[::15]


def differing(entries):
    return [entry["name"] for entry in entries if plan_corpus.find(entry) != entry["found"]]


def test_sampled_entries_are_unchanged():
    assert differing(SAMPLED) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(9))
def test_every_entry_is_unchanged(part):
    assert differing(ENTRIES[part::9]) == []


def test_there_are_many_and_few_are_refused():
    assert len(ENTRIES) >= 300 and sum("refused" in entry["found"] for entry in ENTRIES) < len(ENTRIES) / 20
