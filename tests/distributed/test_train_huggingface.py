"""`seqloom train` on a Hugging Face folder: plans change nothing, the trained model is one of transformers again."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from seqloom.data import StoreWriter
from seqloom.planners.hydraulis import ParallelConfig, PipelineConfig, Strategy, strategies_to_json
from seqloom.train.logging import read_steps
from support.runs import logged
from support.tiny_models import VOCABULARY, randomised, tiny_model

pytestmark = pytest.mark.distributed
RECIPE = (Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml").read_text()
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with documents, a tiny model with a tokenizer file, and a recipe for them."""
    folder = tmp_path_factory.mktemp("train")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=VOCABULARY) as writer:
        for length in (40, 3, 60, 1, 17, 55, 8, 25, 33, 5):
            writer.add(draw.integers(0, VOCABULARY, length))
    tiny_model("llama-tied").save_pretrained(folder / "llama")
    (folder / "llama" / "tokenizer_config.json").write_text("{}")
    recipe = RECIPE.replace('spec = "models/tiny.toml" ', 'huggingface = "llama"')
    assert recipe != RECIPE
    (folder / "recipe.toml").write_text(recipe)
    return folder


def command(place: Path, run: str, *words: str, **settings: object) -> list[str]:
    """The words after `seqloom`, for the recipe of the place; a key's dot is written as two underscores."""
    values = {
        "data__source": place / "store",
        "data__validation": place / "store",
        "data__sequences": 5,
        "data__max_length": 64,
        "model__dtype": "float64",
        "plan__capacity": 64,
        "run__steps": STEPS,
        "run__output": place / run,
        "schedule__warmup": 1,
        "evaluation__every": 2,
        **settings,
    }
    sets = [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    return ["train", str(place / "recipe.toml"), *sets, *words]


def trained(seqloom_here, place: Path, run: str, *words: str, **settings: object) -> list[float]:
    """Train, and return the losses."""
    result = seqloom_here(*command(place, run, *words, "--json", **settings))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == STEPS
    return [record.loss for record in read_steps(place / run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def two(seqloom_here, place):
    """The losses of a run on two ranks."""
    return trained(seqloom_here, place, "two", "--ranks", "2", plan__planner="adaptive", plan__capacity=40)


def loaded(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=torch.arange(20)[None] % VOCABULARY).logits


def test_planner_and_ranks_do_not_change_the_losses(seqloom_here, place, two):
    assert len(two) == STEPS and two[-1] < two[0]
    one = trained(seqloom_here, place, "one", "--ranks", "1", plan__planner="static")
    assert np.allclose(one, two, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_transformers_reads_the_trained_model_and_it_is_the_one_of_the_last_step(place, two):
    saved = loaded(place / "two" / "model")
    assert saved.dtype == torch.float64, "that of the parameters which were updated"
    assert saved.config._attn_implementation != "seqloom"
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    last = tiny_model("llama-tied").eval()
    state = {"model": {name: torch.empty_like(p) for name, p in last.named_parameters()}}
    dcp.load(state, checkpoint_id=place / "two" / "checkpoints" / f"step-{STEPS:08}", no_dist=True)
    before = logits(last)
    last.load_state_dict(state["model"], strict=False)
    assert torch.equal(logits(saved), logits(last))
    assert not torch.allclose(logits(saved), before, rtol=1e-3), "trained"


def test_the_tokenizer_comes_along_and_nothing_half_written_stays(place, two):
    names = {path.name for path in (place / "two" / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json"} <= names
    assert not list((place / "two").glob(".model*"))


@pytest.mark.slow
def test_dropout_is_the_same_on_any_number_of_ranks(seqloom_here, place):
    """A token is dropped for what it is; evaluation drops nothing; another seed drops others."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.3))
    randomised(model, 0).double().save_pretrained(place / "gpt2")
    options = {"model__huggingface": place / "gpt2"}
    one = trained(seqloom_here, place, "dropout-1", "--ranks", "1", plan__planner="static", **options)
    three = trained(
        seqloom_here, place, "dropout-3", "--ranks", "3", plan__planner="flex", plan__capacity=40, **options
    )
    assert np.allclose(one, three, rtol=1e-9, atol=0)
    evaluated = [logged(place / run, "evaluation_loss") for run in ("dropout-1", "dropout-3")]
    assert evaluated[0] and np.allclose(*evaluated, rtol=1e-9, atol=0)
    words = command(place, "none", "--ranks", "3", "--planners", "static,flex", **options)[1:]
    verified = seqloom_here("verify", *words)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.slow
def test_stages_change_neither_losses_nor_model(seqloom_here, place, two):
    stages = trained(seqloom_here, place, "stages", "--ranks", "4", pipeline__stages=2)
    assert np.allclose(stages, two, rtol=1e-9, atol=0)
    ours, theirs = (dict(loaded(place / run / "model").named_parameters()) for run in ("stages", "two"))
    assert ours.keys() == theirs.keys() and all(torch.allclose(each, theirs[name]) for name, each in ours.items())


@pytest.mark.slow
def test_strategies_change_neither_losses_nor_model(seqloom_here, place, two):
    """Weights cut over two ranks beside two stages."""
    side_by_side = Strategy(
        (PipelineConfig(ParallelConfig(1, 2), (0, 1), 64), PipelineConfig(ParallelConfig(2, 1), (2, 3), 64))
    )
    (place / "list.json").write_text(strategies_to_json([side_by_side]))
    free = {"plan__planner": "hydraulis", "plan__sharding": "free", "plan__strategies": place / "list.json"}
    found = trained(seqloom_here, place, "strategies", "--ranks", "4", **free)
    assert np.allclose(found, two, rtol=1e-9, atol=0)
    ours, theirs = (dict(loaded(place / run / "model").named_parameters()) for run in ("strategies", "two"))
    assert ours.keys() == theirs.keys() and all(torch.allclose(each, theirs[name]) for name, each in ours.items())


@pytest.mark.slow
def test_tp_groups_divide_experts_and_a_run_goes_on_without_them(seqloom_here, place):
    """Losses, and the loss after the last step, of one rank: in TP groups, in stages of one each, and begun in one."""
    model = tiny_model("qwen3-moe", output_router_logits=True, router_aux_loss_coef=0.3, vocab_size=32)
    model.save_pretrained(place / "experts")
    options = {"model__huggingface": place / "experts", "checkpoint__every": 1, "checkpoint__keep": STEPS}
    one = trained(seqloom_here, place, "experts-1", "--ranks", "1", plan__planner="static", **options)
    four = {"plan__capacity": 40, "plan__tensor": 2, **options}
    found = [trained(seqloom_here, place, "experts-2", "--ranks", "4", plan__sharding="hybrid", **four)]
    found.append(trained(seqloom_here, place, "experts-2x2", "--ranks", "4", pipeline__stages=2, **four))
    begun = place / "experts-2" / "checkpoints" / "step-00000001"
    other = options | {"plan__capacity": 40, "plan__expert": 2, "checkpoint__resume": begun}
    found.append([one[0], *trained(seqloom_here, place, "experts-other", "--ranks", "2", **other)])
    assert np.allclose(found, [one] * 3, rtol=1e-9, atol=0)
    evaluated = [logged(place / f"experts-{run}", "evaluation_loss")[-1] for run in ("1", "2", "2x2", "other")]
    assert np.allclose(evaluated, evaluated[0], rtol=1e-9, atol=0)


@pytest.mark.slow
def test_a_finished_run_writes_a_model_that_was_lost(seqloom_here, place, two):
    folder = place / "two" / "model"
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    trained(seqloom_here, place, "two", "--ranks", "1", plan__planner="adaptive")
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.slow  # float32 master weights and drawn parameters are tested on smaller worlds too
def test_bfloat16_keeps_float32_parameters_and_parameters_are_drawn_by_seed(seqloom_here, place):
    fresh = place / "fresh"
    fresh.mkdir()
    (fresh / "config.json").write_bytes((place / "llama" / "config.json").read_bytes())
    options = {"model__huggingface": fresh, "model__dtype": "bfloat16", "plan__planner": "static"}
    first = trained(seqloom_here, place, "drawn-a", "--ranks", "2", **options)
    again = trained(seqloom_here, place, "drawn-b", "--ranks", "1", **options)
    assert abs(first[0] - np.log(VOCABULARY)) < 0.1, "small random parameters know nothing"
    assert np.allclose(first, again, rtol=5e-3)
    assert loaded(place / "drawn-a" / "model").dtype == torch.float32


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router noise"),
        ("bert", {}, "logits altered after the head (cls beside decoder and head)"),
    ],
)
def test_a_refused_model_gives_the_reason_before_any_process_starts(seqloom_here, place, model_type, changes, message):
    folder = place / f"refused-{model_type}"
    folder.mkdir()
    config = json.loads((place / "llama" / "config.json").read_text())
    config = {name: config[name] for name in config if name not in ("architectures", "rope_parameters")}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type, **changes}))
    result = seqloom_here(*command(place, "refused", "--ranks", "2", model__huggingface=folder))
    assert result.returncode == 2, result.stderr
    assert message in result.stderr and result.stderr.startswith("seqloom: model.huggingface")
    assert "Traceback" not in result.stderr and "rank " not in result.stderr
    assert not (place / "refused").exists()


def test_parameters_that_are_missing_are_not_drawn_silently(seqloom_here, place):
    folder = place / "partly"
    model = tiny_model("llama-tied")
    state = {name: tensor for name, tensor in model.state_dict().items() if "up_proj" not in name}
    model.save_pretrained(folder, state_dict=state)
    result = seqloom_here(*command(place, "partly-run", "--ranks", "1", model__huggingface=folder))
    assert result.returncode == 2
    assert "2 parameters are missing" in result.stderr and "up_proj" in result.stderr
    assert "cannot be loaded" not in result.stderr
    assert "Traceback" not in result.stderr
