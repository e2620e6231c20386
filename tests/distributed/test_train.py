"""`seqloom train` as a command: the plan changes nothing, a resumed run is the same run, failures are clear."""

import json
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaForCausalLM

from seqloom.cost import CostModel
from seqloom.data import StoreWriter
from seqloom.describe import Cluster, ModelSpec
from seqloom.plan import Checkpoint
from seqloom.train.config import Config
from seqloom.train.logging import PHASES, read_steps
from seqloom.train.model import build_reference
from support.perfetto import check_trace
from support.runs import logged
from support.tiny_specs import TINY

pytestmark = pytest.mark.distributed
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with documents and a small model."""
    folder = tmp_path_factory.mktemp("train")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in np.clip(draw.lognormal(3.2, 1.0, 40).astype(int), 2, 200):
            writer.add(draw.integers(0, 20, length))
    (folder / "tiny.toml").write_text(TINY)
    return folder


def command(place: Path, run: str, settings: dict[str, object]) -> list[str]:
    """The words after `seqloom`."""
    values = {
        "data.source": place / "store",
        "data.validation": place / "store",
        "data.sequences": 6,
        "data.max_length": 200,
        "model.spec": place / "tiny.toml",
        "model.dtype": "float64",
        "plan.planner": "adaptive",
        "plan.capacity": 100,
        "run.steps": STEPS,
        "run.output": place / run,
        "schedule.warmup": 2,
        "evaluation.every": 2,
        "checkpoint.every": 2,
        **settings,
    }
    return ["train", str(RECIPE), *(word for key, value in values.items() for word in ("--set", f"{key}={value}"))]


def seqloom(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "seqloom", *words], capture_output=True, text=True, timeout=150)


def trained(run_command, place: Path, run: str, *words: str, **settings: object) -> tuple[dict, list[float]]:
    """Train, by `seqloom` or by the fixture `seqloom_here`, and return the summary and the losses."""
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    result = run_command(*command(place, run, dotted), "--json", *words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), [record.loss for record in read_steps(place / run / "metrics.jsonl")]


@pytest.mark.slow
def test_float8_learns_as_bfloat16_does_and_resumes(place):
    """Two ranks, compiled layers, a checkpoint of one kind that the other goes on from."""
    (place / "wide.toml").write_text(TINY.replace("hidden = 16", "hidden = 256").replace("ffn = 24", "ffn = 256"))
    wide = {"model.spec": place / "wide.toml", "model.dtype": "bfloat16", "evaluation.every": 0, "run.ranks": 2}
    losses = {}
    for kind in ("false", "true"):
        settings = wide | {"model.float8": kind, "model.compile": kind}
        done = seqloom(*command(place, f"float8-{kind}", settings))
        assert done.returncode == 0, done.stderr
        losses[kind] = [step.loss for step in read_steps(place / f"float8-{kind}" / "metrics.jsonl")]
    assert losses["true"] != losses["false"]
    np.testing.assert_allclose(losses["true"], losses["false"], rtol=0.01)
    done = seqloom(*command(place, "float8-false", wide | {"model.float8": "true", "run.steps": STEPS + 1}))
    assert done.returncode == 0, done.stderr
    words = command(place, "refused", {"model.float8": "true", "model.dtype": "bfloat16"})
    assert "linear layers has widths" in seqloom("check", *words[1:]).stderr
    done = seqloom(*words)
    assert done.returncode == 2 and "linear layers has widths" in done.stderr, done.stderr
    assert "rank" not in done.stderr  # none has started


@pytest.fixture(scope="module")
def whole(seqloom_here, place):
    """A run on two ranks from beginning to end."""
    return trained(seqloom_here, place, "whole", "--ranks", "2", log__trace="[2]")


def test_the_loss_falls_and_the_summary_says_so(whole):
    summary, losses = whole
    assert summary["steps"] == STEPS == len(losses)
    assert (summary["first_loss"], summary["final_loss"]) == (losses[0], losses[-1])
    assert losses[-1] < losses[0]
    assert summary["tokens_per_second"] > 0 and summary["measured_ms"] > 0 and summary["predicted_ms"] > 0


def test_the_trace_of_a_step_has_what_was_simulated_and_what_every_rank_did(place, whole):
    content = json.loads((place / "whole" / "trace-2.json").read_text())
    assert not (place / "whole" / "trace-1.json").exists()
    slices = [event for own in check_trace(content).values() for event in own]
    record = read_steps(place / "whole" / "metrics.jsonl")[1]
    assert content["otherData"]["title"] == f"step 2, plan {record.plan_hash[:12]}"
    predicted = max(event["ts"] + event["dur"] for event in slices if event["cat"] == "predicted")
    assert predicted / 1e3 == pytest.approx(record.predicted_ms, rel=1e-6)
    measured = [event for event in slices if event["cat"] == "measured"]
    assert {"bind", "0F0", "0B0", "optimiser"} <= {event["name"] for event in measured}
    assert len({event["tid"] for event in measured}) == 2
    phases = {"forward_ms": "0F", "backward_ms": "0B", "optimiser_ms": "optimiser"}
    for phase, name in phases.items():  # phases are means over the two ranks
        spent = sum(event["dur"] for event in measured if event["name"].startswith(name))
        assert spent / 2e3 == pytest.approx(getattr(record, phase), rel=1e-3)


def test_an_optimiser_in_host_memory_changes_nothing(seqloom_here, place, whole):
    _, losses = trained(seqloom_here, place, "offloaded", "--ranks", "2", optimiser__offload="true")
    assert losses == whole[1]
    models = [place / run / "model" / "model.safetensors" for run in ("offloaded", "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_half_a_run_in_host_memory_is_foreseen_and_gone_on_from(seqloom_here, place):
    """Six layers in a memory that holds two; the optimiser is in host memory too, in the second half nothing is."""
    (place / "deep.toml").write_text(TINY.replace("layers = 2", "layers = 6"))
    deep = {"model.spec": place / "deep.toml", "evaluation.every": 0}
    there = {"optimiser.offload": "true", "plan.offload": "true", "plan.budget_gib": tight(place), "plan.capacity": ""}
    words = command(place, "half", deep | there | {"run.steps": STEPS // 2})
    report = seqloom_here("check", *words[1:], "--ranks", "2", "--json")
    away = json.loads(report.stdout)["offloaded"]
    assert away["activations"]["steps"] > 0 < away["activations"]["host_bytes"]
    assert away["optimiser"]["host_bytes"] > 0 < away["optimiser"]["update_ns"]
    text = seqloom_here("check", *words[1:], "--ranks", "2").stdout
    assert "layers go to host memory in" in text and "The optimiser is in host memory" in text
    losses = {}
    for run, *settings in (("here", deep), ("half", deep | there | {"run.steps": STEPS // 2}, deep)):
        for each in settings:
            done = seqloom_here(*command(place, run, each), "--ranks", "2")
            assert done.returncode == 0, done.stderr
        losses[run] = [step.loss for step in read_steps(place / run / "metrics.jsonl")]
    np.testing.assert_allclose(losses["half"], losses["here"], rtol=1e-9)


def tight(place: Path) -> float:
    """GiB that hold the longest document on two ranks only if all layers are offloaded."""
    spec = ModelSpec.load(str(place / "deep.toml"))
    cost = CostModel(Cluster.parse("1x2xCPU"), spec, "cpu", max_length=200, offload_optimiser=True)
    policy = next(policy for policy in cost.policies if policy.checkpoint == Checkpoint.FULL)
    per_token = cost.memory.token_bytes(policy, spec.layers)
    assert 100 * per_token < 99 * cost.memory.token_bytes(policy)
    return (cost.memory.fixed_bytes(policy) + 100 * per_token) / 2**30


def test_the_phases_of_a_step_add_up_and_a_cpu_has_neither_mfu_nor_memory(place, whole):
    summary, _ = whole
    shares = []
    for record in read_steps(place / "whole" / "metrics.jsonl"):
        phases = [getattr(record, name) for name in PHASES]
        shares.append(sum(phases) / record.measured_ms)
        assert min(phases) > 0 and shares[-1] < 1.01
        inside = record.attention_ms, record.exchange_ms
        assert inside[0] > 0 and sum(inside) < record.forward_ms + record.backward_ms
    assert max(shares) > 0.6  # other work on the cores takes a rank from them between phases, but not in every step
    assert all(summary[name] > 0 for name in PHASES)
    for name in ("mfu", "memory_allocated_gib", "memory_reserved_gib"):
        assert summary[name] is None and getattr(record, name) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_trained_model_is_left_for_transformers_and_for_seqloom(place, whole):
    folder = place / "whole" / "model"
    theirs = LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
    assert theirs.dtype == torch.float64 and theirs.config.max_position_embeddings == 200
    state = {"model": {name: torch.empty_like(p) for name, p in theirs.named_parameters()}}
    dcp.load(state, checkpoint_id=place / "whole" / "checkpoints" / f"step-{STEPS:08}", no_dist=True)
    assert all(torch.equal(p, state["model"][name]) for name, p in theirs.named_parameters()), "of the last step"
    named = {"model.spec": folder / "config.json", "model.parameters": folder / "model.safetensors"}
    again = Config.load(RECIPE, [f"{key}={value}" for key, value in named.items()])
    built = build_reference(again, torch.device("cpu"), torch.float64)
    built.materialize()
    ours = built.module
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in state["model"].items()}
    assert all(torch.equal(p, state["model"][name]) for name, p in ours.named_parameters())


def test_another_planner_and_sharding_on_more_ranks_give_the_same_losses(seqloom_here, place, whole):
    settings = {"plan__planner": "static:2", "plan__sharding": "none"}
    _, losses = trained(seqloom_here, place, "other", "--ranks", "4", **settings)
    assert np.allclose(losses, whole[1], rtol=1e-9, atol=0)


def test_a_resumed_run_is_the_same_run_also_on_another_number_of_ranks(seqloom_here, place, whole):
    shutil.copytree(place / "whole", place / "parts")
    shutil.rmtree(place / "parts" / "checkpoints" / f"step-{STEPS:08}")
    summary, losses = trained(seqloom_here, place, "parts", "--ranks", "4", plan__planner="static")
    assert summary["steps"] == STEPS == len(losses)
    assert losses[:2] == whole[1][:2], "from the file"
    assert np.allclose(losses, whole[1], rtol=1e-9, atol=0)


UNKNOWN = """
name = "mine"
nodes = 1
gpus_per_node = 2
device = { name = "X1", memory_gib = 2, peak_tflops = 1, hbm_gb_s = 20 }
intra = { name = "wire", gb_s = 5, latency_us = 20 }
nic = { name = "wire", gb_s = 5, latency_us = 20 }
nics_per_node = 1
nic_of_gpu = [0, 0]
"""


@pytest.mark.slow
def test_a_machine_that_no_profile_knows_is_measured_once(place, seqloom_here, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (place / "mine.toml").write_text(UNKNOWN)
    profiles = []
    for run in ("first", "second"):
        settings = {"plan.cluster": place / "mine.toml", "evaluation.every": 0}
        done = seqloom_here(*command(place, run, settings), "--ranks", "2")
        assert done.returncode == 0, done.stderr
        assert ("measuring this machine" in done.stderr) == (run == "first")
        assert "profile of this machine: measured in" in done.stderr
        profiles.append((place / run / "profile.json").read_text())
    assert profiles[0] == profiles[1] and len(list(tmp_path.glob("seqloom/profiles/*.json"))) == 1
    resumed = seqloom_here(*command(place, "first", settings | {"run.steps": STEPS + 1}), "--ranks", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert "this machine" not in resumed.stderr and (place / "first" / "profile.json").read_text() == profiles[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for CPUs needs g++")
def test_compiled_layers_go_on_from_a_checkpoint_of_plain_ones_with_the_same_losses(place, whole):
    begin = place / "whole" / "checkpoints" / "step-00000002"
    settings = {"model__compile": "true", "checkpoint__resume": begin, "evaluation__every": 0}
    summary, losses = trained(seqloom, place, "compiled", "--ranks", "1", **settings)
    assert summary["steps"] == STEPS
    assert np.allclose(losses, whole[1][2:], rtol=1e-9, atol=0)


def test_a_machine_without_compiler_is_told_so_before_any_process_starts(seqloom_here, place, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = seqloom_here(*command(place, "uncompiled", {"model.compile": "true"}), "--ranks", "2")
    assert result.returncode == 2
    assert "the C++ compiler 'no-such-compiler'; install it, or set model.compile = false" in result.stderr
    assert "Traceback" not in result.stderr and not (place / "uncompiled").exists()


def test_a_planner_that_cannot_plan_never_stops_training_and_the_log_says_why(seqloom_here, place):
    settings = {"plan__planner": "static:64", "run__steps": 2, "schedule__warmup": 1}
    summary, losses = trained(seqloom_here, place, "fallback", "--ranks", "2", **settings)
    assert summary["steps"] == len(losses) == 2
    notes = (place / "fallback" / "metrics.jsonl").read_text()
    assert notes.count("static plan as a fallback: planner 'static:64'") == 2


def test_measured_steps_refit_the_profile_and_a_resumed_run_goes_on_with_the_factors(seqloom_here, place, tmp_path):
    """A profile by which a step takes seconds longer than on any machine: the first refit is certain to change it."""
    profile = json.loads((resources.files("seqloom.cost") / "profiles" / "cpu.json").read_text())
    (tmp_path / "slow.json").write_text(json.dumps(profile | {"name": "slow", "step_us": 20_000_000}))
    settings = {"evaluation.every": 0, "checkpoint.every": 0, "run.output": tmp_path / "run"}
    settings |= {"plan.profile": tmp_path / "slow.json"}
    for steps in (12, 16):
        done = seqloom_here(*command(place, "", settings | {"run.steps": steps}), "--ranks", 2)
        assert done.returncode == 0, done.stderr
    steps, notes = read_steps(tmp_path / "run" / "metrics.jsonl"), logged(tmp_path / "run", "note")
    drift = [note for note in notes if "with new factors" in note]
    assert drift, notes
    digest = drift[0].split("new factors ")[1][:8]
    assert [step.factors for step in steps[:9]] == [""] * 9 and digest in {step.factors for step in steps}
    assert sum(note.startswith("plans are priced by the factors of the checkpoint") for note in notes) == 1
    assert steps[12].factors, "the first plan after the checkpoint has its factors"


@pytest.mark.slow
def test_plans_do_not_depend_on_times_without_feedback(seqloom_here, place, tmp_path):
    settings = {"evaluation.every": 0, "checkpoint.every": 0, "plan.feedback": "false", "run.steps": 14}
    done = seqloom_here(*command(place, "", settings | {"run.output": tmp_path / "run"}), "--ranks", 2)
    assert done.returncode == 0, done.stderr
    assert {step.factors for step in read_steps(tmp_path / "run" / "metrics.jsonl")} == {""}


@pytest.mark.slow
def test_torchrun_starts_the_ranks_as_well(place, whole):
    words = command(place, "torchrun", {"run.steps": 2, "schedule.warmup": 1, "schedule.kind": "constant"})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "seqloom"]
    result = subprocess.run([*launcher, *words, "--json"], capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    assert np.isclose(json.loads(result.stdout)["first_loss"], whole[1][0], rtol=1e-9)


def test_what_cannot_be_is_refused_before_any_process_starts(seqloom_here, place):
    result = seqloom_here(*command(place, "refused", {"data.source": place / "nothing"}), "--ranks", "2")
    assert result.returncode == 2
    assert result.stderr.startswith("seqloom: ") and "no token store" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (place / "refused").exists()


def test_a_rank_that_fails_stops_the_run_with_its_reason(seqloom_here, place, whole):
    """A checkpoint of another model is noticed by the ranks."""
    shutil.copytree(place / "whole", place / "small")
    (place / "wide.toml").write_text(TINY.replace("ffn = 24", "ffn = 32"))
    settings = {"model.spec": place / "wide.toml", "run.steps": STEPS + 1}
    result = seqloom_here(*command(place, "small", settings), "--ranks", "2")
    assert result.returncode == 2
    assert "rank " in result.stderr and "float64" in result.stderr
    last = Path("checkpoints", f"step-{STEPS:08}")
    after, before = (
        {path.name: path.read_bytes() for path in (place / run / last).rglob("*") if path.is_file()}
        for run in ("small", "whole")
    )
    assert after == before, "the last checkpoint is intact"
