"""The language model inside a model of images and text: alone it computes of text what the whole model does."""

from pathlib import Path

import pytest
import torch
import transformers as hf

from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.describe import IMAGE_TEXT_TYPES, describe_folder
from seqloom.integrations.transformers.loading import build_huggingface, save_huggingface
from seqloom.train.config import Config
from support.tiny_models import SIZES, randomised

torch.set_num_threads(1)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
QWEN = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_value_head_dim": 4},
    **{
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
PER_LAYER = {**WINDOWED, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 0}
OF_TEXT = {
    "gemma4": {**PER_LAYER, "global_head_dim": 12},
    "gemma4_unified": {**PER_LAYER, "global_head_dim": 12},
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), QWEN),
}
"""What the language models of some types have beside."""
QWEN_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16}
ROUNDED = {"qwen3_5": 1e-5, "qwen3_5_moe": 1e-5}
"""Types whose scans round to float32 in the whole model, and not alone: largest difference of logits."""


def whole_model(kind):
    """A tiny model of images and text."""
    usual = hf.AutoConfig.for_model(kind)
    text = {**SIZES, **TOKENS, "head_dim": 8, "model_type": usual.text_config.model_type, **OF_TEXT.get(kind, {})}
    vision = usual.vision_config or usual.sub_configs["vision_config"]()
    sizes = {**VISION, "image_size": 28, "patch_size": 14, "model_type": vision.model_type}
    if kind in ROUNDED:
        sizes |= QWEN_VISION
    config = type(usual)(text_config=text, vision_config=sizes, image_token_index=60, image_token_id=60)
    model = randomised(hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float64), 0).double().eval()
    return with_plain_experts(model)


def with_plain_experts(model):
    """Grouped products have no float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def config_of(folder, output="run"):
    recipe = Path(__file__).parents[3] / "recipes" / "qwen3-8xh200.toml"
    return Config.load(recipe, [f"model.huggingface={folder}", f"run.output={folder / output}", "data.source=toy:4"])


def built(folder):
    """The adapter of the language model of a folder, with its parameters."""
    adapter = build_huggingface(config_of(folder), torch.device("cpu"), torch.float64)
    for name, parameter in list(adapter.module.named_parameters()):
        adapter.deferred.materialize(name, parameter)
    with_plain_experts(adapter.module)
    return adapter


ELSEWHERE = {"gemma3n"}  # towers need more libraries; docs/huggingface_matrix.py tries it without
QUICK = ("gemma3", "llama4", "qwen3_5")  # with windows, attention chunks, scans; the others in the longer set


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "kind",
    [
        each if each in QUICK else pytest.param(each, marks=pytest.mark.slow)
        for each in IMAGE_TEXT_TYPES
        if each not in ELSEWHERE
    ],
)
def test_logits_of_text_are_those_of_the_whole_model(tmp_path, kind):
    model = whole_model(kind)
    model.save_pretrained(tmp_path / "model")
    adapter, ids = built(tmp_path / "model"), torch.randint(3, 50, (12,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = adapter.hidden(ids, bind_single_rank((12,)))
        found, _ = adapter.logits.apply(hidden @ adapter.head.weight.T, needs_slope=False)
        wanted = model(input_ids=ids[None]).logits[0]
    tolerance = ROUNDED.get(kind, 1e-9)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    spec = describe_folder(tmp_path / "model")
    assert (spec.layers, spec.hidden, spec.vocabulary) == (2, 16, 64)


def test_the_trained_language_model_is_a_causal_model_of_its_own(tmp_path):
    whole_model("gemma3").save_pretrained(tmp_path / "model")
    adapter, config = built(tmp_path / "model"), config_of(tmp_path / "model")
    state = {name: each.detach() for name, each in adapter.module.named_parameters()}
    save_huggingface(config, adapter.module, state, tmp_path / "trained", tmp_path / "adapter")
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert type(saved).__name__ == "Gemma3ForCausalLM"
    assert all(torch.equal(each, state[name]) for name, each in saved.named_parameters())


def test_a_language_model_that_is_not_all_there_is_refused(tmp_path):
    model = whole_model("llava")
    state = model.state_dict()
    del state["model.language_model.layers.1.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path / "model", state_dict=state)
    with pytest.raises(SeqloomError, match="parameters of its language model are not in its safetensors"):
        built(tmp_path / "model")
    state = model.state_dict() | {"model.language_model.layers.0.mlp.extra.weight": torch.zeros(3)}
    model.save_pretrained(tmp_path / "more", state_dict=state)
    with pytest.raises(SeqloomError, match="1 tensors of its safetensors have no place in the model"):
        built(tmp_path / "more")


def test_a_tensor_without_a_place_is_refused_also_where_transformers_renames(tmp_path):
    model = whole_model("qwen3_5")
    state = model.state_dict() | {"model.language_model.layers.0.mlp.extra.weight": torch.zeros(3)}
    model.save_pretrained(tmp_path / "model", state_dict=state)
    with pytest.raises(SeqloomError, match=r"1 tensors of its safetensors have no place .*mlp\.extra\.weight"):
        built(tmp_path / "model")


def test_tensors_of_images_beside_the_config_of_a_causal_model_are_refused(tmp_path):
    model = whole_model("llava")
    model.save_pretrained(tmp_path / "model")
    model.config.text_config.save_pretrained(tmp_path / "model")
    with pytest.raises(SeqloomError, match=r"have no place in the model|are missing in its safetensors"):
        built(tmp_path / "model")


def test_a_type_that_computes_something_else_is_refused(tmp_path):
    whole_model("aya_vision").save_pretrained(tmp_path / "model")
    with pytest.raises(SeqloomError):
        built(tmp_path / "model")
