"""Broken schedules are refused with the rule, the way out and the grid; files and grids."""

from dataclasses import replace

import pytest

from seqloom.errors import PlanError
from seqloom.plan import Action, ActionKind
from seqloom.schedules import Schedule, Times, Unit, build_schedule, simulate_schedule, units_of
from seqloom.schedules.schedule import grid, to_csv

F, B = ActionKind.F, ActionKind.B


def rows(*lines: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, line.split())) for line in lines)


def two_pieces(*lines: str) -> Schedule:
    """One sequence in two pieces on two pp_ranks."""
    return Schedule("hand", (0, 1), (Unit(0, 0, 2), Unit(0, 1, 2)), rows(*lines))


GOOD = ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0")


def refused(schedule: Schedule, rule: str, **more: object) -> str:
    with pytest.raises(PlanError) as caught:
        schedule.validate(**more)  # type: ignore[arg-type]
    assert caught.value.rule == rule
    return str(caught.value)


def test_the_good_one_is_fine():
    two_pieces(*GOOD).validate(cap=2)


@pytest.mark.parametrize(
    ("lines", "rule", "words", "marked"),
    [
        (("0F0 0F1 0B1", GOOD[1]), "table", "hand pp_rank 0 has 0F0 for round 0 of stage 0", ">0F0<"),
        (("0F0 0F1 0I1 0B0", GOOD[1]), "table", "has 0F1 0I1 for round 1", ">0F1<"),
        (("0F0 0F1 0B1 0B0 0B0", GOOD[1]), "table", "has 0B0 2 times", ">0B0<"),
        (("0F0 0F1 0B1 0B0 0F7", GOOD[1]), "table", "has the action 0F7", ">0F7<"),
        (("0F1 0F0 0B1 0B0", GOOD[1]), "order", "forwards of stage 0 in the order [1, 0]", ">0F1<"),
        (("0F0 0B0 0F1 0B1", GOOD[1]), "order", "all pieces of one document go forward before", ">0B0<"),
        ((GOOD[0], "1F0 1F1 1B0 1B1"), "order", "go backward in reverse order; put 1B1 before 1B0", ">1B0<"),
        (("0F0 0F1 0W1 0I1 0B0", GOOD[1]), "order", "a round's I comes before its W", ">0W1<"),
    ],
)
def test_order_and_causality(lines, rule, words, marked):
    message = refused(two_pieces(*lines), rule)
    assert words in message
    assert marked in message.splitlines()[1 if marked[1] == "0" else 2]
    assert len(message.splitlines()) == 3


def published(p: int, m: int, k: int, v: int) -> Schedule:
    """Seq1F1B-I as published: blocks of p units, warm-up of (v - 1) p + 2 (p - r - 1) + k - 1 whatever k is."""
    units = units_of([k] * m)
    back = [s * k + piece for s in range(m) for piece in reversed(range(k))]
    blocks = range(0, m * k, p)
    lines = []
    for r in range(p):
        forward = [Action(c * p + r, F, u) for b in blocks for c in range(v) for u in range(m * k)[b : b + p]]
        backward = [Action(c * p + r, B, u) for b in blocks for c in reversed(range(v)) for u in back[b : b + p]]
        warm = min(len(forward), (v - 1) * p + 2 * (p - r - 1) + k - 1)
        steady = [action for pair in zip(forward[warm:], backward, strict=False) for action in pair]
        lines.append((*forward[:warm], *steady, *backward[len(forward) - warm :]))
    return Schedule("published", (*range(p),) * v, units, tuple(lines))


def test_the_published_seq1f1b_i_breaks_where_a_block_ends_inside_a_sequence():
    for p, k in ((4, 2), (4, 4), (4, 1), (8, 4)):
        published(p, 8, k, 2).validate()
        assert build_schedule("seq1f1b-i", p, 8, k).rows == published(p, 8, k, 2).rows
    for p, k in ((4, 3), (4, 8), (8, 3), (8, 16)):
        with pytest.raises(PlanError, match=r"'(order|deadlock)'(?s:.*)\npp_rank 0 \| "):
            published(p, 8, k, 2).validate()
        build_schedule("seq1f1b-i", p, 8, k).validate()


