"""What a run chooses from at every step: proposed, read, written, and refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqloom.errors import SeqloomError
from seqloom.plan.plan import outline
from seqloom.planners.hydraulis import (
    ParallelConfig,
    PipelineConfig,
    Strategy,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.train.config import Config
from seqloom.train.setup import FILE, Setup, kept, small_plans, tokens_of_step, told

RECIPE = Path(__file__).parents[3] / "recipes" / "hydraulis-cpu.toml"
RANKS = 4
SIDE_BY_SIDE = Strategy(
    (PipelineConfig(ParallelConfig(1, 2), (0, 1), 900), PipelineConfig(ParallelConfig(2, 1), (2, 3), 300))
)


def config(tmp_path, *settings):
    few = ["data.source=toy:40", "data.max_length=300", "plan.budget_gib=", f"run.output={tmp_path / 'run'}"]
    return Config.load(RECIPE, [*few, *settings])


def listed(tmp_path, *strategies):
    path = tmp_path / "given.json"
    path.write_text(strategies_to_json(strategies))
    return f"plan.strategies={path}"


def test_a_proposed_list_covers_the_ranks_is_written_and_is_the_same_when_read(tmp_path):
    setup = Setup.of(config(tmp_path), RANKS)
    strategies = setup.planners.strategies
    assert strategies and all(sorted(each.ranks) == [0, 1, 2, 3] for each in strategies)
    assert (
        strategies
        == Setup.of(config(tmp_path), RANKS).planners.strategies
        == setup.planners.planner.options["strategies"]
    )
    settled = kept(setup.config, strategies)
    path = tmp_path / "run" / FILE
    assert settled.plan.strategies == str(path) and strategies_from_json(path.read_text()) == strategies
    assert Setup.of(settled, RANKS).planners == setup.planners
    path.write_text("another")
    assert kept(settled, strategies) == settled and path.read_text() == "another", "a file that was given stays"


def test_plans_may_have_any_stages_and_static_stands_in(tmp_path):
    planners = Setup.of(config(tmp_path, listed(tmp_path, SIDE_BY_SIDE)), RANKS).planners
    assert (planners.stages, planners.cut, planners.tensor_degrees) == ((), True, (1, 2))
    assert planners.fallback.name == "static"
    assert str(planners.planner) == "hydraulis:2x1, 1x2"


def test_other_planners_and_pipelines_run_under_free_sharding_without_a_list(tmp_path):
    for settings in (("plan.planner=flex",), ("plan.planner=pipeline:2",), ("plan.planner=auto", "pipeline.stages=2")):
        planners = Setup.of(config(tmp_path, *settings), RANKS).planners
        assert planners.stages == () and planners.strategies == ()
        assert kept(config(tmp_path), ()) == config(tmp_path)


def test_auto_under_free_sharding_chooses_from_a_list_beside_other_plans(tmp_path):
    planners = Setup.of(config(tmp_path, "plan.planner=auto", listed(tmp_path, SIDE_BY_SIDE)), RANKS).planners
    assert planners.strategies == (SIDE_BY_SIDE,) == planners.planner.options["strategies"]
    assert [str(each) for each in planners.alternatives(np.array([30, 3]))] == ["hydraulis:2x1, 1x2", "auto:2x1, 1x2"]
    proposed = Setup.of(config(tmp_path, "plan.planner=auto"), RANKS).planners
    assert proposed.strategies == Setup.of(config(tmp_path), RANKS).planners.strategies
    assert Setup.of(config(tmp_path, "plan.planner=auto", "plan.sharding=full"), RANKS).planners.strategies == ()


def test_strategies_that_hold_a_batch_are_its_alternatives(tmp_path):
    short = replace(SIDE_BY_SIDE, pipelines=tuple(replace(each, max_tokens=40) for each in SIDE_BY_SIDE.pipelines))
    planners = Setup.of(config(tmp_path, listed(tmp_path, SIDE_BY_SIDE, short)), RANKS).planners
    for longest, able in ((40, [SIDE_BY_SIDE, short]), (41, [SIDE_BY_SIDE]), (1000, [])):
        found = [each.options["strategies"] for each in planners.alternatives(np.array([longest, 3]))]
        assert found == ([(each,) for each in able] or [(SIDE_BY_SIDE, short)])


def test_a_rehearsal_has_work_for_every_pipeline(tmp_path):
    setup = Setup.of(config(tmp_path, listed(tmp_path, SIDE_BY_SIDE)), RANKS)
    [plan] = small_plans(setup.planners.strategies, setup.cost)
    plan.validate()
    assert outline(plan) == "1x2/2, 2x1/2" and len(plan.documents) == 4 and plan.tokens < 32


def test_a_step_has_so_many_tokens(tmp_path):
    lengths = np.array([10, 30])
    assert tokens_of_step(config(tmp_path, "data.sequences=6"), lengths) == 120
    assert tokens_of_step(config(tmp_path, "data.sequences=", "data.tokens=500"), lengths) == 500


def test_the_log_names_the_list_and_one_that_has_changed(tmp_path):
    run, plain = config(tmp_path), [SIDE_BY_SIDE.as_dict()]
    first = f"1 strategies to choose from ({tmp_path / 'run' / FILE}): 2x1, 1x2"
    assert (
        list(told(run, [SIDE_BY_SIDE], None))
        == list(told(run, [SIDE_BY_SIDE], json.loads(json.dumps(plain))))
        == [first]
    )
    assert list(told(run, [], [])) == []
    compiled = config(tmp_path, "model.compile=true")
    said = list(told(compiled, [SIDE_BY_SIDE], None))
    assert said[0] == first and "(tensor > 1) run uncompiled" in said[1] and len(said) == 2
    changed = "the checkpoint was made with {}; nothing in it depends on them"
    assert list(told(run, [SIDE_BY_SIDE], [])) == [first, changed.format("no strategies")]
    assert list(told(run, [], plain)) == [changed.format("1 other strategies")]


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
    done = seqloom_here("train", RECIPE, "--ranks", RANKS, *(word for each in settings for word in ("--set", each)))
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
        config(tmp_path, *settings)
