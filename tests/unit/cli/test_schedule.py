import pytest

from seqloom.schedules import SCHEDULE_NAMES

SMALL = "--stages 4 --micro-batches 8"


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_every_name_is_known_and_reports_the_same_things(run, name):
    report = run(f"schedule {name} {SMALL} --json").json
    assert report["schedule"] == name
    assert (report["stages"], report["micro_batches"], report["pieces"]) == (4, 8, 1)
    assert 0 <= report["bubble"] < 0.4
    assert report["makespan"] == pytest.approx(24 / (1 - report["bubble"]))
    assert len(report["peak_memory"]) == len(report["grid"]) == 4
    assert len(report["grid"][0]) in (8 * 2 * report["chunks"], 8 * 3 * report["chunks"])
    assert report["until_end"] >= report["makespan"]


def test_seq1f1b_by_the_closed_form(run):
    report = run("schedule seq1f1b --stages 4 --micro-batches 8 --pieces 2 --times 1,1.6,0.6 --json").json
    assert report["bubble"] == pytest.approx(3 / (3 + 16))
    assert report["makespan"] == pytest.approx(3.2 * (8 + 3 / 2))
    assert report["peak_memory"] == [2.5, 2, 1.5, 1]
    assert report["grid"][3][:5] == ["3F0", "3F1", "3B1", "3F2", "3B0"]
    assert report["times"] == [1, 1.6, 0.6]


def test_chunks_and_pieces_of_every_sequence(run):
    report = run("schedule seq1f1b-i --stages 2 --pieces 2,1,3 --chunks 3 --json").json
    assert (report["chunks"], report["micro_batches"], report["pieces"]) == (3, 3, [2, 1, 3])


def test_text_shows_the_grid_and_the_figures(run):
    text = run("schedule 1f1b --stages 2 --micro-batches 3").out
    assert text.splitlines() == [
        "1f1b: 2 pipeline ranks, 1 stage each, 3 micro-batches, 1 piece each",
        "pp_rank 0 | 0F0 0F1  .   .  0B0  -  0F2 0B1  -   .  0B2  -",
        "pp_rank 1 |  .  1F0 1B0  -  1F1 1B1  -  1F2 1B2  -   .   .",
        "F forward  B backward  . idle",
        "bubble 25.0 %, makespan 12",
        "peak memory per pipeline rank, in micro-batches: 2 1",
    ]


def test_what_does_not_fit_in_a_few_blocks_is_drawn_with_marks(run):
    text = run("schedule zb-h2 --stages 4 --micro-batches 64").out
    lines = text.splitlines()
    assert [line[:11] for line in lines[1:5]] == [f"pp_rank {h} |" for h in range(4)]
    assert set(lines[1][11:]) <= set(" FIW.")
    assert "from the first start to the last stop" in " ".join(text.split())


def test_a_file_gives_what_the_name_gave(run, folder):
    named = run(f"schedule seq1f1b-zb {SMALL} --pieces 2 --csv s.csv --picture s.svg --json").json
    assert "pp_rank 0" in (folder / "s.svg").read_text()
    read = run("schedule --file s.csv --pieces 2 --stages 4 --micro-batches 8 --chunks 1 --json").json
    assert read == named | {"schedule": "s.csv"}
    assert run("schedule mine --file s.csv --pieces 2 --json").json == named | {"schedule": "mine"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("seq1f2b --stages 4 --micro-batches 8", "unknown schedule 'seq1f2b'; did you mean seq1f1b"),
        ("1f1b", "--stages and --micro-batches are missing"),
        ("--stages 4 --micro-batches 8", "a NAME is missing"),
        (f"1f1b {SMALL} --times 1,1", "--times '1,1'; three numbers"),
        (f"1f1b {SMALL} --times 1,one,1", "three numbers"),
        (f"1f1b {SMALL} --times 0,1,1", "the first above 0"),
        (f"1f1b {SMALL} --times 1,-1,1", "three numbers"),
        (f"1f1b {SMALL} --times 1,1,1/0", "three numbers"),
        (f"1f1b {SMALL} --pieces two", "--pieces 'two'; a whole number is wanted"),
        (f"1f1b {SMALL} --pieces 0", "0 pieces; there is at least 1"),
        (f"v-min {SMALL} --pieces 2", "use 1 piece, or the schedule seq1f1b"),
        (f"seq1f1b {SMALL} --pieces 100000", "use at most 1,024 pieces"),
        (f"1f1b {SMALL} --chunks 2", "use 1"),
        (f"1f1b {SMALL} --memory 0", "--memory 0; a number of micro-batches above 0"),
        (f"balanced {SMALL} --pieces 4 --memory 0.5", "memory for 0.5 micro-batches; all pieces"),
        (f"1f1b {SMALL} --csv s.txt", "a schedule file ends in .csv"),
        (f"1f1b {SMALL} --picture s.gif", "a picture file ends in .svg"),
        ("--file missing.csv", "cannot use 'missing.csv'"),
    ],
)
def test_bad_input_is_refused_with_a_way_out(refused, line, words):
    assert words in refused(f"schedule {line}")


BROKEN = {
    "deadlock": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", ">0B0<", "waits for 1B0"),
    "causality": ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n", ">0B0<", "pieces of one document go backward in reverse order"),
    "missing": ("0F0,0F1,0B1,0B0\n1F0,1F1,1B1\n", ">1F0<", "every stage has for every round one F and one B"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_with_its_step_marked(run, folder, kind):
    text, marked, words = BROKEN[kind]
    (folder / "bad.csv").write_text(text)
    result = run(f"schedule --file bad.csv --pieces {1 if kind == 'deadlock' else 2}")
    assert result.code == 2 and result.out == ""
    first, *lines = result.err.splitlines()
    assert first.startswith("seqloom: ") and words in first
    assert [line[:11] for line in lines] == ["pp_rank 0 |", "pp_rank 1 |"]
    assert sum(marked in line for line in lines) == 1


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--stages 3", "--stages 3, but 's.csv' has 2; leave --stages out, or use 2"),
        ("--micro-batches 3", "has 4"),
        ("--chunks 2", "has 1"),
        ("--pieces 3", "4 units, which are not sequences of 3 pieces"),
        ("--memory 1", "at most 1 may be held"),
    ],
)
def test_what_is_said_of_a_file_is_compared_with_it(run, option, words):
    assert run("schedule 1f1b --stages 2 --micro-batches 4 --csv s.csv").code == 0
    result = run(f"schedule --file s.csv {option}")
    assert result.code == 2 and words in result.err


def test_a_file_that_is_no_text(run, folder):
    (folder / "bad.csv").write_bytes(b"\xff\xfe0F0")
    result = run("schedule --file bad.csv")
    assert result.code == 2 and "is not text" in result.err
