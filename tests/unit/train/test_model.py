"""Models of a run: built without values, which come when they are asked for, and are those of the files."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import loading
from seqloom.integrations.transformers.loading import build_huggingface
from seqloom.train.config import Config
from seqloom.train.model import build_reference
from support.tiny_models import SIZES, tiny_model

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml"
CPU = torch.device("cpu")
NEVER = "transformers has loaded all parameters at once"


@pytest.fixture
def config(tmp_path):
    """A run of the Hugging Face model in a folder."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.read_text().replace('spec = "models/tiny.toml" ', 'huggingface = "."'))
    return lambda: Config.load(path)


def hidden(adapter):
    """The hidden states of two documents."""
    with torch.no_grad():
        return adapter.hidden(torch.arange(9) % 32, bind_single_rank([5, 4]))


def test_the_reference_model_has_values_when_they_are_asked_for():
    adapter = build_reference(Config.load(RECIPE), CPU, torch.float64)
    assert all(each.is_meta for each in adapter.module.parameters())
    named = dict(adapter.module.named_parameters())
    adapter.materialize([("model.norm.weight", named["model.norm.weight"])])
    assert [name for name, each in named.items() if not each.is_meta] == ["model.norm.weight"]
    adapter.materialize()
    assert all(adapter.module.get_parameter(name) is each and not each.is_meta for name, each in named.items())
    again = build_reference(Config.load(RECIPE), CPU, torch.float64)
    again.materialize()
    assert torch.equal(hidden(adapter), hidden(again)) and hidden(adapter).abs().sum() > 0


@pytest.mark.parametrize("kind", ["qwen3", "llama", "granite"])
@pytest.mark.parametrize("shard", ["1KB", "5GB"])
def test_parameters_of_a_folder_are_read_one_by_one(tmp_path, config, monkeypatch, kind, shard):
    """Out of one file or several; what the model has beside them is what transformers would give it."""
    theirs = tiny_model(kind)
    theirs.generation_config.top_k = 7
    theirs.generation_config.do_sample = True
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len([*tmp_path.glob("*.safetensors")]) > 1) == (shard == "1KB")
    monkeypatch.setattr(loading, "_load_all", lambda *_: pytest.fail(NEVER))
    adapter = build_huggingface(config(), CPU, torch.float64)
    assert all(each.is_meta for each in adapter.module.parameters())
    assert not any(each.is_meta for each in adapter.module.buffers())
    adapter.materialize()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).to(torch.float64)
    wanted = whole.state_dict()
    assert wanted.keys() == adapter.module.state_dict().keys()
    assert all(torch.equal(each, wanted[name]) for name, each in adapter.module.state_dict().items())
    buffers = dict(adapter.module.named_buffers())
    assert all(torch.equal(each, buffers[name]) for name, each in whole.named_buffers())
    assert adapter.module.generation_config.top_k == 7


def test_what_transformers_converts_it_loads_itself(tmp_path, config):
    """Experts are stored one by one and kept together."""
    theirs = tiny_model("mixtral")
    theirs.save_pretrained(tmp_path)
    adapter = build_huggingface(config(), CPU, torch.float64)
    assert all(each.is_meta for each in adapter.module.parameters())
    adapter.materialize()
    found = dict(adapter.module.named_parameters())
    assert all(torch.equal(each, found[name]) for name, each in theirs.named_parameters())


def test_a_folder_that_lacks_parameters_is_refused(tmp_path, config):
    tiny_model("qwen3").save_pretrained(tmp_path, max_shard_size="1KB")
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    file = places["model.norm.weight"]
    lost = [name for name, place in places.items() if place == file]
    (tmp_path / file).unlink()
    with pytest.raises(SeqloomError, match=r"huggingface = .* cannot be loaded"):
        build_huggingface(config(), CPU, torch.float64)
    kept = {name: place for name, place in places.items() if place != file}
    index.write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    with pytest.raises(SeqloomError, match=f"{len(lost)} parameters are missing .* {min(lost)} among them"):
        build_huggingface(config(), CPU, torch.float64)


def add_tensors(folder: Path, *names: str) -> None:
    held = load_file(folder / "model.safetensors")
    save_file(held | {name: torch.ones(2) for name in names}, folder / "model.safetensors", {"format": "pt"})


def test_the_parameters_of_another_model_are_refused(tmp_path, config):
    """Qwen 2 has biases, and Llama no place for them."""
    tiny_model("qwen2").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    renamed = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content | renamed))
    message = r"6 tensors of its safetensors have no place in the model .* model.layers.0.self_attn.k_proj.bias among"
    with pytest.raises(SeqloomError, match=message):
        build_huggingface(config(), CPU, torch.float64)


@pytest.mark.parametrize(("renamed", "refused"), [("llama", True), ("ernie4_5", False)])
def test_a_type_that_is_not_of_the_class_is_refused(tmp_path, config, renamed, refused):
    """Llama has a place for all tensors of Ernie 4.5, and computes another rotary embedding."""
    model = hf.Ernie4_5ForCausalLM(hf.Ernie4_5Config(**SIZES))
    model.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"model_type": renamed}))
    said = r"model_type 'llama' and architectures Ernie4_5ForCausalLM, which is of model_type 'ernie4_5'"
    with pytest.raises(SeqloomError, match=said) if refused else nullcontext():
        build_huggingface(config(), CPU, torch.float64)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_tensor_too_many_is_refused_however_parameters_are_read(tmp_path, config, kind):
    tiny_model(kind).save_pretrained(tmp_path)
    add_tensors(tmp_path, "model.layers.1.extra.weight")
    with pytest.raises(SeqloomError, match=r"1 tensors .* model.layers.1.extra.weight among them"):
        build_huggingface(config(), CPU, torch.float64)


def test_what_models_compute_anew_may_lie_in_old_files(tmp_path, config, monkeypatch):
    tiny_model("llama-tied").save_pretrained(tmp_path)
    add_tensors(tmp_path, "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight")
    monkeypatch.setattr(loading, "_load_all", lambda *_: pytest.fail(NEVER))
    build_huggingface(config(), CPU, torch.float64)
