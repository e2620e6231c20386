"""A hang is told with the action, the peer and the grid."""

import pytest

from seqloom.engine.stage_p2p import Progress
from seqloom.errors import SeqloomError
from seqloom.plan import Action, Pipeline, Stage
from seqloom.schedules import build_schedule


def line(name="1f1b", hosts=2):
    schedule = build_schedule(name, hosts, 2)
    stages = tuple(Stage((host,), (k, k + 1)) for k, host in enumerate(schedule.pp_ranks))
    return Pipeline(stages, (), schedule.pipeline_actions())


def test_an_error_of_the_network_names_rank_action_and_peer_and_marks_the_grid():
    progress = Progress(line(), 1)
    progress.at(Action.parse("1F1"))
    with (
        pytest.raises(SeqloomError) as caught,
        progress.waiting(Action.parse("1RECV_F1"), 0),
    ):
        raise RuntimeError("[pair.cc:1] Timed out waiting 1000ms for recv\nmore")
    first, *drawn = str(caught.value).splitlines()
    assert first.startswith("rank 1 is at action 1F1 and waits for 1RECV_F1 from rank 0 (Timed out waiting 1000ms for")
    assert first.endswith("recv):")
    assert len(drawn) == 2 and ">1F1<" in drawn[1] and ">" not in drawn[0]
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_ours_keeps_its_words_and_gets_a_note():
    progress = Progress(line(), 0)
    with pytest.raises(SeqloomError, match="deadlock") as caught, progress.waiting(Action.parse("0RECV_B0"), 1):
        raise SeqloomError("deadlock")
    assert "waits for 0RECV_B0 from rank 1" in caught.value.__notes__[0]


def test_places():
    progress = Progress(line(), 0)
    assert progress.place() == "rank 0 is at the end of its row"
    progress.at(Action.parse("0B1"))
    with progress.waiting(Action.parse("0SEND_F0"), None):
        assert progress.place() == "rank 0 is at action 0B1 and waits for 0SEND_F0"
    assert progress.place() == "rank 0 is at action 0B1"
    assert ">0B1<" in progress.report()


def test_messages_among_a_hosts_own_ranks_are_marked_at_what_makes_them():
    progress = Progress(line("zb-v", 1), 0)
    for told, marked in (("0SEND_F0", ">0F0<"), ("1RECV_F0", ">0F0<"), ("1SEND_B1", ">1I1<"), ("0RECV_B1", ">1I1<")):
        progress.at(Action.parse(told))
        assert marked in progress.report()


def test_a_rank_of_no_stage_draws_without_a_mark():
    assert ">" not in Progress(line(), 7).report()
