import json
import os
import subprocess
import sys

import pytest

from seqloom.errors import SeqloomError
from seqloom.train.logging import Journal, Metrics, StepRecord, Summary, read_steps


def record(step, **values):
    given = {"loss": 5.0 - step / 10, "tokens": 1000, "lr": 1e-3, "grad_norm": 0.5, "measured_ms": 100.0}
    return StepRecord(step=step, **(given | values))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorder:
    """A sink and a display that remember."""

    def __init__(self):
        self.seen, self.notes, self.closed = [], [], False

    def write(self, step, figures):
        self.seen.append((step, figures))

    def step(self, record):
        self.seen.append(record.step)

    def note(self, text):
        self.notes.append(text)

    def close(self):
        self.closed = True


def test_a_step_is_one_line_with_all_figures(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    made = record(1, predicted_ms=90.0, planner_wait_ms=25.0, gap_to_bound=0.1, idle_share=0.2, planner="flex")
    with Metrics(path) as metrics:
        metrics.step(made)
        assert lines(path) == [  # before the file is closed
            {
                "step": 1,
                "loss": 4.9,
                "tokens": 1000,
                "tokens_per_second": 8000.0,
                "lr": 1e-3,
                "grad_norm": 0.5,
                "predicted_ms": 90.0,
                "measured_ms": 100.0,
                "planner_wait_ms": 25.0,
                "gap_to_bound": 0.1,
                "idle_share": 0.2,
                "planner": "flex",
                "plan_hash": "",
                "shape": "",
                "fallback": False,
            }
        ]
    assert read_steps(path) == [made]


def test_numbers_that_json_lacks_become_null(tmp_path):
    journal = Journal(tmp_path / "m.jsonl")
    journal.write(record(1, loss=float("nan"), grad_norm=float("inf")).as_dict())
    journal.close()
    [line] = lines(tmp_path / "m.jsonl")
    assert line["loss"] is None and line["grad_norm"] is None


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', '{"step": 4, "lo\n', "\x00\x00\x00", '{"step": 4}\n{"ste'])
def test_a_torn_line_and_steps_that_come_again_are_cut_off(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    journal = Journal(path)
    for step in (1, 2, 3):
        journal.write({"step": step, "loss": float(step)})
    journal.write({"step": 3, "evaluation_loss": 9.0})
    journal.close()
    with path.open("a") as file:
        file.write(tail)
    journal = Journal(path, done=2)
    assert [each["step"] for each in journal.kept] == [1, 2]
    journal.write({"step": 3, "loss": 30.0})
    journal.close()
    assert lines(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}]


def test_a_bad_line_in_the_middle_is_an_error_and_the_file_stays(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(SeqloomError, match=r"m.jsonl, line 2 is not a record; move the file away"):
        Journal(path, done=5)
    assert path.read_text() == '{"step": 1}\nnonsense\n{"step": 2}\n'


def test_a_process_that_dies_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from seqloom.train.logging import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for step in range(1, 6): journal.write({'step': step, 'loss': 1.0})\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    assert [each["step"] for each in lines(path)] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_a_clear_error(tmp_path):
    journal = Journal(tmp_path / "m.jsonl")
    journal._file.close()
    journal._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - the journal closes it
    with pytest.raises(SeqloomError, match=r"m.jsonl: cannot be written \(No space left on device\); make room"):
        journal.write({"step": 1})
    with pytest.raises(OSError, match="No space left"):
        journal.close()


def test_the_summary_has_the_names_of_the_contract_and_leaves_the_first_step_out_of_times():
    summary = Summary()
    summary.add(record(1, measured_ms=9e9))
    summary.add(record(2, measured_ms=100.0, planner_wait_ms=0.0, predicted_ms=80.0, gap_to_bound=0.5))
    summary.add(record(3, measured_ms=200.0, planner_wait_ms=100.0, tokens=3000))
    assert summary.as_dict() == {
        "steps": 3,
        "first_loss": 4.9,
        "final_loss": 4.7,
        "tokens_per_second": pytest.approx(10_000.0),
        "predicted_ms": 80.0,
        "measured_ms": 150.0,
        "planner_wait_ms": 50.0,
        "gap_to_bound": 0.5,
    }


def test_a_summary_of_one_step_has_its_times_and_one_of_none_has_none():
    summary = Summary()
    assert set(summary.as_dict().values()) == {0, None}
    summary.add(record(1))
    assert summary.as_dict()["measured_ms"] == 100.0
    assert summary.as_dict()["predicted_ms"] is None


def test_a_resumed_run_goes_on_in_file_and_summary(tmp_path):
    path = tmp_path / "m.jsonl"
    with Metrics(path) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
    with Metrics(path, done=2) as metrics:
        assert metrics.summary.as_dict()["final_loss"] == 4.8
        metrics.step(record(3, loss=1.0))
    assert [each.loss for each in read_steps(path)] == [4.9, 4.8, 1.0]
    assert (metrics.summary.steps, metrics.summary.first_loss, metrics.summary.final_loss) == (3, 4.9, 1.0)


def test_sinks_and_display_hear_of_every_nth_step_and_of_events(tmp_path):
    sink, display = Recorder(), Recorder()
    with Metrics(tmp_path / "m.jsonl", every=3, sinks=[sink], display=display) as metrics:
        for step in range(1, 8):
            metrics.step(record(step))
        metrics.evaluation(7, 2.5)
        metrics.note(7, "checkpoint written")
    assert [step for step, _ in sink.seen] == [1, 3, 6, 7]
    assert sink.seen[-1] == (7, {"evaluation_loss": 2.5})
    assert "planner" not in sink.seen[0][1] and "step" not in sink.seen[0][1]
    assert display.seen == [1, 3, 6]
    assert display.notes == ["step 7: loss 2.5000 on the validation documents", "step 7: checkpoint written"]
    assert sink.closed and display.closed
    assert len(lines(tmp_path / "m.jsonl")) == 9
