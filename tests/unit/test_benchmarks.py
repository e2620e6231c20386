"""Every benchmark runs: its smallest mode, from start to the written result. What it measures is not judged here."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("bench_*.py"))
FIELDS = {"benchmark", "command", "lengths", "date", "commit", "hardware", "libraries", "install", "targets", "figures"}
LONGEST_SCRIPT = 200


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", [SCRIPTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS[1:])])
def test_smallest_mode_writes_a_result(name, tmp_path, capsys):
    if name == "bench_flexsp_solver":
        pytest.importorskip("highspy")
    out = tmp_path / "result.json"
    importlib.import_module(name).main(["--quick", "--out", str(out)])
    assert capsys.readouterr().out.strip()
    result = json.loads(out.read_text())
    assert set(result) >= FIELDS
    assert result["benchmark"] == name
    assert str(tmp_path) not in out.read_text()


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_script_is_short(path):
    assert len(path.read_text().splitlines()) <= LONGEST_SCRIPT


def test_readme_names_every_script_and_result():
    text = (FOLDER / "README.md").read_text()
    assert [name for name in SCRIPTS if f"benchmarks/{name}.py" not in text] == []
    assert [path.name for path in (FOLDER / "results").glob("*.json") if path.name not in text] == []


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_result_is_whole_and_names_no_folder(path):
    result = json.loads(path.read_text())
    assert set(result) >= (FIELDS if result["benchmark"] in SCRIPTS else FIELDS - {"lengths", "install", "targets"})
    assert not result.get("quick", False)
    assert not re.search(r'[\s"=]/\w', path.read_text())


def test_a_miss_is_a_miss():
    common = importlib.import_module("common")
    assert not common.Check("gap, %", 5.1, 5).passed
    assert not common.Check("bound / optimum", 0.9, 0.93, at_least=True).passed
    assert common.Check("gap, %", 5.0, 5).passed


def test_simple_bound_is_below_the_plan():
    from seqloom.api import cost_model
    from seqloom.planners import make_plan

    gap = importlib.import_module("bench_gap")
    common = importlib.import_module("common")
    for setting, sharding in ((common.A100, "full"), (common.A100, "hybrid"), (common.H200, "full")):
        cluster, model, profile = setting
        cost = cost_model(cluster, model, profile=profile, sharding=sharding, max_length=gap.CONTEXT)
        [lengths] = common.batches("commoncrawl", 1, seed=0, context=gap.CONTEXT, size=64)
        assert 0 < gap.simple_bound(lengths, cost) <= cost.plan_ns(make_plan("flex", lengths, cost))


def test_a_ring_is_compared_with_one_rank_of_the_same_moment():
    """A clock that slows down by 1 % from run to run, and a first run of a group that is far off."""
    ring = importlib.import_module("gpu_ring")
    order = []

    def timed(name, cost):
        order.append(name)
        first = 3 if order.count(name) == 1 and name != "one" else 1
        return first * cost * (1 + 0.01 * len(order)), float(len(order))

    groups = {name: lambda name=name, cost=cost: timed(name, cost) for name, cost in (("a", 1.02), ("b", 0.9))}
    found = ring.in_turns(lambda: timed("one", 1.0), groups)
    assert order == ["one", "a", "b"] * ring.TURNS + ["one"]
    assert {name: times[0] / alone for name, (alone, times) in found.items()} == pytest.approx({"a": 1.02, "b": 0.9})
    assert found["a"][1][1] in (5.0, 8.0)  # copies of the same turn


@pytest.mark.slow
def test_training_steps_of_all_sides_agree(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    parts = importlib.import_module("training_parts")
    monkeypatch.setattr(parts, "drawn_packs", lambda _, count, *rest: [[30 + k, 20, 14] for k in range(count)])
    out = tmp_path / "result.json"
    importlib.import_module("gpu_training").main(["--quick", "--repeats", "1", "--out", str(out)])
    found = json.loads(out.read_text())["targets"]
    agreement = [
        check for check in found if "relative difference to" in check["what"] or "over that of" in check["what"]
    ]
    assert len(agreement) == 1 + 2 * 2 * 3 + 2 * 2 and all(check["passed"] for check in agreement)
    assert {"1.1", "1.0", "1.15", "52"} <= {str(check["target"]) for check in found}


@pytest.mark.slow
@pytest.mark.parametrize("difference", [0.02, -0.02, float("nan")])
def test_sides_that_disagree_are_not_timed(difference):
    pytest.importorskip("transformers")
    run = object.__new__(importlib.import_module("training_parts").Run)
    run.checks = []
    with pytest.raises(SystemExit, match="mean nothing"):
        run.near("loss", difference, 0.01)


def test_kernels_of_a_step_by_what_they_are_for():
    from kernel_shares import IDLE, OTHERS, Kernel, shares

    names = ("nvjet_tst_128x256", "kernel_cutlass_flash_attncute_fwd", "triton_red_fused_add", "_losses_kernel", "else")
    places = [(0, 10_000), (10_000, 12_000), (15_000, 16_000), (15_500, 16_500), (16_500, 17_000)]
    found = shares(Kernel(name, *place) for name, place in zip(names, places, strict=True))["ms"]
    assert [each for each in found.values() if each] == [2, 10, 1, 1, 0.5, 3, 17]
    assert (found["matrix products"], found["attention"], found["loss"], found[OTHERS]) == (10, 2, 1, 0.5)
    assert (found[IDLE], found["whole step"]) == (3, 17)


def test_rows_of_experts_add_up_and_a_rate_is_compared_with_the_fastest_side():
    from seqloom.describe import ModelSpec

    spec = ModelSpec.load("qwen3-30b-a3b")
    experts, sides = importlib.import_module("gpu_experts"), importlib.import_module("experts_sides")
    even, skewed = (sides.drawn_ends(spec, 512, skew, 0) for skew in experts.SKEWS)
    assert len(even) == spec.experts and int(even[-1]) == int(skewed[-1]) == 512 * spec.active_experts
    assert 1 < sides.busiest(even) < sides.busiest(skewed)
    found = experts.compare({"own": [4.0, 2.0, 2.0], "a": [1.0, 1.0, 1.0], "b": [2.0, 0.5, 2.0]}, 8e12)
    assert found == {"tflops": {"own": 4.0, "a": 8.0, "b": 4.0}, "ratio": 0.25}


@pytest.mark.slow
def test_sides_of_experts_have_the_same_flops_and_are_timed(tmp_path):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from seqloom.describe import ModelSpec

    sides = importlib.import_module("experts_sides")
    spec = replace(ModelSpec.load("qwen3-30b-a3b"), hidden=64, experts=8, active_experts=2, expert_ffn=32)
    counted = {}
    for name, side in sides.products(spec, 96, 0.0, torch.device("cpu"), 0)[0].items():
        with FlopCounterMode(display=False) as flops:
            side()
        counted[name] = flops.get_total_flops()
    wanted = 6 * 96 * spec.expert_parameters(spec.active_experts)
    assert counted["dense, the same rows"] == counted["dense, a row per token"] == wanted
    out = tmp_path / "result.json"
    importlib.import_module("gpu_experts").main(["--quick", "--turns", "1", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [check["target"] for check in result["targets"]] == [0.9, 0.9]
    assert [run["part"] for run in result["figures"]["runs"]] == ["products", "products", "layers"]


def test_clocks_of_ranks_run_while_they_compute_and_wait_for_what_they_receive():
    from seqloom.dist import P2PTensor
    from seqloom.dist.thread_transport import run_ranks

    clocks = importlib.import_module("rank_clocks")
    clocked = importlib.import_module("clocked_transport")

    def run(inner):
        clock = clocks.RankClock(clocks.Link(latency_s=10.0, bytes_per_s=8.0))
        transport = clocked.ClockedTransport(inner, clock)
        if inner.rank == 0:  # computes for 100 s, and sends 16 and 8 bytes
            clock.now += 100.0
            tensors = [torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
            transport.exchange([P2PTensor(1, tensors[0]), P2PTensor(2, tensors[1])], []).wait()
        else:
            received = torch.zeros(3 - inner.rank, dtype=torch.float64)
            transport.exchange([], [P2PTensor(0, received)]).wait()
            assert received.tolist() == [1.0] * len(received)
        alone = clock.read()
        transport.all_reduce(torch.ones(6, dtype=torch.float64), (0, 1, 2))  # moves 32 bytes, twice
        return alone, clock.read()

    times = run_ranks(3, run)
    assert [round(before) for before, _ in times] == [100, 112, 113]  # the second message follows the first
    assert {round(after) for _, after in times} == {113 + 2 * (10 + 4)}
