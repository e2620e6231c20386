import io

from rich.console import Console

from seqloom.train.logging import Lines, Live, StepRecord, open_display

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
    assert isinstance(display, Lines)
    display.step(RECORD)
    display.note("checkpoint written")
    display.close()
    assert stream.getvalue() == (
        "step   7/100  loss 4.5679  99,585 tokens/s  lr 1.00e-03  norm 0.812  120 ms (predicted 110 ms)  wait 500 us  "
        "gap 4.2 %  idle 10.0 %  flex\ncheckpoint written\n"
    )


def test_what_is_not_known_is_left_out_and_a_late_planner_is_named():
    stream = io.StringIO()
    known = {"step": 1, "loss": 1.0, "tokens": 10, "lr": 0.1, "grad_norm": 1.0, "measured_ms": 1000.0}
    Lines(stream, 5).step(StepRecord(**known, planner="static", fallback=True))
    assert stream.getvalue().endswith("norm 1  1 s  wait 0 ns  static, planner late\n")


def test_a_terminal_gets_a_live_view():
    stream = Terminal()
    display = open_display(stream, 100, 6)
    assert isinstance(display, Live)
    display.close()

    stream = Terminal()
    live = Live(Console(file=stream, force_terminal=True, width=160), 100)
    live.step(RECORD)
    live.note("step 7: [not markup]")
    live.close()
    text = stream.getvalue()
    assert "7/100" in text
    assert "loss 4.5679" in text
    assert "step 7: [not markup]" in text
