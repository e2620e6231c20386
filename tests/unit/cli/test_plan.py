import json

import numpy as np
import pytest

from seqloom.cli import shared
from seqloom.plan import Plan
from support.perfetto import check_trace
from support.reports import Report

BOX = "--cluster 1x8xH200 --model llama3-8b --planner adaptive"
PLAN = f"plan --lengths lengths.txt {BOX}"
FIGURES = {
    "step_ms",
    "bound_ms",
    "plan_ms",
    "rounds",
    "chunks",
    "tensor",
    "expert",
    "comm_share",
    "idle_share",
    "peak_memory_gib",
    "plan_hash",
}


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_the_plan_is_written_and_reported(run, folder, suffix):
    report = run(f"{PLAN} --out plan.{suffix} --json").json
    plan = Plan.load(folder / f"plan.{suffix}")
    assert report["plan_hash"] == plan.hash
    assert report["sequences"] == len(plan.documents) == 12
    assert report["planner"] == report["made_by"] == "adaptive"
    assert report["gap"] == pytest.approx(report["step_ms"] / report["bound_ms"] - 1)
    assert "explanation" not in report
    assert set(report) >= FIGURES | {"cluster", "model", "profile", "sharding", "seed", "version", "dropped"}


def test_text_and_picture_name_the_cost_model_the_gap_and_the_file(run, refused, folder):
    result = run(f"{PLAN} --view --out plan.json --picture plan.svg")
    assert result.code == 0 and "validated" not in result.out
    assert "8xH200, llama3-8b, profile h200, full sharding" in result.out
    assert "above the bound" in result.out
    assert result.out.endswith("wrote plan.json\n")
    assert result.err == ""
    assert (folder / "plan.svg").read_text().startswith("<svg")
    assert "ends in .svg or .png or .pdf" in refused(f"{PLAN} --picture plan.gif")


def test_the_number_of_chunks_is_chosen_and_named(run, refused):
    line = "plan --lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --max-length 8000 --planner"
    chosen = run(f"{line} pipeline:4 --chunks auto --json").json
    times = {chunks: run(f"{line} pipeline:4 --chunks {chunks} --json").json["step_ms"] for chunks in (1, 2, 4)}
    assert chosen["chunks"] == min(times, key=times.get) and chosen["step_ms"] == min(times.values())
    assert ", 2 chunks per pipeline rank, " in run(f"{line} pipeline:4 --chunks 2").out
    assert "--chunks '0'; give 1, 2, 4, ... or auto" in refused(f"{line} pipeline --chunks 0")
    assert "--chunks auto with flex: only planner pipeline divides" in refused(f"{line} flex --chunks auto")


def test_the_report_of_a_plan_and_of_its_file_hold_the_printed_figures(run, refused, folder):
    printed = run(f"{PLAN} --out plan.json --html planned.html --json").json
    again = run("simulate plan.json --cluster 1x8xH200 --model llama3-8b --html simulated.html --json").json
    for name, wanted in (("planned.html", printed), ("simulated.html", again)):
        [step] = Report.load(folder / name).data["steps"]
        assert {key: wanted[key] for key in step["figures"] if key != "planner"}.items() <= step["figures"].items()
        assert step["name"] == printed["planner"]
    assert "ends in .html" in refused(f"{PLAN} --html report.pdf")


def test_a_plan_and_its_file_give_the_same_trace(run, refused, folder):
    report = run(f"{PLAN} --out plan.json --trace planned.json --json").json
    assert run("simulate plan.json --cluster 1x8xH200 --model llama3-8b --trace simulated.json").code == 0
    content = json.loads((folder / "planned.json").read_text())
    slices = [event for own in check_trace(content).values() for event in own]
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(1e3 * report["step_ms"])
    assert json.loads((folder / "simulated.json").read_text())["traceEvents"] == content["traceEvents"]
    assert "a trace file ends in .json" in refused(f"{PLAN} --trace trace.txt")


def test_float8_is_priced_and_named(run, refused):
    plain, changed = run(f"{PLAN} --json").json, run(f"{PLAN} --float8 --out plan.json --json").json
    assert (plain["float8"], changed["float8"]) == (False, True)
    for figure in ("step_ms", "bound_ms"):
        assert 0.6 * plain[figure] < changed[figure] < plain[figure]
    simulated = run("simulate plan.json --cluster 1x8xH200 --model llama3-8b --float8 --json").json
    assert simulated["step_ms"] == changed["step_ms"]
    assert ", float8" in run(f"{PLAN} --float8").out
    assert "float8_speedup" in refused(f"{PLAN} --float8".replace("H200", "A100-80G"))


