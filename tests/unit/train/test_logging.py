"""Metrics: the file, the summary, trackers and displays."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from statistics import fmean
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.errors import SeqloomError
from seqloom.train.logging import (
    PHASES,
    Metrics,
    RankMeasurement,
    StartUp,
    StepRecord,
    format_step,
    open_display,
    open_trackers,
    read_steps,
    summarize,
    summarize_ranks,
)


def record(step, **values):
    given = {"loss": 5.0 - step / 10, "tokens": 1000, "lr": 1e-3, "grad_norm": 0.5, "measured_ms": 100.0}
    return StepRecord(step=step, **(given | values))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Recorder:
    """A tracker and a display that remember."""

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
    planned = {"predicted_ms": 90.0, "planner_wait_ms": 25.0, "gap_to_bound": 0.1, "idle_share": 0.2, "planner": "flex"}
    phases = dict(zip(PHASES, (1.0, 2.0, 30.0, 60.0, 3.0, 2.5, 1.5), strict=True))
    made = record(1, **planned, **phases, mfu=0.4, memory_allocated_gib=70.5, memory_reserved_gib=75.0)
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
                "factors": "",
                "slowest": None,
                "expert_imbalance": None,
                "mfu": 0.4,
                "memory_allocated_gib": 70.5,
                "memory_reserved_gib": 75.0,
                "bind_ms": 1.0,
                "rows_ms": 2.0,
                "forward_ms": 30.0,
                "backward_ms": 60.0,
                "messages_ms": 3.0,
                "parameters_ms": 2.5,
                "optimiser_ms": 1.5,
                "attention_ms": None,
                "exchange_ms": None,
            }
        ]
    assert read_steps(path) == [made]


def test_files_without_the_newer_metrics_are_read(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "loss": 4.9, "tokens": 1000, "lr": 0.001, "grad_norm": 0.5, "measured_ms": 100.0}\n')
    assert read_steps(path) == [record(1)]
    summary = summarize(read_steps(path))
    assert summary["measured_ms"] == 100.0 and summary["mfu"] is summary["forward_ms"] is None


MEASURED = st.builds(
    RankMeasurement,
    *(st.floats(1e-6, 1e3) for _ in range(8)),
    *(st.integers(1, 1 << 38).map(float) for _ in range(2)),
)


@given(st.lists(MEASURED, min_size=1, max_size=9), st.floats(1e6, 1e18), st.floats(1e12, 1e16))
def test_what_ranks_measured_becomes_one_record(ranks, flops, peak):
    """The slowest rank's step, the mean of every phase, the fullest rank's memory."""
    found = record(1, **summarize_ranks(ranks, flops, peak))
    slowest = max(each.step_s for each in ranks)
    assert found.measured_ms == pytest.approx(1e3 * slowest)
    assert found.mfu == pytest.approx(flops / peak / len(ranks) / slowest)
    assert found.memory_allocated_gib == max(each.allocated for each in ranks) / 2**30
    assert found.memory_reserved_gib == max(each.reserved for each in ranks) / 2**30
    for name, phase in zip(RankMeasurement._fields[1:8], PHASES, strict=True):
        assert getattr(found, phase) == pytest.approx(1e3 * fmean(getattr(each, name) for each in ranks))


def test_phases_inside_layers_are_there_where_all_ranks_have_measured_them():
    rank = RankMeasurement(1.0, *[0.1] * 7, 0, 0, attention_s=0.04, exchange_s=0.02, layers_measured=True)
    both = summarize_ranks([rank, rank._replace(attention_s=0.02)], 1e12, None)
    assert both["attention_ms"] == pytest.approx(30.0) and both["exchange_ms"] == pytest.approx(20.0)
    assert rank.computing_s == pytest.approx(0.18)
    assert "attention_ms" not in summarize_ranks([rank, rank._replace(layers_measured=False)], 1e12, None)


def test_memory_and_mfu_of_a_cpu_are_not_known():
    on_cpu = RankMeasurement(1.0, *[0.1] * 7, allocated=0, reserved=0)
    found = summarize_ranks([on_cpu, on_cpu], 1e12, None)
    assert [found[name] for name in ("mfu", "memory_allocated_gib", "memory_reserved_gib")] == [None] * 3


def test_numbers_that_json_lacks_become_null(tmp_path):
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.step(record(1, loss=float("nan"), grad_norm=float("inf")))
    [line] = lines(tmp_path / "m.jsonl")
    assert line["loss"] is None and line["grad_norm"] is None


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', '{"step": 4, "lo\n', "\x00\x00\x00", '{"step": 4}\n{"ste'])
def test_a_torn_line_and_steps_that_come_again_are_cut_off(tmp_path, tail):
    path = tmp_path / "m.jsonl"
    with Metrics(path) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step, loss=float(step)))
        metrics.evaluation(3, 9.0)
    with path.open("a") as file:
        file.write(tail)
    with Metrics(path, done=2) as metrics:
        metrics.step(record(3, loss=30.0))
    assert [(each["step"], each["loss"]) for each in lines(path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_bad_line_in_the_middle_is_an_error_and_the_file_stays(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(SeqloomError, match=r"m.jsonl, line 2 is not a record; move the file away"):
        Metrics(path, done=5)
    assert path.read_text() == '{"step": 1}\nnonsense\n{"step": 2}\n'


def test_a_process_that_dies_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from seqloom.train.logging import Metrics\n"
        "metrics = Metrics(Path(sys.argv[1]))\n"
        "for step in range(1, 6): metrics.evaluation(step, 1.0)\n"
        "os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 9
    assert [each["step"] for each in lines(path)] == [1, 2, 3, 4, 5]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_a_clear_error(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics._file.close()
    metrics._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - the metrics close it
    with pytest.raises(SeqloomError, match=r"m.jsonl: cannot be written \(No space left on device\); make room"):
        metrics.note(1, "late")
    with pytest.raises(OSError, match="No space left"):
        metrics.__exit__()


def test_the_summary_has_the_names_of_the_contract_and_leaves_the_first_step_out_of_times():
    steps = [
        record(1, measured_ms=9e9),
        record(2, measured_ms=100.0, predicted_ms=80.0, gap_to_bound=0.5, mfu=0.4, memory_allocated_gib=7.0),
        record(
            3, measured_ms=200.0, planner_wait_ms=100.0, tokens=3000, mfu=0.5, memory_allocated_gib=6.0, rows_ms=3.0
        ),
    ]
    assert summarize(steps) == {
        "steps": 3,
        "first_loss": 4.9,
        "final_loss": 4.7,
        "tokens_per_second": pytest.approx(10_000.0),
        "predicted_ms": 80.0,
        "measured_ms": 150.0,
        "planner_wait_ms": 50.0,
        "gap_to_bound": 0.5,
        "mfu": pytest.approx(0.45),
        **dict.fromkeys(PHASES),
        "rows_ms": 3.0,
        "memory_allocated_gib": 7.0,
        "memory_reserved_gib": None,
    }


def test_a_summary_of_one_step_has_its_times_and_one_of_none_has_none():
    assert set(summarize([]).values()) == {0, None}
    summary = summarize([record(1)])
    assert summary["measured_ms"] == 100.0 and summary["predicted_ms"] is None


def test_a_resumed_run_goes_on_in_file_and_summary(tmp_path):
    path = tmp_path / "m.jsonl"
    with Metrics(path) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
    with Metrics(path, done=2) as metrics:
        assert metrics.summary()["final_loss"] == 4.8 and metrics.summary()["measured_ms"] is None
        metrics.step(record(3, loss=1.0, measured_ms=7.0))
        summary = metrics.summary()
    assert [each.loss for each in read_steps(path)] == [4.9, 4.8, 1.0]
    assert [summary[name] for name in ("steps", "first_loss", "final_loss", "measured_ms")] == [3, 4.9, 1.0, 7.0]


def test_trackers_and_display_hear_of_every_nth_step_and_of_events(tmp_path):
    tracker, display = Recorder(), Recorder()
    with Metrics(tmp_path / "m.jsonl", every=3, trackers=[tracker], display=display) as metrics:
        for step in range(1, 8):
            metrics.step(record(step))
        metrics.evaluation(7, 2.5)
        metrics.note(7, "checkpoint written")
    assert [step for step, _ in tracker.seen] == [1, 3, 6, 7]
    assert tracker.seen[-1] == (7, {"evaluation_loss": 2.5})
    assert "planner" not in tracker.seen[0][1] and "step" not in tracker.seen[0][1]
    assert display.seen == [1, 3, 6]
    assert display.notes == ["step 7: loss 2.5000 on the validation documents", "step 7: checkpoint written"]
    assert tracker.closed and display.closed
    assert len(lines(tmp_path / "m.jsonl")) == 9


RECORD = StepRecord(
    step=7,
    loss=4.56789,
    tokens=12_000,
    lr=1e-3,
    grad_norm=0.8123,
    measured_ms=120.0,
    predicted_ms=110.0,
    planner_wait_ms=0.5,
    gap_to_bound=0.042,
    idle_share=0.1,
    planner="flex",
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_one_plain_line_per_step_where_nobody_looks():
    stream = io.StringIO()
    display = open_display(stream, 100)
    display.step(RECORD)
    display.note("checkpoint written")
    display.close()
    assert stream.getvalue() == (
        "step   7/100  loss 4.5679  99,585 tokens/s  lr 1.00e-03  norm 0.812  120 ms (predicted 110 ms)  wait 500 us  "
        "gap 4.2 %  idle 10.0 %  flex\ncheckpoint written\n"
    )


def test_mfu_and_memory_are_shown_where_they_are_known():
    known = replace(RECORD, mfu=0.4127, memory_allocated_gib=70.52, memory_reserved_gib=75.0)
    assert "wait 500 us  mfu 41.3 %  memory 70.5/75.0 GiB  gap 4.2 %" in format_step(known)


def test_what_is_not_known_is_left_out_and_a_late_planner_is_named():
    stream = io.StringIO()
    known = {"step": 1, "loss": 1.0, "tokens": 10, "lr": 0.1, "grad_norm": 1.0, "measured_ms": 1000.0}
    open_display(stream, 5).step(StepRecord(**known, planner="static", fallback=True))
    assert stream.getvalue().endswith("norm 1  1 s  wait 0 ns  static, planner late\n")


def test_a_terminal_gets_a_live_view(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    live = open_display(stream, 100, 6)
    live.step(RECORD)
    live.note("step 7: [not markup]")
    live.close()
    text = stream.getvalue()
    assert "7/100" in text
    assert "loss 4.5679" in text
    assert "step 7: [not markup]" in text


SETTINGS = {"run": {"steps": 3}}


@pytest.fixture
def calls(monkeypatch):
    """Trackers in place of the real ones, and what they were asked to do."""
    calls = []

    class Run:
        id = "abc"

        def log(self, figures, step):
            calls.append(("log", figures, step))

        def finish(self):
            calls.append(("finish",))

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", folder, purge_step))

        def add_text(self, name, text):
            calls.append(("text", name, text))

        def add_scalar(self, name, value, step):
            calls.append(("scalar", name, value, step))

        def close(self):
            calls.append(("close",))

    def init(**options):
        calls.append(("init", options))
        return Run()

    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        module.init = init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    return calls


def test_nothing_is_imported_when_nothing_is_asked_for(tmp_path):
    assert open_trackers([], tmp_path, settings=SETTINGS) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_error_at_the_start(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(SeqloomError, match=f"log.sinks names '{name}', which cannot be imported.*pip install {name}"):
        open_trackers([name], tmp_path, settings=SETTINGS)


def test_no_tracker_starts_when_another_is_missing(tmp_path, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(SeqloomError, match="trackio"):
        open_trackers(["wandb", "trackio"], tmp_path, settings=SETTINGS)
    assert calls == []


def test_tensorboard(tmp_path, calls):
    [tracker] = open_trackers(["tensorboard"], tmp_path, settings=SETTINGS)
    tracker.write(2, {"loss": 1.5})
    tracker.close()
    open_trackers(["tensorboard"], tmp_path, settings=SETTINGS, done=4)
    folder = str(tmp_path / "tensorboard")
    assert calls == [
        ("open", folder, None),
        ("text", "config", "    run.steps = 3"),
        ("scalar", "loss", 1.5, 2),
        ("close",),
        ("open", folder, 5),
    ]


def test_wandb_goes_on_in_the_same_run(tmp_path, calls):
    folder = tmp_path / "night"
    [tracker] = open_trackers(["wandb"], folder, settings=SETTINGS)
    tracker.write(2, {"loss": 1.5})
    tracker.close()
    open_trackers(["wandb"], folder, settings=SETTINGS, done=2)
    common = {"project": "seqloom", "name": "night", "dir": str(folder), "config": SETTINGS}
    assert calls == [
        ("init", common),
        ("log", {"loss": 1.5}, 2),
        ("finish",),
        ("init", {**common, "id": "abc", "resume": "must"}),
    ]


def test_trackio(tmp_path, calls):
    for done in (0, 2):
        [tracker] = open_trackers(["trackio"], tmp_path / "night", settings=SETTINGS, done=done)
        tracker.write(done + 1, {"loss": 1.5})
        tracker.close()
    assert [call[1]["resume"] for call in calls if call[0] == "init"] == ["never", "allow"]
    assert calls[1:3] == [("log", {"loss": 1.5}, 1), ("finish",)]


def test_phases_of_the_start_are_shown_and_timed(monkeypatch):
    seconds, stream = iter([0.0, 1.0, 3.5, 4.0]), io.StringIO()
    monkeypatch.setattr("seqloom.train.logging.time.monotonic", lambda: next(seconds))
    start = StartUp(stream)
    start.enter("connecting")
    start.enter("compiling kernels")
    start.show("compiling kernels 2/4")
    assert stream.getvalue() == "start: connecting\nstart: compiling kernels\nstart: compiling kernels 2/4\n"
    assert start.summary() == "first step done 4.0 s after the rank's start: connecting 2.5, compiling kernels 0.5"


def test_a_shape_is_shown_where_it_says_something_with_its_legend_once():
    stream = io.StringIO()
    display = open_display(stream, 3)
    for step, shape in enumerate(("t1p1 on 8", "t2p2 on 4, 2 of t1p1 on 2", "t2p2 on 8"), 1):
        display.step(record(step, shape=shape))
    plain, legend, mixed, staged = stream.getvalue().splitlines()
    assert "t1p1" not in plain and legend.startswith("t2p2 on 4: a pipeline with tensor degree 2 and 2 stages")
    assert "t2p2 on 4, 2 of t1p1 on 2" in mixed and "t2p2 on 8" in staged
