"""From a config to the parts of a run: planners and stages, strategies, packed batches."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.data import StoreWriter
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.plan import Stage
from seqloom.plan.plan import plan_shape
from seqloom.planners.hydraulis import (
    ParallelConfig,
    PipelineConfig,
    Strategy,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.planners.registry import PlannerChoice
from seqloom.profiling.check import inspect_run
from seqloom.simulate import predicted_ns
from seqloom.train.config import Config, Data, Model, Optimiser, Pipelining, Planning, Run
from seqloom.train.setup import (
    STRATEGIES_FILE,
    RunPlanners,
    RunSetup,
    choose_head,
    choose_pipeline,
    decided,
    load_strategies,
    mean_step_tokens,
    strategy_notes,
    warm_up_plans,
    write_strategies,
)

RECIPES = Path(__file__).parents[3] / "recipes"
BATCHES = [np.array([900, 60, 400, 70]), np.array([300, 120, 80])]


def pipeline_config(planner="auto", **pipeline):
    parts = (Run(Path("out"), steps=1, seed=3), Model("x"), Data(Path("store"), sequences=1), Planning(planner))
    return Config(*parts, Pipelining(**pipeline))


def step_times(config, prices, pipeline):
    """Predicted ns of all batches, in a pipeline that leaves nothing open."""
    planner = RunPlanners.load(config, prices, pipeline).planner
    return sum(predicted_ns(planner.plan(batch, prices), prices) for batch in BATCHES)


def cost(cluster="1x4xCPU", sharding="full", layers=4):
    spec = replace(ModelSpec.load(str(RECIPES / "models" / "tiny.toml")), layers=layers, windows=())
    return CostModel(Cluster.parse(cluster), spec, sharding=sharding, max_length=1024)


def test_without_a_pipeline_the_config_s_planner_plans_and_static_is_the_fallback():
    planners = RunPlanners.load(pipeline_config("flex"), cost(), Pipelining())
    assert planners == RunPlanners(
        (Stage((0, 1, 2, 3), (0, 4)),), PlannerChoice("flex", seed=3), PlannerChoice("static")
    )


@pytest.mark.parametrize(
    ("planner", "capacity", "fallback"),
    [("auto", 64, "pieces"), ("pieces", 64, "pieces"), ("flex", 64, "static"), ("auto", 512, "static")],
)
def test_where_only_pieces_of_the_longest_document_fit_pieces_are_the_fallback(planner, capacity, fallback):
    tight = CostModel(cost().cluster, cost().model, max_length=1024, capacity=capacity)
    planners = RunPlanners.load(pipeline_config(planner), tight, Pipelining())
    assert planners.fallback == PlannerChoice(fallback)
    assert planners.fallback.plan([1024 if fallback == "pieces" or capacity == 512 else 200], tight).tokens


def gpu_run(spec, cluster, offload="auto", stages=1, sharding="full"):
    """A run of a preset on GPUs, with documents of up to 600 tokens."""
    parts = (Run(Path("out"), steps=1), Model(spec, dtype="bfloat16"), Data(Path("toy:20"), sequences=2))
    plan = Planning("auto" if stages != 1 else "flex", cluster, sharding=sharding)
    return Config(*parts, plan, Pipelining(stages=stages), Optimiser(offload=offload))


@pytest.mark.parametrize(
    ("spec", "cluster", "options", "offloads"),
    [
        ("qwen3-0.6b", "1x1xH200", {}, False),
        ("llama3-8b", "1x1xH200", {}, True),
        ("llama3-8b", "1x8xH200", {}, False),
        ("llama3-8b", "1x8xH200", {"offload": True}, True),
        ("llama3-8b", "1x2xH100", {"stages": 2}, True),
        ("llama3-8b", "1x2xH200", {"stages": "auto"}, False),
        ("llama3-8b", "1x2xH100", {"sharding": "none"}, True),
    ],
)
def test_the_optimiser_goes_to_host_memory_where_nothing_else_holds_the_run(spec, cluster, options, offloads):
    config = gpu_run(spec, cluster, **options)
    setup = RunSetup.load(config, Cluster.parse(cluster).ranks)
    assert setup.cost.offload_optimiser is setup.config.optimiser.offload is offloads
    assert setup.choices.offload_optimiser is offloads
    again = RunSetup.load(config, setup.cost.ranks, setup.choices)
    assert again.fingerprint() == setup.fingerprint()


def test_an_optimiser_that_may_not_leave_is_refused_with_the_way_out():
    with pytest.raises(MemoryBudgetError, match=r"keep the optimiser in host memory \(optimiser.offload"):
        RunSetup.load(gpu_run("llama3-8b", "1x1xH200", offload=False), 1)
    with pytest.raises(MemoryBudgetError, match=r"the budget is 3.6 GiB; use more GPUs, take a smaller model"):
        RunSetup.load(gpu_run("qwen3-0.6b", "1x1xCPU"), 1)  # whose memory is the host's


@pytest.mark.parametrize(
    ("pipeline", "plain"),
    [
        ({"stages": 4}, "1f1b"),
        ({"stages": 2}, "1f1b"),
        ({"stages": 2, "chunks": 2}, "interleaved"),
        ({"stages": 2, "chunks": 2, "schedule": "zb-v"}, "zb-v"),
        ({"stages": 4, "schedule": "seq1f1b"}, "1f1b"),
    ],
)
def test_all_plans_of_a_run_have_its_stages(pipeline, plain):
    planners = RunPlanners.load(pipeline_config(), cost(), Pipelining(**pipeline, head="last"))
    assert planners.fallback.options["schedule"] == plain
    for batch in BATCHES:
        for each in (planners.planner, planners.fallback):
            assert each.plan(batch, cost()).pipelines[0].stages == planners.stages


@pytest.mark.parametrize(
    ("changes", "pipeline", "message"),
    [
        ({}, {"stages": 8}, "8 stages for the 4 layers of tiny: every stage needs a layer; use at most 4 stages"),
        ({}, {"stages": 2, "chunks": 3}, "every stage needs a layer"),
        ({}, {"stages": 2, "chunks": 2, "head": "all"}, "leave the head on the last stage"),
        ({}, {"stages": 3}, "3 stages on 4 ranks: .*; use 2 stages"),
        ({}, {"stages": 2, "schedule": "interleaved"}, "interleaved with 1 chunks"),
        ({"cluster": "3x2xCPU", "sharding": "hybrid"}, {"stages": 2}, "stages of 3 ranks in nodes of 2"),
    ],
)
def test_stages_that_cannot_be_are_refused(changes, pipeline, message):
    with pytest.raises(SeqloomError, match=message):
        RunPlanners.load(pipeline_config(), cost(**changes), Pipelining(**({"head": "last"} | pipeline)))


def test_auto_takes_the_fastest_number_of_stages():
    run, prices = pipeline_config("static", stages="auto"), cost()
    times = {}
    for stages in (1, 2, 4):
        times[stages] = step_times(run, prices, choose_head(run, prices, decided(run.pipeline, stages, 1), BATCHES))
    assert choose_pipeline(run, prices, BATCHES).stages == min(times, key=times.get)


@pytest.mark.parametrize(("layers", "chunks"), [(1, 1), (4, 4), (2, 4), (1, "auto")])
def test_auto_leaves_out_what_the_layers_do_not_allow(layers, chunks):
    run = pipeline_config("static", stages="auto", chunks=chunks)
    assert choose_pipeline(run, cost(layers=layers), BATCHES) == Pipelining()


@pytest.mark.parametrize(
    ("given", "chunks"),
    [
        ({"stages": 2}, [1, 2, 4]),
        ({"stages": 4}, [1, 2]),
        ({"stages": 2, "schedule": "interleaved"}, [2, 4]),
        ({"stages": 2, "schedule": "zb-v"}, [2]),
        ({"stages": 2, "head": "all"}, [1]),
    ],
)
def test_auto_takes_the_fastest_number_of_chunks_that_schedule_and_head_allow(given, chunks):
    prices, times = cost(layers=8), {}
    for count in (1, 2, 4):
        run = pipeline_config(**given, chunks=count)
        with suppress(SeqloomError):
            own = decided(run.pipeline, given["stages"], count)
            times[count] = step_times(run, prices, choose_head(run, prices, own, BATCHES))
    found = choose_pipeline(pipeline_config(**given, chunks="auto"), prices, BATCHES)
    assert list(times) == chunks and found.chunks == min(times, key=times.get)


def test_auto_chooses_stages_and_chunks_together():
    run, prices, times = pipeline_config("static", stages="auto", chunks="auto", head="last"), cost(layers=8), {}
    for pair in [(1, 1), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]:
        times[pair] = step_times(run, prices, decided(run.pipeline, *pair))
    found = choose_pipeline(run, prices, BATCHES)
    assert (found.stages, found.chunks) == min(times, key=times.get)
    assert len(set(times.values())) > 1


def test_all_ranks_have_the_chunks_that_the_first_chose():
    changes = ["pipeline.stages=2", "pipeline.chunks=auto", "data.source=toy:40", "data.max_length=300"]
    config = Config.load(RECIPES / "pipeline-cpu.toml", changes)
    setup = RunSetup.load(config, 4)
    stages = [stage for stage in setup.planners.stages if stage.layer_count]
    assert setup.choices.pipeline.chunks == setup.config.pipeline.chunks == len(stages) // 2
    assert RunSetup.load(config, 4, setup.choices).fingerprint() == setup.fingerprint()


def test_a_run_that_was_left_open_goes_on_with_a_number():
    changes = ["pipeline.stages=auto", "plan.planner=static", "data.source=toy:40", "data.max_length=300"]
    setup = RunSetup.load(Config.load(RECIPES / "pipeline-cpu.toml", changes), 4)
    with_layers = [stage for stage in setup.planners.stages if stage.layer_count]
    assert setup.config.pipeline.stages == len(with_layers) in (1, 2, 4)


def test_auto_takes_the_faster_place_of_the_head_and_keeps_it():
    run, prices = pipeline_config(stages=4), cost()
    times = {}
    for head in ("last", "all"):
        times[head] = step_times(run, prices, replace(run.pipeline, head=head))
    assert choose_head(run, prices, run.pipeline, BATCHES).head == min(times, key=times.get)
    for given, head in (({"stages": 4, "head": "all"}, "all"), ({"stages": 2, "chunks": 2}, "last")):
        run = pipeline_config(**given)
        assert choose_head(run, prices, run.pipeline, BATCHES).head == head
    changes = ["pipeline.head=all", "data.source=toy:40", "data.max_length=300"]
    setup = RunSetup.load(Config.load(RECIPES / "pipeline-cpu.toml", changes), 4)
    assert setup.choices.pipeline.head == "all" and len(setup.planners.stages) == 8


@pytest.mark.parametrize("stages", ["1", pytest.param("auto", marks=pytest.mark.slow)])
def test_auto_takes_the_fastest_expert_degree_and_all_ranks_the_same(stages):
    few = [f"pipeline.stages={stages}", "plan.planner=static", "data.source=toy:40", "data.max_length=300"]
    setups = {
        degree: RunSetup.load(Config.load(RECIPES / "experts-cpu.toml", [*few, f"plan.expert={degree}"]), 4)
        for degree in (1, 2, 4, "auto")
    }
    batches = [batch.lengths for batch in setups["auto"].sampler.peek(4)]
    times = {
        degree: sum(predicted_ns(setup.planners.planner.plan(each, setup.cost), setup.cost) for each in batches)
        for degree, setup in setups.items()
    }
    chosen = setups["auto"]
    assert chosen.cost.expert == chosen.config.plan.expert == chosen.choices.expert == min(times, key=times.get)
    config = Config.load(RECIPES / "experts-cpu.toml", [*few, "plan.expert=auto"])
    again = RunSetup.load(config, 4, choices=chosen.choices)
    assert again.fingerprint() == chosen.fingerprint()


def test_a_choice_says_what_it_is():
    assert str(PlannerChoice("static:4")) == "static:4"
    assert str(PlannerChoice("pipeline", {"stages": 4, "schedule": "1f1b"})) == "pipeline:4,1f1b"


RANKS = 4
SIDE_BY_SIDE = Strategy(
    (PipelineConfig(ParallelConfig(1, 2), (0, 1), 900), PipelineConfig(ParallelConfig(2, 1), (2, 3), 300))
)


def strategy_config(tmp_path, *settings):
    few = ["data.source=toy:40", "data.max_length=300", "plan.budget_gib=", f"run.output={tmp_path / 'run'}"]
    return Config.load(RECIPES / "hydraulis-cpu.toml", [*few, *settings])


def listed(tmp_path, *strategies):
    path = tmp_path / "given.json"
    path.write_text(strategies_to_json(strategies))
    return f"plan.strategies={path}"


def test_a_proposed_list_covers_the_ranks_is_written_and_is_the_same_when_read(tmp_path):
    setup = RunSetup.load(strategy_config(tmp_path), RANKS)
    strategies = setup.planners.strategies
    assert strategies and all(sorted(each.ranks) == [0, 1, 2, 3] for each in strategies)
    assert (
        strategies
        == RunSetup.load(strategy_config(tmp_path), RANKS).planners.strategies
        == setup.planners.planner.options["strategies"]
    )
    settled = write_strategies(setup.config, strategies)
    path = tmp_path / "run" / STRATEGIES_FILE
    assert settled.plan.strategies == str(path) and strategies_from_json(path.read_text()) == strategies
    assert RunSetup.load(settled, RANKS).planners == setup.planners
    path.write_text("another")
    assert write_strategies(settled, strategies) == settled and path.read_text() == "another", (
        "a file that was given stays"
    )


def test_plans_may_have_any_stages_and_static_is_the_fallback(tmp_path):
    planners = RunSetup.load(strategy_config(tmp_path, listed(tmp_path, SIDE_BY_SIDE)), RANKS).planners
    assert (planners.stages, planners.multi_stage, planners.tensor_degrees) == ((), True, (1, 2))
    assert planners.fallback.name == "static"
    assert str(planners.planner) == "hydraulis:t2p1, t1p2"


def test_other_planners_and_pipelines_run_under_free_sharding_without_a_list(tmp_path):
    for settings in (("plan.planner=flex",), ("plan.planner=pipeline:2",), ("plan.planner=auto", "pipeline.stages=2")):
        planners = RunSetup.load(strategy_config(tmp_path, *settings), RANKS).planners
        assert planners.stages == () and planners.strategies == ()
        assert write_strategies(strategy_config(tmp_path), ()) == strategy_config(tmp_path)


def test_experts_of_transformers_models_are_proposed_no_tensor_degree():
    """TP groups divide those of the reference transformer, which in so little memory is fastest."""
    sizes = {"experts": 16, "active_experts": 2, "expert_ffn": 2048}
    spec = ModelSpec("moe", 4, 4096, 32, 8, 128, 0, True, 32_000, False, **sizes)
    own = CostModel(Cluster.parse("1x4xH200"), spec, sharding="free", budget_gib=20)
    lengths = np.array([9_000, 600])
    planning, data = Planning("hydraulis", sharding="free"), Data(Path("store"), sequences=2)
    degrees = []
    for model in (Model("x"), Model(huggingface="x")):
        found = load_strategies(Config(Run(Path("out"), steps=1), model, data, planning), own, lengths)
        degrees.append({pipe.parallel.tensor for each in found for pipe in each.pipelines})
    assert degrees == [{4}, {1}]


def test_auto_under_free_sharding_chooses_from_a_list_beside_other_plans(tmp_path):
    planners = RunSetup.load(
        strategy_config(tmp_path, "plan.planner=auto", listed(tmp_path, SIDE_BY_SIDE)), RANKS
    ).planners
    assert planners.strategies == (SIDE_BY_SIDE,) == planners.planner.options["strategies"]
    assert [str(each) for each in planners.alternatives(np.array([30, 3]))] == [
        "hydraulis:t2p1, t1p2",
        "auto:t2p1, t1p2",
    ]
    proposed = RunSetup.load(strategy_config(tmp_path, "plan.planner=auto"), RANKS).planners
    assert proposed.strategies == RunSetup.load(strategy_config(tmp_path), RANKS).planners.strategies
    assert (
        RunSetup.load(strategy_config(tmp_path, "plan.planner=auto", "plan.sharding=full"), RANKS).planners.strategies
        == ()
    )


def test_strategies_that_hold_a_batch_are_its_alternatives(tmp_path):
    short = replace(SIDE_BY_SIDE, pipelines=tuple(replace(each, max_tokens=40) for each in SIDE_BY_SIDE.pipelines))
    planners = RunSetup.load(strategy_config(tmp_path, listed(tmp_path, SIDE_BY_SIDE, short)), RANKS).planners
    for longest, able in ((40, [SIDE_BY_SIDE, short]), (41, [SIDE_BY_SIDE]), (1000, [])):
        found = [each.options["strategies"] for each in planners.alternatives(np.array([longest, 3]))]
        assert found == ([(each,) for each in able] or [(SIDE_BY_SIDE, short)])


def test_a_warm_up_plan_has_work_for_every_pipeline(tmp_path):
    setup = RunSetup.load(strategy_config(tmp_path, listed(tmp_path, SIDE_BY_SIDE)), RANKS)
    [plan] = warm_up_plans(setup.planners.strategies, setup.cost)
    plan.validate()
    assert plan_shape(plan) == "t1p2 on 2, t2p1 on 2" and len(plan.documents) == 4 and plan.tokens < 32


def test_a_step_has_so_many_tokens(tmp_path):
    lengths = np.array([10, 30])
    assert mean_step_tokens(strategy_config(tmp_path, "data.sequences=6"), lengths) == 120
    assert mean_step_tokens(strategy_config(tmp_path, "data.sequences=", "data.tokens=500"), lengths) == 500


def test_the_log_names_the_list_and_one_that_has_changed(tmp_path):
    run, plain = strategy_config(tmp_path), [SIDE_BY_SIDE.as_dict()]
    first = f"1 strategies to choose from ({tmp_path / 'run' / STRATEGIES_FILE}): t2p1, t1p2"
    assert (
        list(strategy_notes(run, [SIDE_BY_SIDE], None))
        == list(strategy_notes(run, [SIDE_BY_SIDE], json.loads(json.dumps(plain))))
        == [first]
    )
    assert list(strategy_notes(run, [], [])) == []
    compiled = strategy_config(tmp_path, "model.compile=true")
    said = list(strategy_notes(compiled, [SIDE_BY_SIDE], None))
    assert said[0] == first and "(tensor > 1) run uncompiled" in said[1] and len(said) == 2
    changed = "the checkpoint was made with {}; nothing in it depends on them"
    assert list(strategy_notes(run, [SIDE_BY_SIDE], [])) == [first, changed.format("no strategies")]
    assert list(strategy_notes(run, [], plain)) == [changed.format("1 other strategies")]


def pipes(*configs, max_tokens=900):
    found, first = [], 0
    for config in map(lambda each: ParallelConfig(*each), configs):
        found.append(PipelineConfig(config, tuple(range(first, first + config.ranks)), max_tokens))
        first += config.ranks
    return Strategy(tuple(found))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (pipes((1, 2)), "leaves out rank 2"),
        (pipes((1, 2), (2, 2)), "names rank 4"),
        (pipes((1, 4)), "tensor"),
        (pipes((4, 1), max_tokens=200), "document .* has 300 tokens, but no pipeline of .* holds more than 200"),
        ("no file", "cannot be read"),
        ("{", "not JSON"),
        ('{"strategies": []}', "at least one"),
    ],
    ids=["too few ranks", "too many ranks", "tensor degree", "long document", "no file", "no JSON", "an empty list"],
)
def test_a_list_that_cannot_be_is_refused_by_the_command(seqloom_here, tmp_path, given, reason):
    setting = f"plan.strategies={tmp_path / 'given.json'}"
    if isinstance(given, Strategy):
        listed(tmp_path, given)
    elif given != "no file":
        (tmp_path / "given.json").write_text(given)
    settings = ["data.source=toy:40", "data.max_length=300", "plan.budget_gib=", f"run.output={tmp_path}", setting]
    done = seqloom_here(
        "train",
        RECIPES / "hydraulis-cpu.toml",
        "--ranks",
        RANKS,
        *(word for each in settings for word in ("--set", each)),
    )
    assert done.returncode == 2
    with pytest.raises(SeqloomError, match=reason):
        raise SeqloomError(" ".join(done.stderr.split()))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["plan.sharding=full"], "plan.planner = 'hydraulis' with plan.sharding = 'full'"),
        (["plan.planner=flex", "plan.strategies=list.json"], "which chooses from no list"),
        (["plan.strategies=list"], "give a .json of seqloom propose, or 'auto'"),
        (["pipeline.stages=2"], "beside pipeline.stages = 2"),
        (["pipeline.stages=auto"], "beside pipeline.stages = 'auto'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings, reason):
    with pytest.raises(SeqloomError, match=reason):
        strategy_config(tmp_path, *settings)


def packed_config(tmp_path, *settings):
    few = [
        "data.source=toy:60",
        "data.sequences=",
        "data.tokens=4096",
        "data.batches=hbp",
        "run.steps=",
        "run.epochs=2",
    ]
    return Config.load(RECIPES / "tiny-cpu.toml", [*few, f"run.output={tmp_path / 'run'}", *settings])


def test_batches_are_those_of_the_packing_every_epoch_anew(tmp_path):
    setup = RunSetup.load(packed_config(tmp_path), 4)
    epochs = []
    for epoch in range(2):
        batches = []
        while setup.sampler.epoch == epoch:
            batches.append(setup.sampler.next_batch())
        documents = np.concatenate([batch.documents for batch in batches])
        assert np.sort(documents).tolist() == list(range(len(setup.source.lengths)))
        assert max(batch.tokens for batch in batches) <= 4096
        epochs.append([tuple(batch.documents.tolist()) for batch in batches])
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert setup.steps == len(epochs[0]) + len(epochs[1])
    shuffled = RunSetup.load(packed_config(tmp_path, "data.batches=shuffled"), 4).sampler
    assert {tuple(batch.documents.tolist()) for batch in shuffled.peek(3)}.isdisjoint(epochs[0])


def documents_of(batches):
    return [batch.documents.tolist() for batch in batches]


def test_evaluation_is_never_packed_and_check_counts_the_batches_of_the_run(tmp_path):
    given = packed_config(tmp_path, "data.validation=toy:24:1")
    _, batches = RunSetup.load(given, 4).validation()
    plain = RunSetup.load(packed_config(tmp_path, "data.validation=toy:24:1", "data.batches=shuffled"), 4)
    assert documents_of(batches) == documents_of(plain.validation()[1])
    run, setup = inspect_run(given, 4), RunSetup.load(given, 4)
    assert run.setup.steps == setup.steps
    assert documents_of(run.sample) == documents_of(setup.sampler.peek(len(run.sample)))


def test_a_state_of_another_machine_is_refused_and_documents_are_no_limit(tmp_path):
    state = RunSetup.load(packed_config(tmp_path), 4).sampler.state_dict()
    with pytest.raises(SeqloomError, match="of other batches"):
        RunSetup.load(packed_config(tmp_path, "data.tokens=2048"), 2).sampler.load_state_dict(state)
    with pytest.raises(SeqloomError, match="give tokens instead of sequences"):
        packed_config(tmp_path, "data.tokens=", "data.sequences=8")


def huggingface_config(tmp_path, content, *settings):
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    recipe = (RECIPES / "tiny-cpu.toml").read_text().replace('spec = "models/tiny.toml" ', 'huggingface = "model"')
    (tmp_path / "recipe.toml").write_text(recipe)
    return Config.load(tmp_path / "recipe.toml", settings)


GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 257}


@pytest.mark.parametrize(("positions", "named"), [({"n_positions": 300}, 300), ({}, 1_024)])
def test_a_document_longer_than_a_table_of_positions_is_refused(tmp_path, positions, named):
    """By training and evaluation; a published config leaves out what is the default of its class."""
    content = GPT2 | positions
    config = huggingface_config(tmp_path, content)
    message = rf"has [\d,]+ tokens, and the model a table of {named:,} positions; set data.max_length = {named}, and"
    with pytest.raises(SeqloomError, match=message):
        RunSetup.load(config, 4)
    cut = "data.max_length=300", "data.too_long=truncate"
    setup = RunSetup.load(huggingface_config(tmp_path, content, *cut), 4)
    assert setup.source.lengths.max() == 300
    with pytest.raises(SeqloomError, match="200 positions"):
        inspect_run(huggingface_config(tmp_path, GPT2 | {"n_positions": 200}, *cut), 4)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 257}


def test_a_bidirectional_model_sees_the_labels_of_a_run(tmp_path):
    content = LLAMA | {"num_attention_heads": 4, "tie_word_embeddings": False}
    assert RunSetup.load(huggingface_config(tmp_path, content), 4).spec.causal
    with pytest.raises(SeqloomError, match="is not causal: labels of a run are the next tokens, and its tokens see"):
        RunSetup.load(huggingface_config(tmp_path, content | {"is_causal": False}), 4)


def test_a_folder_without_a_config_is_named(tmp_path):
    config = huggingface_config(tmp_path, GPT2)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(SeqloomError, match=r"model.huggingface = .*: no config.json in it; give the folder of a model"):
        RunSetup.load(config, 4)


def test_a_share_is_set_aside_before_the_limit_of_length():
    def parts(*settings):
        words = ["data.source=toy:200", "data.validation=", "data.validation_share=0.2", "run.steps=2", *settings]
        setup = RunSetup.load(Config.load(RECIPES / "tiny-cpu.toml", [*words, "schedule.warmup=1"]), 2)
        return setup.source, setup.validation()[0]

    whole, limited = parts("data.max_length=4096"), parts("data.max_length=300", "data.too_long=drop")
    assert [len(part) for part in whole] == [160, 40]
    for part, short in zip(whole, limited, strict=True):
        kept = [number for number, length in enumerate(part.lengths.tolist()) if length <= 300]
        assert short.lengths.tolist() == part.lengths[kept].tolist() and 0 < len(kept) < len(part)
        assert short.tokens(3, 0, 5).tolist() == part.tokens(kept[3], 0, 5).tolist()


MIXED = "data.sources=[{path = 'toy:200', weight = 0.75}, {path = 'toy:50:1', weight = 0.25}]"


def test_a_share_of_every_source_of_a_mixture_is_set_aside():
    def setup(*settings):
        words = ["data.source=", MIXED, "data.validation=", "run.steps=2", "schedule.warmup=1", *settings]
        return RunSetup.load(Config.load(RECIPES / "tiny-cpu.toml", words), 2)

    whole, divided = setup("evaluation.every=0"), setup("data.validation_share=0.2")
    evaluation, batches = divided.validation()
    assert [len(part) for part in whole.source.parts] == [200, 50]
    assert [len(part) for part in divided.source.parts] == [160, 40]
    assert [len(part) for part in evaluation.parts] == [40, 10]
    for number in range(2):
        parts = (divided.source.parts[number], evaluation.parts[number])
        together = sorted(length for part in parts for length in part.lengths.tolist())
        assert together == sorted(whole.source.parts[number].lengths.tolist())
    assert sum(len(batch) for batch in batches) == 32
    with pytest.raises(SeqloomError, match=r"data.sources: 'toy:200': every document is longer than 2 tokens"):
        setup("data.max_length=2", "data.too_long=drop", "data.validation_share=0.2")


def test_missing_and_unfit_sources_of_a_mixture_are_named(tmp_path):
    def load(sources):
        words = ["data.source=", f"data.sources={sources}", "data.max_length=", "data.too_long=refuse"]
        return RunSetup.load(Config.load(RECIPES / "tiny-cpu.toml", words), 2)

    with pytest.raises(SeqloomError, match="nowhere' is no token store, it does not exist; make one with"):
        load("[{path='toy:9'}, {path='nowhere'}]")
    with StoreWriter(tmp_path / "small", vocabulary=100) as writer:
        writer.add([1, 2, 3])
    with pytest.raises(SeqloomError, match=r"a vocabulary of 257 ids, .*small one of 100; prepare both with the model"):
        load(f"[{{path='toy:9'}}, {{path='{tmp_path / 'small'}'}}]")
