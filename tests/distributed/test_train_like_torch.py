"""Frozen parameters and every optimiser in `seqloom train`: plain torch in one process is the oracle, on any ranks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from seqloom.data import IGNORE_INDEX, StoreWriter
from seqloom.train.config import Config
from seqloom.train.model import matches_name
from seqloom.train.optim import learning_rate, make_optimiser
from seqloom.train.setup import RunSetup
from support.runs import logged
from support.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.distributed
RECIPE = (Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml").read_text()
STEPS = 4
FROZEN = {"model__freeze": "['embed_tokens', 'layers.0', 'layers.*.mlp.up_proj', 'norm']"}
KINDS = {
    "frozen": FROZEN,
    "muon": {"optimiser__name": "muon", "optimiser__weight_decay": 0.5},
    "frozen muon": {**FROZEN, "optimiser__name": "muon", "optimiser__momentum": 0.8},
    "adamw8bit": {"optimiser__name": "adamw8bit"},
    "sgd": {"optimiser__name": "sgd", "optimiser__momentum": 0.9, "optimiser__lr": 0.1},
    "plain sgd": {"optimiser__name": "sgd", "optimiser__lr": 0.1},
}
LAYOUTS = {
    "full": ("2", {"plan__planner": "adaptive", "plan__capacity": 40}),
    "hybrid": ("4", {"plan__sharding": "hybrid", "plan__cluster": "2x2xCPU", "plan__planner": "flex"}),
    "none": ("3", {"plan__sharding": "none", "plan__planner": "flex", "plan__capacity": 40}),
    "stages": ("2", {"pipeline__stages": 2}),
    "pieces": ("2", {"pipeline__stages": 2, "pipeline__schedule": "seq1f1b"}),
    "free": ("3", {"plan__sharding": "free", "plan__planner": "static:3"}),
    "tensor": ("4", {"plan__tensor": 2, "plan__planner": "static"}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with documents whose beginnings the loss leaves out, a tiny model, and a recipe for them."""
    folder = tmp_path_factory.mktemp("like-torch")
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
        "data__validation": "",
        "data__sequences": 5,
        "data__max_length": 64,
        "model__dtype": "float64",
        "optimiser__lr": 0.02,
        "optimiser__clip": 0.0,
        "plan__capacity": 64,
        "run__steps": STEPS,
        "run__output": place / run,
        "schedule__warmup": 1,
        "evaluation__every": 0,
        "checkpoint__every": 2,
        "checkpoint__keep": 5,
        **changes,
    }
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def trained(seqloom_here, place, run, *words, **changes):
    """Train; return the losses and the trained model's parameters."""
    result = seqloom_here("train", place / "recipe.toml", *settings(place, run, **changes), *words, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == STEPS
    return logged(place / run, "loss"), load_file(place / run / "model" / "model.safetensors")


def plain_torch(place, **changes):
    """Losses and parameters of transformers and torch alone, document by document."""
    config = Config.load(place / "recipe.toml", settings(place, "plain", **changes)[1::2])
    setup, given = RunSetup.load(config, 1), config.optimiser
    model = AutoModelForCausalLM.from_pretrained(place / "llama", dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(matches_name(each, name) for each in config.model.freeze))
    optimisers = torch_optimisers(model, given)
    losses = []
    for step in range(1, STEPS + 1):
        batch, total = setup.sampler.next_batch(), torch.zeros((), dtype=torch.float64)
        for document, length in zip(batch.documents.tolist(), batch.lengths.tolist(), strict=True):
            ids, labels = map(torch.from_numpy, setup.source.rows(document, 0, length))
            logits = model(input_ids=ids[None]).logits[0]
            total = total + cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        loss = total / batch.valid_tokens
        model.zero_grad()
        loss.backward()
        rate = learning_rate(step, steps=STEPS, peak=given.lr, schedule=config.schedule)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in model.named_parameters()}


