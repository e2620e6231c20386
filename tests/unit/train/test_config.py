"""A run as one value: read, overridden, written back; models by their published name."""

import ast
import json
import pickle
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import seqloom
from seqloom.describe import ModelSpec
from seqloom.errors import SeqloomError
from seqloom.reader import build
from seqloom.train.config import (
    MODEL_FILES,
    Config,
    Lora,
    Optimiser,
    Run,
    WeightedSource,
    fetch_model,
    is_model_name,
    merge_overrides,
    parse_overrides,
)

RECIPES = Path(__file__).parents[3] / "recipes"
LEAST = """
[run]
steps = 10
output = "out"

[model]
spec = "qwen3-0.6b"

[data]
source = "store"
sequences = 4
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_least_config_and_its_defaults(write, tmp_path):
    config = Config.load(write(LEAST))
    assert config.run.output == tmp_path / "out"
    assert config.data.source == tmp_path / "store"
    assert (config.plan.planner, config.optimiser.betas, config.schedule.kind) == ("auto", (0.9, 0.95), "cosine")
    assert config.metrics == tmp_path / "out" / "metrics.jsonl"
    assert config.checkpoints == tmp_path / "out" / "checkpoints"
    with pytest.raises(FrozenInstanceError):
        config.run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.toml")), ids=lambda file: file.name)
def test_every_recipe_loads_and_round_trips(file, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "seqloom.train.config.fetch_model", lambda name: tmp_path / name
    )  # a published model: no network
    config = Config.load(file)
    assert build(Config, json.loads(json.dumps(config.as_dict())), "again") == config


def test_the_tiny_recipe_is_small_names_every_key_and_stays_in_the_build_folder():
    path = RECIPES / "tiny-cpu.toml"
    config = Config.load(path)
    assert config.model.spec == str(RECIPES / "models" / "tiny.toml")
    spec = ModelSpec.load(config.model.spec)
    assert spec.vocabulary == 257
    assert spec.parameters() < 1_000_000
    text = path.read_text()
    for section in fields(config):
        block = text.partition(f"[{section.name}]")[2].partition("\n[")[0]
        for key in fields(getattr(config, section.name)):
            assert f"{key.name} = " in block, f"{section.name}.{key.name}"
    assert config.run.output.is_relative_to(RECIPES.parent / "build")
    assert [str(place)[:4] for place in (config.data.source, config.data.validation)] == ["toy:", "toy:"]


def test_overrides_are_typed_like_toml(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = Config.load(
        write(LEAST),
        overrides=[
            "optimiser.lr=1e-4",
            "plan.planner=flex",
            "optimiser.betas=[0.8, 0.9]",
            "log.sinks=['wandb']",
            "run.output=elsewhere",
            "run.steps=",
            "run.epochs = 2",
        ],
    )
    assert (config.optimiser.lr, config.optimiser.betas, config.plan.planner) == (1e-4, (0.8, 0.9), "flex")
    assert config.log.sinks == ("wandb",)
    assert (config.run.steps, config.run.epochs) == (None, 2)
    assert config.run.output == tmp_path.parent / "elsewhere"  # a command line is relative to where it is typed
    assert config.data.source == tmp_path / "store"


def test_values_of_overrides():
    values = parse_overrides(
        ["a.i=3", "a.f=3.0", "a.t=x=y z", "a.q='3'", "a.d=2026-11-15", "a.n=", "a.i=4", "a.s=1 2", "b.i=-1"]
    )
    expected = {"i": 4, "f": 3.0, "t": "x=y z", "q": "3", "d": "2026-11-15", "n": None, "s": "1 2"}
    assert values == {"a": expected, "b": {"i": -1}}
    assert merge_overrides({"a": {"n": 1, "k": 2}}, {"a": {"n": None}, "c": {"x": 1}}) == {"a": {"k": 2}, "c": {"x": 1}}


def test_keys_of_a_table_are_overridden_one_by_one(write):
    text = LEAST.replace('spec = "qwen3-0.6b"', 'huggingface = "."\nlora = { rank = 4, alpha = 3.0 }')
    assert text != LEAST
    config = Config.load(write(text), ["model.lora.rank=8", "model.lora.targets=['q_proj']", "model.lora.alpha="])
    assert config.model.lora == Lora(rank=8, targets=("q_proj",))
    assert Config.load(write(text), ["model.lora="]).model.lora is None
    assert Config.load(write(text), ["model.lora=", "model.lora.rank=2"]).model.lora == Lora(rank=2, alpha=3.0)
    with pytest.raises(SeqloomError, match=r"unknown key 'model.lora.ranks'; did you mean 'rank'"):
        Config.load(write(text), ["model.lora.ranks=8"])


@pytest.mark.parametrize("override", ["lr=1", "optimiser.lr", "a.b.c=1", ".lr=1", "optimiser.=1"])
def test_overrides_that_are_not_dotted_are_refused(override, write):
    with pytest.raises(SeqloomError, match=r"spell it section\.key=value"):
        Config.load(write(LEAST), overrides=[override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=1", r"unknown key 'optimizer'; did you mean 'optimiser'\?"),
        ("optimiser.learning=1", r"unknown key 'optimiser.learning'; legal keys: name, lr, betas"),
        ("plan.planer=flex", r"unknown key 'plan.planer'; did you mean 'planner'\?"),
        ("plan.planner=flx", r"unknown planner 'flx'; did you mean flex"),
        ("optimiser.betas=[0.9", r"\[0.9 is not a TOML value"),
        ("run.steps='10'", r"run.steps = '10': input should be a valid integer"),
        ("run.steps=10.0", r"run.steps = 10.0: input should be a valid integer"),
        ("run.steps=true", r"run.steps = True: input should be a valid integer"),
        ("run.steps=0", r"run.steps = 0: input should be greater than or equal to 1"),
        ("run.epochs=1", r"run.steps and run.epochs: both are given; give exactly one"),
        ("run.steps=", r"run.steps and run.epochs: neither is given"),
        ("run.timeout_s=0", r"run.timeout_s = 0: input should be greater than or equal to 1"),
        ("model.huggingface=m", r"model.spec and model.huggingface: both are given"),
        ("model.spec=qwen3", r"unknown model 'qwen3'; did you mean qwen3"),
        ("model.spec=gone.toml", r"gone.toml' does not exist"),
        ("model.dtype=float16", r"model.dtype = 'float16': input should be 'float64', 'float32' or 'bfloat16'"),
        ("model.compile=1", r"model.compile = 1: input should be a valid boolean"),
        ("data.tokens=8", r"data.sequences and data.tokens: both are given"),
        ("data.max_length=1", r"data.max_length = 1: input should be greater than or equal to 2"),
        ("data.too_long=drop", r"data.too_long = 'drop' without data.max_length"),
        ("data.too_long=cut", r"data.too_long = 'cut': input should be 'refuse', 'truncate' or 'drop'"),
        ("data.source=", r"data.source and data.sources: neither is given; give exactly one"),
        ("data.sources=[{path='a'}]", r"data.source and data.sources: both are given; give exactly one"),
        ("data.weigh_by=documents", r"data.weigh_by = 'documents' without data.sources, so nothing is weighed"),
        ("plan.cluster=8xH2000", r"unknown device 'H2000'; did you mean"),
        ("plan.profile=h2", r"unknown profile 'h2'; did you mean"),
        ("plan.sharding=half", r"plan.sharding = 'half': input should be 'full', 'hybrid', 'none' or 'free'"),
        ("plan.budget_gib=0", r"plan.budget_gib = 0: input should be greater than 0"),
        ("plan.capacity=0", r"plan.capacity = 0: input should be greater than or equal to 1"),
        ("plan.ahead=-1", r"plan.ahead = -1: input should be greater than or equal to 0"),
        ("pipeline.stages=0", r"pipeline.stages = 0; give 1 or more, or 'auto'"),
        ("pipeline.stages=two", r"pipeline.stages = 'two'; give 1 or more, or 'auto'"),
        ("pipeline.chunks=2", r"pipeline.chunks = 2 with pipeline.stages = 1, which is no pipeline"),
        ("pipeline.schedule=1f1b", r"pipeline.schedule = '1f1b' with pipeline.stages = 1"),
        ("pipeline.schedule=2f2b", r"unknown pipeline.schedule '2f2b'; did you mean 1f1b"),
        ("plan.planner=pipeline:4", r"plan.planner = 'pipeline:4' with plan.sharding = 'full': the stages of a run"),
        ("optimiser.lr=nan", r"optimiser.lr = nan: input should be a finite number"),
        ("optimiser.lr=inf", r"optimiser.lr = inf: input should be a finite number"),
        ("optimiser.betas=[0.9, 1.0]", r"optimiser.betas.1 = 1.0: input should be less than 1"),
        ("optimiser.betas=0.9", r"optimiser.betas = 0.9: input should be a valid tuple"),
        ("optimiser.clip=-1", r"optimiser.clip = -1: input should be greater than or equal to 0"),
        ("schedule.kind=cos", r"schedule.kind = 'cos': input should be 'cosine', 'linear' or 'constant'"),
        ("schedule.final=1.5", r"schedule.final = 1.5: input should be less than or equal to 1"),
        ("schedule.warmup=11", r"schedule.warmup = 11 is more than run.steps = 10"),
        ("evaluation.every=5", r"evaluation.every = 5 without data.validation"),
        ("data.validation_share=1.0", r"data.validation_share = 1.0: input should be less than 1"),
        ("evaluation.batches=0", r"evaluation.batches = 0: input should be greater than or equal to 1"),
        ("checkpoint.keep=0", r"checkpoint.keep = 0: input should be greater than or equal to 1"),
        ("log.every=0", r"log.every = 0: input should be greater than or equal to 1"),
        ("log.sinks=['mlflow']", r"log.sinks.0 = 'mlflow': input should be 'tensorboard', 'wandb' or 'trackio'"),
        ("log.sinks=['wandb', 'wandb']", r"names one twice"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(override, message, write):
    with pytest.raises(SeqloomError, match=message):
        Config.load(write(LEAST), overrides=[override])


def test_sections_made_in_python_are_checked_like_those_of_a_file(write):
    config = Config.load(write(LEAST))
    assert pickle.loads(pickle.dumps(config)) == config
    refused = [
        (lambda: Run(Path("out"), steps=0), r"Run: steps = 0: input should be greater than or equal to 1"),
        (lambda: Run(Path("out")), r"run.steps and run.epochs: neither is given"),
        (lambda: replace(config.run, steps=0), r"Run: steps = 0"),
        (lambda: Optimiser(betas=(0.9, 1.0)), r"Optimiser: betas.1 = 1.0: input should be less than 1"),
        (lambda: replace(config, run=replace(config.run, stepz=1)), r"unknown key 'stepz'; did you mean 'steps'"),
    ]
    for make, message in refused:
        with pytest.raises(SeqloomError, match=message):
            make()


def test_a_planner_without_stages_is_for_a_run_without_them(write):
    with pytest.raises(SeqloomError, match=r"plan.planner = 'flex' beside pipeline.stages = 4: it plans without"):
        Config.load(write(LEAST), ["plan.planner=flex", "pipeline.stages=4"])
    assert Config.load(write(LEAST), ["plan.planner=flex", "pipeline.stages=auto"]).pipeline.stages == "auto"


def test_parameters_belong_to_a_reference_model(write):
    overrides = ["model.spec=", "model.huggingface=m", "model.parameters=p.safetensors"]
    with pytest.raises(SeqloomError, match=r"model.parameters = .*p.safetensors' beside model.huggingface"):
        Config.load(write(LEAST), overrides)
    assert Config.load(write(LEAST), overrides[2:]).model.parameters == Path("p.safetensors").resolve()


def test_budgets_that_exclude_the_longest_document_are_refused(write):
    with pytest.raises(SeqloomError, match=r"data.tokens = 8 is less than data.max_length = 16"):
        Config.load(write(LEAST), overrides=["data.sequences=", "data.tokens=8", "data.max_length=16"])


def test_a_section_must_be_a_table_and_needed_ones_are_asked_for(write):
    with pytest.raises(SeqloomError, match=r"optimiser = 3: input should be a dictionary"):
        Config.load(write("optimiser = 3\n" + LEAST), overrides=["optimiser.lr=1"])
    with pytest.raises(SeqloomError, match=r"key 'model' is missing; add it"):
        Config.load(write(LEAST.replace('[model]\nspec = "qwen3-0.6b"', "")))
    with pytest.raises(SeqloomError, match=r"a training config is a \.toml file"):
        Config.load(write(LEAST, "run.json"))


def test_resuming_inside_the_own_folder_is_refused(write, tmp_path):
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000004"
    with pytest.raises(SeqloomError, match=r"lies in this run's own folder"):
        Config.load(write(LEAST), overrides=[f"checkpoint.resume={checkpoint}"])
    other = tmp_path / "other" / "step-00000004"
    assert Config.load(write(LEAST), overrides=[f"checkpoint.resume={other}"]).checkpoint.resume == str(other)


NAME = "someone/a-model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache and no network."""
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def store(cache: Path, *files: str) -> Path:
    """Put a model into the cache as huggingface_hub lays it out."""
    model = cache / "models--someone--a-model"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    for name in files:
        (snapshot / name).write_text(json.dumps({}))
    return snapshot


