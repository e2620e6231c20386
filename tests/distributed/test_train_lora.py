"""`model.lora` in `seqloom train`: plain peft in one process is the oracle, under every sharding."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from seqloom.data import IGNORE_INDEX, StoreWriter
from seqloom.integrations.lora import ADAPTER
from seqloom.integrations.transformers.loading import HUGGINGFACE
from seqloom.train.config import Config
from seqloom.train.optim import learning_rate
from seqloom.train.setup import RunSetup
from support.runs import logged
from support.tiny_models import VOCABULARY, tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
RECIPE = (Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml").read_text()
STEPS = 4


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with documents whose beginnings the loss leaves out, a tiny model, and a recipe for them."""
    folder = tmp_path_factory.mktemp("lora")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=VOCABULARY) as writer:
        for length in (40, 3, 60, 2, 17, 55, 8, 25, 33, 5):
            writer.add(draw.integers(0, VOCABULARY, length), np.arange(length) >= length // 3)
    tiny_model("llama").save_pretrained(folder / "llama")
    recipe = RECIPE.replace('spec = "models/tiny.toml" ', 'huggingface = "llama"')
    assert recipe != RECIPE
    (folder / "recipe.toml").write_text(recipe)
    return folder


def settings(place, run, **changes):
    """The overrides of a run; a key's dot is written as two underscores."""
    values = {
        "data__source": place / "store",
        "data__validation": place / "store",
        "data__sequences": 5,
        "data__max_length": 64,
        "model__dtype": "float64",
        "model__lora__rank": 3,
        "model__lora__alpha": 12.0,
        "optimiser__lr": 0.05,
        "optimiser__clip": 0.0,
        "plan__capacity": 64,
        "run__steps": STEPS,
        "run__output": place / run,
        "schedule__warmup": 1,
        "evaluation__every": 2,
        "checkpoint__every": 2,
        "checkpoint__keep": 5,
        **changes,
    }
    return [f"{key.replace('__', '.')}={value}" for key, value in values.items()]


def trained(seqloom_here, place, run, *words, **changes):
    """Train, and return the losses."""
    sets = [word for each in settings(place, run, **changes) for word in ("--set", each)]
    result = seqloom_here("train", place / "recipe.toml", *sets, *words, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == STEPS
    return logged(place / run, "loss")


def plain_peft(place, dtype, **changes):
    """Losses and adapters of peft and torch alone, document by document, from the values that a run begins with."""
    from peft import LoraConfig, get_peft_model

    config = Config.load(place / "recipe.toml", settings(place, "plain", model__dtype=dtype, **changes))
    setup, kind = RunSetup.load(config, 1), getattr(torch, dtype)
    started = HUGGINGFACE.build(config, torch.device("cpu"), kind)
    started.materialize()
    first = {name: each.detach().clone() for name, each in started.module.named_parameters() if ADAPTER.search(name)}
    assert all(bool(each.any()) == ("lora_A" in name) for name, each in first.items())
    lora = config.model.lora
    targets = list(lora.targets) or "all-linear"
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(place / "llama", dtype=kind),
        LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"),
    )
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert parameters.keys() == first.keys()
    model.load_state_dict(first, strict=False)
    given = config.optimiser
    optimiser = torch.optim.AdamW(
        parameters.values(), lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=given.weight_decay
    )
    losses = []
    for step in range(1, STEPS + 1):
        batch, total = setup.sampler.next_batch(), torch.zeros((), dtype=kind)
        for document, length in zip(batch.documents.tolist(), batch.lengths.tolist(), strict=True):
            ids, labels = map(torch.from_numpy, setup.source.rows(document, 0, length))
            logits = model(input_ids=ids[None]).logits[0]
            total = total + cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        loss = total / batch.valid_tokens
        optimiser.zero_grad()
        loss.backward()
        rate = learning_rate(step, steps=STEPS, peak=given.lr, schedule=config.schedule)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in parameters.items()}, model


def adapters(folder):
    """The adapters that a run has written, by the names that parameters have in a model."""
    from safetensors.torch import load_file

    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    return {name.replace(".weight", ".default.weight"): value for name, value in stored.items()}


