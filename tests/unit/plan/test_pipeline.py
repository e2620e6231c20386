from __future__ import annotations

import pytest

from seqloom.errors import PlanError
from seqloom.layout import Span
from seqloom.plan import Action, ActionKind, Checkpoint, Group, Pipeline, Reduce, Round, StageMicroBatch


def rounds(*contents: tuple[Span, ...]) -> list[Round]:
    return [Round((StageMicroBatch((Group((0,), 1, 1, spans),), Checkpoint.FULL),)) for spans in contents]


def table(pipeline: Pipeline) -> str:
    return " ".join(map(str, pipeline.actions[0]))


def test_the_trivial_table() -> None:
    whole = rounds((Span(0, 0, 4),), (Span(1, 0, 4),))
    assert table(Pipeline.single([0], 4, whole, Reduce.STEP)) == "0F0 0B0 0F1 0B1 0REDUCE"
    assert table(Pipeline.single([0], 4, whole, Reduce.ROUND)) == "0F0 0B0 0REDUCE0 0F1 0B1 0REDUCE1"
    assert Pipeline.single(range(3), (0, 4), whole, Reduce.STEP).ranks == (0, 1, 2)


def test_rounds_with_pieces_of_one_document_stay_open_together() -> None:
    pieces = rounds(
        (Span(0, 0, 4),), (Span(1, 0, 2),), (Span(1, 2, 4), Span(2, 0, 1)), (Span(2, 1, 3),), (Span(3, 0, 4),)
    )
    assert table(Pipeline.single([0], 4, pieces, Reduce.STEP)) == ("0F0 0B0 0F1 0F2 0F3 0B3 0B2 0B1 0F4 0B4 0REDUCE")


def test_actions_read_as_torch_writes_them() -> None:
    assert Action.parse("1SEND_F3") == Action(1, ActionKind.SEND_F, 3)
    assert Action.parse("0REDUCE") == Action(0, ActionKind.REDUCE)
    assert str(Action(12, ActionKind.W, 0)) == "12W0"


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F-1", "0F1 ", "0SENDF1", "0f1"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)
