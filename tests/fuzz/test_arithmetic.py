"""A few cases of `make fuzz` about layouts and plans, and that a wrong move is noticed."""

import numpy as np
import pytest

from fuzz import arithmetic


@pytest.mark.parametrize("kind", [*arithmetic.LAYOUTS, "plans"])
def test_some_cases(kind, monkeypatch):
    monkeypatch.setattr(arithmetic, "ITEMS", 60)
    monkeypatch.setattr(arithmetic, "CHUNK", 10)
    monkeypatch.setattr(arithmetic, "CHUNK_S", 60)
    done, failure = arithmetic.run_chunk(kind, seed=1)
    assert done >= 10 and failure == ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda move: move.select(np.arange(len(move)) != 0), "not what is wanted"),
        (lambda move: type(move)(1 - move.sender, *move.columns()[1:]), "sends"),
    ],
)
def test_a_wrong_move_is_noticed(change, reason, monkeypatch):
    monkeypatch.setattr(arithmetic, "draw_shape", lambda draw, axes: (2, 20, 1, 6))
    right = arithmetic.move_between
    monkeypatch.setattr(arithmetic, "move_between", lambda *layouts, **options: change(right(*layouts, **options)))
    with pytest.raises(arithmetic.Wrong, match=reason):
        for seed in range(20):
            arithmetic.moves(np.random.default_rng(seed))