def test_the_expert_degree_is_chosen_or_given_and_named(run, refused):
    mixture = "--cluster 1x8xH200 --model qwen3-30b-a3b"
    wanted = f"plan --lengths lengths.txt {mixture} --planner static"
    given = {degree: run(f"{wanted} --expert {degree} --out plan{degree}.json --json").json for degree in (1, 2, 4, 8)}
    assert all(report["expert"] == degree for degree, report in given.items())
    fastest = min(given.values(), key=lambda report: report["step_ms"])
    chosen = run(f"{wanted} --json").json
    assert (chosen["expert"], chosen["step_ms"]) == (fastest["expert"], fastest["step_ms"])
    assert run(f"simulate plan4.json {mixture} --json").json["step_ms"] == given[4]["step_ms"]
    said = run(f"{wanted} --expert 4").out
    share = given[4]["expert_share"]
    assert 0 < share["compute"] < 1 and 0 < share["exchange"] < 1 and given[1]["expert_share"]["exchange"] == 0
    compute, exchange = (f"{100 * share[name]:.1f} % " for name in ("compute", "exchange"))
    line = f"32 of 128 experts of a layer on each GPU: they compute for {compute}of the step, dispatch and combine "
    assert line + exchange.strip() in " ".join(said.split())
    assert run(f"simulate plan4.json {mixture} --json").json["expert_share"] == share
    assert run(f"{PLAN} --json").json["expert_share"] is None and "expert degree" not in run(PLAN).out
    assert "expert degree 4" in said and "no plan with expert degree 4 can beat" in " ".join(said.split())
    assert "use 2 or 4" in refused(f"{wanted} --expert 3") and "1, 2, 4, ... or auto" in refused(
        f"{wanted} --expert no"
    )
    assert "no experts; use 1" in refused(f"{PLAN} --expert 2")
    compared = run(f"compare --lengths lengths.txt {mixture} --planners static,adaptive --batch-size 6 --json").json
    assert compared["expert"] == "auto"
    assert all(len(set(figures["expert"])) == 1 for figures in compared["planners"].values())


def test_auto_says_whom_it_chose(run):
    report = run("plan --lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --json").json
    assert report["planner"] == "auto"
    assert report["made_by"] in {"static", "adaptive", "flexsp", "flex", "zones"}


def test_a_published_planner_says_whether_it_is_validated(run):
    result = run("plan --lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --planner megatron")
    assert result.code == 0 and "megatron: not validated: published 1.21x to 1.50x" in result.out


def test_longer_sequences_are_dropped_and_counted(run):
    report = run(f"{PLAN} --max-length 8192 --json").json
    assert (report["dropped"], report["sequences"]) == (2, 10)
    assert "2 sequences above 8,192 tokens dropped first" in run(f"{PLAN} --max-length 8192").out


def test_batches_by_count_and_by_tokens(run):
    assert run(f"{PLAN} --batch-size 5 --skip 1 --json").json["tokens"] == 260 + 33_000 + 2_048 + 800 + 610
    assert run(f"{PLAN} --tokens-per-batch 4000 --json").json["tokens"] == 512 + 700 + 1_300 + 900
    drawn = shared.Workload.by_tokens(shared.Source("wikipedia", seed=3), 3_000_000)  # draws more than once
    assert 2_500_000 < drawn.batches[0].tokens <= 3_000_000


def test_a_stand_in_sampler_says_so(run):
    line = f"plan --lengths commoncrawl {BOX} --batch-size 16"
    assert "stand-in" in run(f"{line} --json").json["sampler"]
    assert "stand-in" in run(line).out


BAD_LENGTHS = {
    "empty": ("empty.txt", "", "empty"),
    "zero": ("zero.txt", "5\n0\n", "line 2: 0 is not a length"),
    "negative": ("negative.txt", "-3\n", "line 1: -3 is not a length"),
    "nan": ("nan.txt", "12\nnan\n", "line 2: 'nan' is not a length"),
    "nan in jsonl": ("nan.jsonl", '{"length": NaN}\n', "line 1"),
    "text": ("text.txt", "many\n", "'many' is not a length"),
    "too long": ("long.txt", "2000000000\n", "the largest group"),
}