def test_what_is_a_name(tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert is_model_name("Qwen/Qwen3-1.7B", tmp_path)
    for folder in ("models/mine", "model", "./a/b", "../a/b", "/a/b", "a/b/c", "~/a", "a/"):
        assert not is_model_name(folder, tmp_path), folder


def test_a_whole_model_in_the_cache_is_used(cache):
    snapshot = store(cache, "config.json", "model.safetensors")
    assert fetch_model(NAME) == snapshot


@pytest.mark.parametrize(("files", "why"), [([], "is no folder here"), (["config.json"], "has no .*safetensors in")])
def test_a_model_that_is_not_there_or_has_no_parameters_is_refused(cache, files, why):
    if files:
        store(cache, *files)
    with pytest.raises(SeqloomError, match=f"'someone/a-model' {why}.*hf download someone/a-model"):
        fetch_model(NAME)


CONFIG = """
[run]
steps = 1
output = "out"
[model]
huggingface = "someone/a-model"
[data]
source = "toy:8"
sequences = 2
"""


def test_a_config_has_the_folder_and_asks_for_it_only_where_it_is_wanted(cache, tmp_path, monkeypatch):
    snapshot = store(cache, "config.json", "model.safetensors")
    (tmp_path / "run.toml").write_text(CONFIG)
    assert Config.load(tmp_path / "run.toml").model.huggingface == snapshot
    monkeypatch.setattr("seqloom.train.config.fetch_model", lambda name: pytest.fail("an override names a folder"))
    found = Config.load(tmp_path / "run.toml", [f"model.huggingface={tmp_path}"]).model.huggingface
    assert found == tmp_path.resolve()


def test_only_files_that_a_run_needs_are_wanted():
    assert not any(pattern.endswith((".py", ".bin")) for pattern in MODEL_FILES)


def test_a_share_for_evaluation_excludes_documents_of_their_own(write):
    config = Config.load(write(LEAST), ["data.validation_share=0.25", "evaluation.every=2"])
    assert config.data.evaluates and config.data.validation is None
    with pytest.raises(
        SeqloomError, match=r"data.validation_share = 0.25 beside data.validation.*leave one of them out"
    ):
        Config.load(write(LEAST), ["data.validation_share=0.25", "data.validation=other"])


MIXED = LEAST.replace('source = "store"', 'sources = [{ path = "a", weight = 0.7 }, { path = "toy:9", weight = 3 }]')


def test_a_mixture_of_sources(write, tmp_path, monkeypatch):
    data = Config.load(write(MIXED)).data
    assert data.sources == (WeightedSource(tmp_path / "a", 0.7), WeightedSource(Path("toy:9"), 3.0))
    monkeypatch.chdir(tmp_path.parent)
    words = ["data.source=", "data.sources=[{path='b'}, {path='c', weight=2}]", "data.weigh_by=documents"]
    data = Config.load(write(LEAST), words).data
    assert data.sources == (WeightedSource(tmp_path.parent / "b", 1.0), WeightedSource(tmp_path.parent / "c", 2.0))
    config = Config.load(write(MIXED))
    assert build(Config, json.loads(json.dumps(config.as_dict())), "again") == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sources=[]", r"data.sources = \[\] names no source; name some"),
        ("data.sources=[{path='a', weight=0}]", r"a' has weight 0, so none .*give a weight above 0"),
        ("data.sources=[{path='a', weight=-1}]", r"data.sources.0.weight = -1: input should be greater than"),
        ("data.sources=[{path='a', weight=true}]", r"data.sources.0.weight = True: input should be a valid number"),
        ("data.sources=[{path='a', weight=inf}]", r"data.sources.0.weight = inf: input should be a finite number"),
        ("data.sources=[{path='a', wieght=1}]", r"unknown key 'data.sources.0.wieght'; did you mean 'weight'"),
        ("data.sources=[{weight=1}]", r"key 'data.sources.0.path' is missing"),
        ("data.sources=['a']", r"data.sources.0 = 'a': input should be"),
        ("data.sources=[{path='a'}, {path='./a'}]", r"data.sources names '.*a' twice; name it once"),
        ("data.batches=hbp", r"data.batches = 'hbp' with data.sources: packs are made of all documents"),
    ],
)
def test_mixtures_that_are_refused(override, message, write):
    words = [override, "data.sequences=", "data.tokens=100"]
    with pytest.raises(SeqloomError, match=message):
        Config.load(write(MIXED), words)


def keys_of(section, prefix=""):
    """Every key of a config, such as data.max_length."""
    for name, kind in get_type_hints(section).items():
        yield prefix + name
        for part in (kind, *get_args(kind), *(each for one in get_args(kind) for each in get_args(one))):
            if is_dataclass(part):
                yield from keys_of(part, f"{prefix}{name}.")


def test_messages_name_only_keys_that_a_config_has():
    known = {*keys_of(Config), "model.eval"}  # a call of torch
    sections = "|".join(each.name for each in fields(Config))
    named = set()
    for path in (Path(seqloom.__file__).parent).rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
            if isinstance(text, str) and " " in text:
                found = re.findall(rf"(?<![\w./{{])((?:{sections})\.[a-z_0-9]+)(?![\w.({{]*\()", text)
                named |= {(key, path.name) for key in found if not key.endswith((".json", ".safetensors"))}
    assert len(named) > 60
    assert {pair for pair in named if pair[0] not in known} == set()
