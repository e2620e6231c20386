"""``seqloom plan --planner hbp``: steps of a data set, one plan file each, figures beside plain packing."""

import pytest

from seqloom.plan import Plan

PACK = "plan --lengths lengths.txt --batch-size 12 --cluster 1x8xH200 --model llama3-8b --planner hbp"


def test_steps_are_reported_and_written(run, folder):
    report = run(f"{PACK} --tokens-per-step 40000 --out plan.json --json").json
    assert report["planner"] == "hbp" and (report["sequences"], report["tokens_per_step"]) == (12, 40_000)
    assert sorted(k for step in report["steps"] for k in step["documents"]) == list(range(12))
    assert {step["level"] for step in report["steps"]} == set(range(len(report["levels"])))
    assert sum(level["documents"] for level in report["levels"]) == 12
    assert sum(level["tokens"] for level in report["levels"]) == report["tokens"]
    assert sum(level["steps"] for level in report["levels"]) == len(report["steps"]) == len(report["out"]) > 1
    lengths = [int(line) for line in (folder / "lengths.txt").read_text().split()]
    for step, file in zip(report["steps"], report["out"], strict=True):
        plan = Plan.load(folder / file)
        assert plan.documents == tuple(lengths[k] for k in step["documents"]) and plan.tokens <= 40_000
    first, plain = report["balance"]["hbp"], report["balance"]["first-fit"]
    assert first.keys() == plain.keys() == {"dbr", "pr", "abr", "cr", "steps", "mean_step_ms"}
    assert first["steps"] == len(report["steps"])
    mean = sum(step["step_ms"] for step in report["steps"]) / len(report["steps"])
    assert first["mean_step_ms"] == pytest.approx(mean)
    box = "--cluster 1x8xH200 --model llama3-8b --json"
    assert run(f"simulate {report['out'][0]} {box}").json["step_ms"] == report["steps"][0]["step_ms"]


def test_a_table_for_people(run):
    result = run(f"{PACK} --tokens-per-step 40000 --out plan.txt")
    assert result.code == 0, result.err
    for words in ("a data set of 12 sequences", "pack of", "first-fit", "DBR %", "steps,", "wrote plan-0.txt .. plan-"):
        assert words in result.out
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "say how large one is with --tokens-per-step"),
        ("--tokens-per-step 0", "give 1 or more"),
        ("--tokens-per-step 30000", "sequence 6 has 33000 tokens, more than the 30000 of a step"),
        ("--tokens-per-step 40000 --view", "hbp makes one per step"),
        ("--tokens-per-step 40000 --explain", "hbp makes one per step"),
        ("--tokens-per-step 40000 --out plan.csv", "ends in .json or .txt"),
        ("--tokens-per-step 40000 --planner flex", "which plans one batch"),
    ],
)
def test_what_does_not_go_together_is_refused(refused, words, message):
    assert message in refused(f"{PACK} {words}")


def test_planners_of_batches_refuse_it(refused):
    box = "--lengths lengths.txt --batch-size 12 --cluster 1x8xH200 --model llama3-8b"
    assert "packs a whole data set" in refused(f"compare {box} --planners hbp,flex")