@pytest.mark.parametrize("case", BAD_LENGTHS)
def test_bad_lengths_are_refused(refused, folder, case):
    name, content, message = BAD_LENGTHS[case]
    (folder / name).write_text(content)
    assert message in refused(f"plan --lengths {name} {BOX} --out plan.json")


def test_nan_in_an_array_and_a_wrong_column_are_refused(refused, folder):
    np.save(folder / "nan.npy", np.array([4.0, np.nan]))
    assert "nan" in refused(f"plan --lengths nan.npy {BOX} --out plan.json")
    (folder / "table.csv").write_text("id,length\n1,20\n")
    assert "length" in refused(f"plan --lengths table.csv --column lenght {BOX}")


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ("--lengths wikipdia --cluster 1x8xH200 --model llama3-8b", "wikipedia"),
        ("--lengths lengths.txt --cluster 8x8xH2O --model llama3-8b", "H200"),
        ("--lengths lengths.txt --cluster 1x8xH200 --model lama3-8b", "llama3-8b"),
        ("--lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --profile h2000", "h200"),
        ("--lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --planner flexx", "flex"),
        ("--lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --sharding ful", "full"),
    ],
)
def test_unknown_names_offer_the_nearest(refused, options, nearest):
    assert nearest in refused(f"plan {options} --out plan.json").partition(";")[2]


@pytest.mark.parametrize("budget", ["0.5", "0", "-3", "nan"])
def test_an_impossible_budget_is_refused(refused, budget):
    assert "GiB" in refused(f"{PLAN} --budget-gib {budget} --out plan.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 0", "batch size 0"),
        ("--skip -1", "skip -1"),
        ("--skip 9", "make only 1"),
        ("--max-length 0", "longest sequence of 0"),
        ("--max-length 100", "all 12 sequences are longer"),
        ("--batch-size 4 --tokens-per-batch 4", "leave the other out"),
        ("--out plan.yaml", ".json or .txt"),
        ("--out nowhere/plan.json", "'nowhere'"),
        ("--lengths wikipedia --batch-size 100000000", "at most 10,000,000"),
        ("--lengths missing.txt", "does not exist"),
    ],
)
def test_options_that_cannot_be_met_are_refused(refused, options, message):
    assert message in refused(f"{PLAN} {options}")


def test_a_misspelt_key_in_a_file_is_refused(refused, folder):
    cluster = {"nodes": 1, "gpus_per_nodes": 8, "device": "H200"}
    (folder / "cluster.json").write_text(json.dumps(cluster))
    message = refused("plan --lengths lengths.txt --model llama3-8b --cluster cluster.json --out plan.json")
    assert "'gpus_per_nodes'" in message
    assert "'gpus_per_node'" in message


def test_an_unwritable_file_is_refused_without_a_traceback(refused, folder, monkeypatch):
    def forbid(self, path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Plan, "save", forbid)
    assert "cannot use 'plan.json': Permission denied" in refused(f"{PLAN} --out plan.json")


def test_reasons_in_text_and_json(run):
    asked = "plan --lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --planner zones --explain"
    result = run(asked)
    assert result.code == 0 and "cut inside a node: pays" in result.out and "next best" in result.out
    reasons = run(f"{asked} --json").json["explanation"]
    assert sum(row["documents"] for row in reasons["classes"]) == 12
    assert {row["zone"] for row in reasons["classes"]} <= {"local", "intra-node"}  # there is one node
    assert reasons["bounds"]["inter_pays"] is None and reasons["bounds"]["intra_pays"] >= 128


FREE = "--cluster 1x8xH100 --model qwen3-0.6b --sharding free"


