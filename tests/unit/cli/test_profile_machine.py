"""``seqloom profile --model``: the file it writes is a profile; what it cannot measure is refused beforehand."""

import pytest

torch = pytest.importorskip("torch")

from seqloom.cost import Profile  # noqa: E402
from seqloom.train import launch as processes  # noqa: E402

SPEC = """
name = "small"
layers = 1
hidden = 16
heads = 2
kv_heads = 1
head_dim = 8
ffn = 24
gated = true
vocabulary = 32
tied = false
"""
LINE = "profile --model small.toml --dtype float32 --capacity 64 --max-length 128"


@pytest.fixture(autouse=True)
def spec(folder):
    (folder / "small.toml").write_text(SPEC)


@pytest.mark.slow
def test_the_profile_is_written_and_prices_plans(run, folder, fork_server):
    report = run(f"{LINE} --ranks 2 --sharding none --output machine.json --json").json
    assert (report["output"], report["model"], report["cluster"]) == ("machine.json", "small", "2xCPU")
    assert all(trial["measured_ms"] > 0 and trial["predicted_ms"] > 0 for trial in report["trials"])
    profile = Profile.load(folder / "machine.json")
    assert profile.name == "measured" and "2 ranks at once" in profile.sources["matmul_tflops"]
    plan = "plan --lengths wikipedia --batch-size 8 --max-length 128 --cluster 1x2xCPU --model small.toml --json"
    assert run(f"{plan} --profile machine.json").code == 0


def test_text_says_how_far_it_is_off(run, monkeypatch):
    trials = [("1 of 1x1, each 1 x 64 tokens", 10.0, 11.0), ("1 of 2x1, each 1 x 64 tokens", 20.0, 16.0)]
    rows = [dict(zip(("what", "measured_ms", "predicted_ms"), row, strict=True)) for row in trials]
    found = {"output": "machine.json", "cluster": "2xCPU", "model": "small", "trials": rows}
    monkeypatch.setattr(processes, "run_on_processes", lambda body, ranks, *arguments: found)
    result = run(f"{LINE} --ranks 2 --output machine.json")
    assert result.code == 0, result.err
    assert "1 of 2x1, each 1 x 64 tokens" in result.out
    assert "off by 15.0% on average, 20% at most" in result.out and "wrote machine.json" in result.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--output machine.json"),
        ("--output machine.txt", "a profile file ends in .json"),
        ("--output m.json --heads 4", "--heads has no meaning with --model"),
        ("--output m.json --heads 4", "--heads has no meaning"),
        ("--output m.json --dtype bfloat61", "did you mean bfloat16"),
        ("--output m.json --ranks 3 --cluster 1x2xCPU", "has 2 ranks, the measurement 3"),
        ("--output m.json --sharding half", "unknown sharding"),
        ("--output m.json --ranks 0", "--ranks 0; give 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(refused, options, message):
    assert message in refused(f"{LINE} {options}")


def test_options_of_a_model_need_one(refused):
    assert "--ranks needs --model" in refused("profile --ranks 2")


def test_under_torchrun_the_ranks_are_given(refused, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    assert "under torchrun" in refused(f"{LINE} --ranks 2 --output m.json")
