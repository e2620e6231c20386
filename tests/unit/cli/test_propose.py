"""``seqloom propose``: strategies of a data set as JSON, as a file that runs read, and for people."""

import json

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.cli.propose import try_strategies
from seqloom.planners.hydraulis import check_strategies, strategies_from_json

BOX = "--lengths data.txt --cluster 1x8xL40S --model qwen3-0.6b"
PROPOSE = f"propose {BOX} --tokens-per-step 60000 --steps 6"


@pytest.fixture
def data(folder):
    """Mostly short documents, every tenth a long one."""
    draw = np.random.default_rng(0)
    lengths = np.where(np.arange(300) % 10 == 0, draw.integers(8_000, 40_000, 300), draw.integers(100, 1_000, 300))
    (folder / "data.txt").write_text("".join(f"{length}\n" for length in lengths))
    return lengths


def test_the_contract(run, folder, data):
    report = run(f"{PROPOSE} --max-length 30000 --out strategies.json --json").json
    assert report["strategies"] and report["tokens_per_step"] == 60_000 and report["max_length"] == 30_000
    kept = data[data <= 30_000]
    assert (report["sequences"], report["dropped"]) == (len(kept), len(data) - len(kept))
    for strategy in report["strategies"]:
        ranks = []
        for pipe in strategy["pipelines"]:
            assert pipe.keys() == {"stages", "tensor", "ulysses", "ring", "ranks", "longest"}
            assert len(pipe["ranks"]) == pipe["stages"] * pipe["tensor"] * pipe["ulysses"] * pipe["ring"]
            ranks += pipe["ranks"]
        assert sorted(ranks) == list(range(8))
    assert max(pipe["longest"] for pipe in report["strategies"][0]["pipelines"]) >= kept.max()
    shares = [strategy["chosen_share"] for strategy in report["strategies"]]
    sample = report["sample"]
    assert sum(shares) == pytest.approx(1) and sample["steps"] == len(sample["chosen"]) == 6
    assert [sample["chosen"].count(k) / 6 for k in range(len(shares))] == shares
    for k, strategy in enumerate(report["strategies"]):
        own = [ms for ms, chosen in zip(sample["step_ms"], sample["chosen"], strict=True) if chosen == k]
        assert strategy["mean_step_ms"] == (pytest.approx(sum(own) / len(own)) if own else None)
    assert all(best <= kept_ms for best, kept_ms in zip(sample["step_ms"], sample["fixed_step_ms"], strict=True))
    written = strategies_from_json((folder / "strategies.json").read_text())
    assert written == strategies_from_json(json.dumps(report))
    check_strategies(written, cost_model("1x8xL40S", "qwen3-0.6b", sharding="free", stages=2))


def test_a_table_and_a_chart_for_people(run, data):
    result = run(f"{PROPOSE} --most 2")
    assert result.code == 0, result.err
    for words in ("free sharding", "300 sequences", "chosen %", "On the first 6 steps", "A  "):
        assert words in result.out
    rows = [line for line in result.out.splitlines() if len(line) == 11 and line[:3] in ("0  ", "1  ")]
    assert 1 <= len(rows) <= 2 and all(row[3:].isalpha() for row in rows)


def test_the_best_strategy_of_every_step_is_counted(data):
    cost = cost_model("1x8xL40S", "qwen3-0.6b", sharding="free", stages=2)
    pipe = {"stages": 1, "tensor": 1, "ring": 1, "longest": 40_000}
    wide = {"pipelines": [{**pipe, "ulysses": 8, "ranks": list(range(8))}]}
    many = {"pipelines": [{**pipe, "ulysses": 1, "ranks": [rank], "longest": 20_000} for rank in range(8)]}
    strategies = strategies_from_json(json.dumps({"strategies": [wide, many]}))
    trial = try_strategies(np.array([40_000] + [500] * 80), strategies, cost, 40_000, 9)
    assert trial.chosen == (0, 1) and trial.fixed == 0  # only the wide one holds the long document
    assert trial.share(0) == trial.share(1) == 0.5
    assert trial.step_ns[1] == trial.mean_ns(1) < trial.fixed_ns[1]
    assert trial.gain == sum(trial.fixed_ns) / sum(trial.step_ns) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{PROPOSE} --out strategies.txt", "ends in .json"),
        (f"{PROPOSE} --most 0", "--most 0; give 1 or more"),
        (f"{PROPOSE} --steps 0", "--steps 0; give 1 or more"),
        (f"{PROPOSE} --max-length 50", "longer than the maximum length 50"),
        (f"{PROPOSE} --budget-gib 1", "raise the memory budget"),
        (f"propose {BOX} --tokens-per-step 0", "--tokens-per-step 0; give 1 or more"),
        ("propose --lengths nowhere.txt --cluster 1x8xL40S --model qwen3-0.6b --tokens-per-step 9", "does not exist"),
        (f"{PROPOSE} --model qwen3-0.7b", "did you mean"),
    ],
)
def test_bad_input_is_refused(refused, data, words, message):
    assert message in refused(words)


def test_a_document_that_nothing_holds(refused, folder):
    (folder / "data.txt").write_text("100\n90000000\n")
    assert "drop longer sequences (--max-length" in refused(PROPOSE)