def distance(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in wanted.items())


@pytest.fixture(scope="module")
def two(seqloom_here, place):
    """The losses of a run on two ranks that shard all parameters."""
    return trained(seqloom_here, place, "two", "--ranks", "2", plan__planner="adaptive", plan__capacity=40)


def test_losses_and_adapters_are_those_of_plain_peft(place, two):
    losses, wanted, _ = plain_peft(place, "float64")
    assert losses[-1] < losses[0]
    assert np.allclose(two, losses, rtol=1e-9, atol=0)
    assert distance(adapters(place / "two"), wanted) < 1e-7


def test_in_float32_it_is_as_near_to_float64_as_plain_peft(seqloom_here, place, two):
    options = {"model__lora__targets": "['q_proj', 'down_proj']", "model__dtype": "float32"}
    found = trained(seqloom_here, place, "float32", "--ranks", "2", plan__planner="flex", **options)
    losses, wanted, _ = plain_peft(place, options.pop("model__dtype"), **options)
    truth, exact, _ = plain_peft(place, "float64", **options)
    assert np.allclose(found, losses, rtol=1e-5, atol=0)
    of_plain, of_ours = distance(wanted, exact), distance(adapters(place / "float32"), exact)
    assert of_ours < max(2 * of_plain, 1e-4)
    assert np.allclose(found, truth, rtol=1e-5, atol=0)


SHARDINGS = {
    "hybrid": ("2", {"plan__sharding": "hybrid", "plan__cluster": "1x2xCPU", "plan__planner": "static"}),
    "hybrid nodes": ("4", {"plan__sharding": "hybrid", "plan__cluster": "2x2xCPU", "plan__planner": "flex"}),
    "none": ("3", {"plan__sharding": "none", "plan__planner": "flex", "plan__capacity": 40}),
    "stages": ("2", {"pipeline__stages": 2}),
    "free": ("2", {"plan__sharding": "free", "plan__planner": "static:2"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "none" else [pytest.mark.slow]) for each in SHARDINGS]
)
def test_shardings_change_nothing(seqloom_here, place, two, name):
    ranks, options = SHARDINGS[name]
    found = trained(seqloom_here, place, name, "--ranks", ranks, **options)
    assert np.allclose(found, two, rtol=1e-9, atol=0)
    assert distance(adapters(place / name), adapters(place / "two")) < 1e-7


def test_checkpoints_hold_adapters_alone_and_a_run_resumes_on_other_ranks(seqloom_here, place, two):
    last = place / "two" / "checkpoints" / f"step-{STEPS:08}"
    state = {"model": {name: torch.empty_like(each) for name, each in adapters(place / "two").items()}}
    held = [key for key in dcp.FileSystemReader(last).read_metadata().state_dict_metadata if key.startswith("model.")]
    assert {key.removeprefix("model.") for key in held} == state["model"].keys()
    dcp.load(state, checkpoint_id=last, no_dist=True)
    assert all(torch.equal(value, state["model"][name]) for name, value in adapters(place / "two").items())
    half = place / "two" / "checkpoints" / "step-00000002"
    trained(seqloom_here, place, "resumed", "--ranks", "1", checkpoint__resume=half)
    assert np.allclose(logged(place / "resumed", "loss"), two[2:], rtol=1e-9, atol=0)
    assert distance(adapters(place / "resumed"), adapters(place / "two")) < 1e-7