def torch_optimisers(model, given):
    """torch's own optimisers of a model, as a config names them."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    hidden = [each for name, each in named if given.name == "muon" and ".layers." in name and each.ndim == 2]
    matrices = [each for _, each in named if each.ndim == 2 and not any(each is other for other in hidden)]
    vectors = [each for _, each in named if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": given.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if given.name == "sgd":
        return [torch.optim.SGD(groups, lr=given.lr, momentum=given.momentum or 0.0)]
    if given.name == "adamw8bit":  # whose formula is tested by itself: tests/unit/train/test_optim.py
        return [make_optimiser(dict(named), given)]
    own = [torch.optim.AdamW(groups, lr=given.lr, betas=given.betas, eps=given.eps)] if groups else []
    if hidden:
        options = {"weight_decay": given.weight_decay, "momentum": given.momentum or 0.95}
        own.append(torch.optim.Muon(hidden, lr=given.lr, adjust_lr_fn="match_rms_adamw", **options))
    return own


def distance(found, wanted):
    return max(float((found[name] - each).norm() / each.norm()) for name, each in wanted.items() if name in found)


QUICK = {("frozen muon", "stages")}
CASES = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in QUICK else [pytest.mark.slow])
    for kind in KINDS
    for layout in LAYOUTS
    if (layout == "full" or "sgd" not in kind) and (kind, layout) != ("adamw8bit", "tensor")
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_losses_and_parameters_are_those_of_plain_torch(seqloom_here, place, kind, layout):
    ranks, options = LAYOUTS[layout]
    found, state = trained(seqloom_here, place, f"{kind}-{layout}", "--ranks", ranks, **{**options, **KINDS[kind]})
    losses, wanted = plain_torch(place, **KINDS[kind])
    assert len({f"{loss:.4f}" for loss in losses}) == STEPS
    assert np.allclose(found, losses, rtol=1e-9, atol=0)
    assert state.keys() >= wanted.keys() - {"lm_head.weight"} and distance(state, wanted) < 1e-7


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen muon", "adamw8bit", "sgd"])
def test_checkpoints_hold_what_is_trained_and_a_run_resumes_on_other_ranks(seqloom_here, place, kind):
    whole, state = trained(seqloom_here, place, f"{kind}-whole", "--ranks", "2", **KINDS[kind])
    half = place / f"{kind}-whole" / "checkpoints" / "step-00000002"
    manifest = json.loads((half / "seqloom.json").read_text())
    assert any("embed_tokens" in name for name in manifest["model"]) == ("frozen" not in kind)
    assert manifest["optimiser"].keys() == manifest["model"].keys() or len(manifest["optimiser"]) > 0
    again, resumed = trained(
        seqloom_here, place, f"{kind}-resumed", "--ranks", "1", checkpoint__resume=half, **KINDS[kind]
    )
    assert np.allclose(again, whole[2:], rtol=1e-9, atol=0) and distance(resumed, state) < 1e-7
    exported = seqloom_here("export", place / f"{kind}-whole", "--out", place / f"{kind}-exported")
    assert exported.returncode == 0, exported.stderr
    own = load_file(place / f"{kind}-exported" / "model.safetensors")
    assert own.keys() == state.keys() and all(value.equal(state[name]) for name, value in own.items())


def test_check_says_how_many_parameters_are_trained(seqloom_here, place):
    words = settings(place, "check", **FROZEN)
    result = seqloom_here("check", place / "recipe.toml", *words, "--ranks", "2", "--batches", "1", "--json")
    assert result.returncode == 0, result.stderr
    model = tiny_model("llama")
    sizes = [(each.numel(), "layers.1" in name and "up_proj" not in name) for name, each in model.named_parameters()]
    head = 0 if model.config.tie_word_embeddings else model.lm_head.weight.numel()
    trained = sum(size for size, learns in sizes if learns) + head
    assert json.loads(result.stdout)["parameters"] == {"all": sum(size for size, _ in sizes), "trained": trained}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__freeze": "['embed', 'embd']"}, "model.freeze: 'embed' is the name of no parameter; give parts"),
        ({"model__freeze": "['*']"}, "leaves no parameter to be trained; name fewer"),
        ({"model__freeze": "['norm']", "model__lora__rank": 2}, "model.freeze = ['norm'] with model.lora"),
        ({"optimiser__name": "mun"}, "optimiser.name = 'mun'"),
        ({"optimiser__momentum": 0.5}, "optimiser.momentum = 0.5 with optimiser.name = 'adamw'"),
        ({"optimiser__name": "sgd", "optimiser__betas": "[0.5, 0.5]"}, "optimiser.betas = (0.5, 0.5) with"),
        ({"optimiser__name": "adamw8bit", "plan__tensor": 2}, "set tensor to 1, or name to 'adamw'"),
        ({"optimiser__name": "muon", "optimiser__offload": "true"}, "AdamW alone is updated in host memory"),
    ],
)
def test_refused_before_any_process_starts(seqloom_here, place, changes, message):
    words = settings(place, "refused", **changes)
    result = seqloom_here("train", place / "recipe.toml", *words, "--ranks", "2")
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr, result.stderr