def test_two_pp_ranks_that_wait_for_each_other():
    made = Schedule("hand", (0, 1), (Unit(0, 0, 1), Unit(1, 0, 1)), rows("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    message = refused(made, "deadlock")
    assert "0B0 (pp_rank 0, action 1) waits for 1B0, which comes after 1F1 (pp_rank 1, action 1)" in message
    assert "which waits for 0F1, which comes after 0B0" in message
    assert "a forward waits for the stage before, a backward for the stage after" in message
    assert message.splitlines()[1:] == ["pp_rank 0 |  0F0  >0B0<  0F1   0B1", "pp_rank 1 |  1F0   1F1   1B0   1B1"]
    with pytest.raises(PlanError, match="deadlock"):
        simulate_schedule(made, Times.uniform(made))


def test_memory():
    assert "hand pp_rank 0 holds 2 from 0F1 (action 1) on; at most 1 may be held" in refused(
        two_pieces(*GOOD), "memory", cap=1
    )
    assert "hand pp_rank 1 holds 2" in refused(two_pieces(*GOOD), "memory", cap=[2, 1])


def test_pp_ranks_and_units():
    made = two_pieces(*GOOD)
    assert "stages on pp_ranks [1, 0]" in refused(replace(made, pp_ranks=(1, 0)), "pp-ranks")
    assert "use [0, 1]" in refused(replace(made, pp_ranks=(1, 0)), "pp-ranks")
    assert "piece 1 of 2" in refused(replace(made, units=(Unit(0, 1, 2), Unit(0, 0, 2))), "units")
    assert "1 of the 2 pieces of sequence 1" in refused(replace(made, units=(Unit(0, 0, 1), Unit(1, 0, 2))), "units")


# -- messages ------------------------------------------------------------------------------------------------------


def test_messages_stand_beside_what_makes_and_uses_them():
    assert two_pieces(*GOOD).pipeline_actions() == rows(
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0 0REDUCE 0RESHARD",
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE 1RESHARD",
    )


def test_a_stage_that_is_done_reduces_its_gradients_while_others_compute():
    row = [str(action) for action in build_schedule("interleaved", 2, 2, chunks=2).pipeline_actions()[0]]
    assert row.index("2REDUCE") < row.index("0B0") < row.index("0B1") < row.index("0REDUCE")
    assert row[row.index("2REDUCE") - 2 :][:4] == ["2B1", "2SEND_B1", "2REDUCE", "2RESHARD"]


def test_a_message_that_is_used_late_is_received_in_the_order_of_sending():
    """Pipeline rank 0 sends 0SEND_F1 before 2SEND_F0; pp_rank 1 uses the latter first."""
    made = Schedule("hand", (0, 1, 0, 1), (Unit(0, 0, 1), Unit(1, 0, 1)), rows(
        "0F0 0F1 2F0 2F1 2B0 0B0 2B1 0B1",
        "1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1",
    ))  # fmt: skip
    made.validate()
    row = [str(action) for action in made.with_messages()[1]]
    assert row[:6] == ["1RECV_F0", "1F0", "1SEND_F0", "1RECV_F1", "3RECV_F0", "3F0"]


def test_neighbouring_stages_on_one_pp_rank_send_nothing():
    made = build_schedule("zb-v", 2, 2)
    turn = [a for row in made.with_messages() for a in row if a.stage in (1, 2) and a.kind.value.startswith("SEND")]
    assert {str(action)[:-1] for action in turn} == {"1SEND_B", "2SEND_F"}


# -- files ---------------------------------------------------------------------------------------------------------


def test_a_file_with_messages_and_empty_cells_is_the_same_schedule():
    made = build_schedule("seq1f1b", 3, 2, 2)
    text = to_csv(made.pipeline_actions())
    assert "REDUCE_GRAD" in text
    assert Schedule.from_csv(text.replace(",0F1", ",, ,0F1") + "\n\n", "seq1f1b", 2) == made


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no actions; give one line per pp_rank"),
        ("0F0,0Q1\n", "file line 1 cell 2: '0Q1' is not an action"),
        ("0F0,0B0\n0F1,0B1\n", "0F1 in line 2 and stage 0 in line 1; a stage is on one pp_rank"),
        ("0F0,0B0\n2F0,2B0\n", "stage 2 but nothing for stage 1"),
        ("1F0,1B0\n0F0,0B0\n", "pp_ranks are numbered from 0"),
        ("0F0,0SEND_F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "a message is received before it is used"),
        ("0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "file stops: 0RECV_B0"),
    ],
)
def test_bad_files(text, words):
    with pytest.raises(PlanError, match=words):
        Schedule.from_csv(text)


def test_pieces_of_a_file_fit_its_units():
    text = to_csv(build_schedule("gpipe", 2, 6).rows)
    with pytest.raises(PlanError, match=r"6 units, which are not sequences of 4 pieces; .*; use 3"):
        Schedule.from_csv(text, pieces=4)
    with pytest.raises(PlanError, match=r"the pieces 4, 1 make 5; .* give numbers that make 6"):
        Schedule.from_csv(text, pieces=[4, 1])
    with pytest.raises(PlanError, match="go backward in reverse order"):
        Schedule.from_csv(text, pieces=2)


# -- grid ----------------------------------------------------------------------------------------------------------


def test_the_grid_shows_time():
    made = two_pieces(*GOOD)
    played = simulate_schedule(made, Times.uniform(made))
    assert grid(made.rows, played.start, played.stop).splitlines() == [
        "pp_rank 0 | 0F0 0F1  .   .   .  0B1  -  0B0  -",
        "pp_rank 1 |  .  1F0 1F1 1B1  -  1B0  -   .   .",
    ]
    assert grid(made.rows) == "pp_rank 0 | 0F0 0F1 0B1 0B0\npp_rank 1 | 1F0 1F1 1B1 1B0"


def test_a_wide_grid_is_cut_into_blocks_and_a_marked_one_shows_the_mark():
    made = build_schedule("1f1b", 2, 40)
    whole = grid(made.rows, width=60)
    assert whole.count("\n\n") == 8 and max(map(len, whole.splitlines())) <= 60
    near = grid(made.rows, mark=(1, 50), width=60)
    assert "\n\n" not in near and f">{made.rows[1][50]}<" in near


def test_repr():
    assert repr(build_schedule("zb-v", 4, 8)) == "<Schedule zb-v: 8 stages on 4 pp_ranks, 8 units>"