def test_peft_reads_the_adapters_and_transformers_the_merged_model(place, two):
    from peft import AutoPeftModelForCausalLM, PeftModel

    base = AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float64).eval()
    merged = AutoModelForCausalLM.from_pretrained(place / "two" / "model").eval()
    assert merged.dtype == torch.float64 and merged.config._attn_implementation != "seqloom"
    assert not [name for name, _ in merged.named_parameters() if "lora" in name]
    ids = torch.arange(20)[None] % VOCABULARY
    with torch.no_grad():
        before = base(input_ids=ids).logits
        named = AutoPeftModelForCausalLM.from_pretrained(str(place / "two" / "adapter"), dtype=torch.float64).eval()
        adapted = PeftModel.from_pretrained(base, place / "two" / "adapter").eval()
        found = merged(input_ids=ids).logits
        assert torch.allclose(found, adapted(input_ids=ids).logits, rtol=1e-6, atol=1e-6)
        assert torch.equal(named(input_ids=ids).logits, adapted(input_ids=ids).logits)
        assert not torch.allclose(found, before, rtol=1e-3), "trained"
        new = merged.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert new.shape == (1, 24)
    own, first = (
        dict(merged.named_parameters()),
        dict(AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float64).named_parameters()),
    )
    assert own.keys() == first.keys()
    adapted_names = {name.partition(".lora")[0] for name in adapters(place / "two")}
    for name, value in first.items():
        assert torch.equal(value, own[name]) == (
            f"base_model.model.{name.removesuffix('.weight')}" not in adapted_names
        )


def test_a_checkpoint_is_exported_with_its_adapters(seqloom_here, place, two, tmp_path):
    result = seqloom_here("export", place / "two", "--out", tmp_path / "out", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["adapter"] == str(tmp_path / "out" / "adapter")
    for name, own in (("model", tmp_path / "out"), ("adapter", tmp_path / "out" / "adapter")):
        for file in (place / "two" / name).glob("*.safetensors"):
            assert (own / file.name).read_bytes() == file.read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"


@pytest.mark.slow
def test_dropout_of_adapters_is_the_same_under_any_plan(seqloom_here, place):
    options = {"model__lora__dropout": 0.3}
    one = trained(seqloom_here, place, "drop-1", "--ranks", "1", plan__planner="static", **options)
    three = trained(seqloom_here, place, "drop-3", "--ranks", "3", plan__planner="flex", plan__capacity=40, **options)
    assert np.allclose(one, three, rtol=1e-9, atol=0)


def test_check_predicts_a_run_that_trains_adapters_alone(seqloom_here, place):
    """It says how many parameters are trained; without adapters that is all of them."""
    sets = [word for each in settings(place, "check") for word in ("--set", each)]
    model = tiny_model("llama")
    every = sum(each.numel() for each in model.parameters())
    linear = [each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear) and name != "lm_head"]
    own = sum(3 * (each.in_features + each.out_features) for each in linear)
    found = []
    for words in ([], ["--set", "model.lora="]):
        result = seqloom_here("check", place / "recipe.toml", *sets, *words, "--ranks", "2", "--batches", "1", "--json")
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout)["parameters"])
    assert found == [{"all": every + own, "trained": own}, {"all": every, "trained": every}]


def test_verify_compares_adapters(seqloom_here, place):
    sets = [word for each in settings(place, "verify", model__lora__dropout=0.2) for word in ("--set", each)]
    result = seqloom_here("verify", place / "recipe.toml", *sets, "--ranks", "3", "--planners", "static,flex", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout)["passed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__lora__targets": "['nope']"}, "model.lora.targets = ['nope']: Target modules"),
        ({"model__lora__targets": "['embed_tokens']"}, "would be trained, which is no adapter of a linear layer"),
        ({"model__lora__rank": 0}, "model.lora.rank = 0"),
        ({"model__lora__ranks": 4}, "unknown key 'model.lora.ranks'; did you mean 'rank'?"),
        ({"model__lora__targets": "['lm_head']"}, "is refused"),
        ({"model__huggingface": "", "model__spec": "llama3-8b"}, "model.lora with model.spec"),
        ({"model__dtype": "bfloat16", "model__float8": "true"}, "model.lora with model.float8 = true"),
    ],
)
def test_refused_before_any_process_starts(seqloom_here, place, changes, message):
    sets = [word for each in settings(place, "refused", **changes) for word in ("--set", each)]
    result = seqloom_here("train", place / "recipe.toml", *sets, "--ranks", "2")
    assert result.returncode == 2, result.stderr
    assert (
        message in result.stderr
        and "Traceback" not in result.stderr
        and "rank " not in result.stderr.partition(message)[0]
    )
    assert not (place / "refused").exists()
