from pathlib import Path

import pytest

from seqloom.cli.bench import load_tables
from seqloom.errors import SeqloomError


def test_alone_it_lists_the_tables_and_their_scripts(run):
    shown = run("bench --json").json["tables"]
    assert {"flexsp-cells", "usp", "seq1f1b", "hbp", "hydraulis", "zeppelin"} <= shown.keys()
    for each in shown.values():
        assert (Path(__file__).parents[3] / each["script"]).is_file()
    assert "bench_usp.py" in run("bench").out


def test_a_quick_run_prints_every_column_and_says_that_it_is_none(run):
    table = run("bench --table usp --quick --json").json["tables"]["usp"]
    assert table["quick"] and table["command"].startswith("python benchmarks/bench_usp.py")
    for row in table["figures"]:
        assert row["difference"] == pytest.approx(row["simulated"] / row["published"] - 1)
        assert row["validated"] == (abs(row["difference"]) <= table["close"])


def test_a_committed_table_runs_nothing_and_marks_its_misses(run):
    table = run("bench --table hbp --committed --json").json["tables"]["hbp"]
    misses = sum(row["validated"] is False for row in table["figures"])
    shown = run("bench --table hbp --committed").out
    assert not table["quick"] and misses and shown.count(" miss\n") == misses


def test_what_it_refuses(refused):
    assert "did you mean usp" in refused("bench --table ups")
    assert "give one of them" in refused("bench --quick --committed")


def test_an_installation_without_scripts_is_told_the_way_out(tmp_path):
    with pytest.raises(SeqloomError, match="installed without one; in a checkout, pip install -e"):
        load_tables(tmp_path)