def test_strategies_are_planned_simulated_and_compared(run, folder):
    planned = run(f"plan --lengths lengths.txt {FREE} --planner hydraulis --out plan.json --json").json
    assert planned["made_by"] == "hydraulis" and planned["sharding"] == "free" and planned["gap"] >= 0
    simulated = run("simulate plan.json --cluster 1x8xH100 --model qwen3-0.6b --json").json
    assert simulated["step_ms"] == pytest.approx(planned["step_ms"])
    found = run(f"compare --lengths lengths.txt --batch-size 12 {FREE} --planners flex,hydraulis,auto --json").json
    steps = {name: figures["step_ms"][0] for name, figures in found["planners"].items()}
    assert steps["auto"] <= min(steps["flex"], steps["hydraulis"])


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_strategies_under_other_shardings_are_refused_with_the_way_out(run, sharding):
    box = FREE.replace("free", sharding)
    result = run(f"plan --lengths lengths.txt {box} --planner hydraulis")
    assert result.code == 2 and f"sharding {sharding}" in result.err and "--sharding free" in result.err


def test_documents_and_stores_are_planned_and_what_is_not_used_is_said(run, folder):
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{"x" * n}"}}\n' for n in (0, 9, 99, 40, 7)))
    plan = "plan --cluster 1x2xH200 --model llama3-8b --batch-size 2"
    result = run(f"{plan} --lengths texts.jsonl --tokenizer bytes --max-length 60")
    assert "1 record with nothing to learn left out" in result.out
    assert "1 sequence above 60 tokens dropped first" in result.out
    assert "1 sequence after the last batch not used" in result.out
    found = run(f"{plan} --lengths texts.jsonl --tokenizer bytes --max-length 60 --json").json
    assert (found["left_out"], found["dropped"], found["unused"], found["sequences"]) == (1, 1, 1, 2)
    assert run("data prepare texts.jsonl --out store --tokenizer bytes").code == 0
    stored = run(f"{plan} --lengths store --max-length 60 --json").json
    assert (stored["left_out"], stored["unused"], stored["plan_hash"]) == (0, 1, found["plan_hash"])
    compared = run(
        "compare --cluster 1x2xH200 --model llama3-8b --batch-size 2 --lengths store --planners static --json"
    )
    assert compared.json["unused"] == 2
    drawn = run("plan --cluster 1x2xH200 --model llama3-8b --batch-size 2 --lengths wikipedia --json").json
    assert drawn["unused"] == 0


def test_refused_documents(refused, folder):
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    plan = "plan --cluster 1x2xH200 --model llama3-8b"
    assert "line 1: a chat, and no tokenizer" in refused(f"{plan} --lengths chats.jsonl")
    assert "has no chat template" in refused(f"{plan} --lengths chats.jsonl --tokenizer bytes")
    assert "does not exist" in refused(f"{plan} --lengths gone.jsonl")
    assert "no file matches" in refused(f"{plan} --lengths gone*.jsonl")


def test_without_lengths_those_of_a_published_sampler_are_planned_and_named(run):
    out = run(f"plan {BOX} --planner static --batch-size 16").out
    assert "sampler wikipedia: quantiles of 800,000 Wikipedia documents" in " ".join(out.split())


def test_a_sequence_longer_than_a_batch_is_named(run):
    line = f"plan --lengths lengths.txt {BOX} --planner static --tokens-per-batch 100"
    said = "a sequence of 512 tokens is longer than a batch of 100: it is one of its own"
    assert said in " ".join(run(line).out.split())
    assert run(f"{line} --json").json["over"] == 512
    assert run(f"{line}00 --json").json["over"] == 0


def test_a_budget_above_what_a_gpu_has_is_named(run):
    line = f"plan --lengths lengths.txt {BOX} --planner static"
    assert "500.0 GiB per GPU (a device has 140)" in " ".join(run(f"{line} --budget-gib 500").out.split())
    assert "a device has" not in run(line).out


def test_processes_on_cpus_are_called_ranks(run, folder):
    out = run("plan --lengths lengths.txt --cluster 1x4xCPU --model llama3-8b --planner static --budget-gib 200").out
    assert "GiB per rank" in out and "GPU" not in out


def test_a_model_of_the_hub_is_read_from_its_cache(run, refused, tmp_path, monkeypatch):
    """Only config.json is read; what is not in the cache is not fetched."""
    import huggingface_hub.constants

    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 100, "num_key_value_heads": 2}
    (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    line = "--lengths lengths.txt --cluster 1x8xH200 --planners static --json"
    assert run(f"compare {line} --model some/model").json["model"] == "some/model"
    assert "has no config.json in the Hugging Face cache" in refused(f"compare {line} --model some/other")
