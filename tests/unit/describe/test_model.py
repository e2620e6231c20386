"""Presets have the parameter counts that their authors publish."""

from __future__ import annotations

import json

import pytest

from seqloom.describe import MODELS, ModelSpec
from seqloom.errors import SeqloomError

TOTALS = {
    "llama-3b": 3.43,
    "llama-7b": 6.74,
    "llama-13b": 13.02,
    "llama-30b": 32.53,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.544,
    "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "minicpm3-4b": 4.07,
    "deepseek-v2-lite": 15.71,
}
"""Billions of parameters."""

FLEXSP = {
    "gpt-7b": (6.51, 7.117, 7.850),
    "gpt-13b": (12.357, 13.116, 14.032),
    "gpt-30b": (30.538, 31.525, 32.715),
}
"""As FlexSP publishes them: in units of 2^30, at contexts of 32,768, 192,000 and 384,000 tokens."""


def spec(**changes):
    fields = {"name": "m", "layers": 4, "hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 128}
    return ModelSpec(**(fields | {"gated": True, "vocabulary": 100, "tied": True} | changes))


MIXERS = {"mixer_layers": (0, 2), "mixer_parameters": 40, "mixer_values": 16, "mixer_exchange": 10}


def test_mixers_stand_beside_attention_or_in_its_place():
    plain, beside, instead = spec(), spec(**MIXERS), spec(**MIXERS, windows=(0, None, 0, None))
    assert beside.parameters() == plain.parameters() + 80
    assert instead.parameters() == beside.parameters() - 2 * plain.attention_parameters(0)
    assert sum(instead.layer_parameters(layer) for layer in range(4)) == instead.parameters() - 100 * 64 - 64
    assert instead.attention_layers == 2 and instead.tensor_degrees == (1,)
    with pytest.raises(SeqloomError, match="tensor degree 2; mixers are not cut; use 1"):
        beside.check_tensor(2)


def test_layers_may_have_other_heads():
    """Wider ones, and fewer for keys, in every second layer."""
    plain, other = spec(), spec(head_shapes=((2, 8), (1, 16)) * 2)
    wide = spec(kv_heads=1, head_dim=16)
    assert other.parameters() == (plain.parameters() + wide.parameters()) / 2
    assert sum(other.layer_parameters(layer) for layer in range(4)) == other.parameters() - 100 * 64 - 64
    assert plain.tensor_degrees == (1, 2) and other.tensor_degrees == (1,)


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        (((2, 8),), "one entry for each of 4 layers"),
        (((3, 8),) * 4, "divide the 8 query"),
        (((2, 0),) * 4, "at least 1"),
    ],
)
def test_heads_of_layers_that_cannot_be_are_refused(shapes, rule):
    with pytest.raises(SeqloomError, match=f"head_shapes = .*{rule}"):
        spec(head_shapes=shapes)


LATENTS = {"kv_heads": 8, "latent": 5, "rotated": 3, "value_dim": 6}


def test_latents_have_projections_of_their_own():
    plain, latent = spec(kv_heads=8), spec(**LATENTS)
    down, up, out = 64 * (5 + 3), 5 * 8 * (5 + 6), 8 * 6 * 64
    assert latent.attention_parameters(0) == 64 * 8 * 8 + down + up + out and latent.expansion_parameters == up
    assert spec(**LATENTS, query_latent=4).attention_parameters(0) == 64 * 4 + 4 * 64 + down + up + out
    assert plain.parameters() - latent.parameters() == 4 * (
        plain.attention_parameters(0) - latent.attention_parameters(0)
    )
    assert latent.latent_values == 8 and plain.latent_values == plain.expansion_parameters == 0
    with pytest.raises(SeqloomError, match="tensor degree 2; latents are not cut; use 1"):
        latent.check_tensor(2)


@pytest.mark.parametrize("name", TOTALS)
def test_totals(name):
    assert MODELS[name].parameters(8192) == pytest.approx(TOTALS[name] * 1e9, rel=0.01)


@pytest.mark.parametrize("name", FLEXSP)
def test_flexsp_totals_grow_with_the_context(name):
    model = ModelSpec.load(name)
    for context, published in zip((32_768, 192_000, 384_000), FLEXSP[name], strict=True):
        assert model.parameters(context) == pytest.approx(published * 2**30, rel=0.001)
    assert model.heads == 64 and model.head_dim * 64 == model.hidden


def test_every_preset_is_named():
    assert set(MODELS) == set(TOTALS) | set(FLEXSP)
    for name, model in MODELS.items():
        assert model.name == name and len(model.windows) == model.layers


def test_experts():
    model = ModelSpec.load("qwen3-30b-a3b")
    assert model.active_parameters == pytest.approx(3.35e9, rel=0.01)
    assert model.moe_layers == tuple(range(48))
    mixed = spec(experts=4, active_experts=2, expert_ffn=32, shared_ffn=16, moe_layers=(1, 3))
    attention = 2 * 64 * 8 * (8 + 2)
    assert mixed.layer_parameters(0) == attention + 3 * 64 * 128 + 2 * 64
    assert mixed.layer_parameters(1) == attention + 3 * 64 * (4 * 32 + 16) + 64 * 4 + 2 * 64
    layers = sum(mixed.layer_parameters(layer) for layer in range(4))
    assert mixed.parameters() == layers + 100 * 64 + 64


def test_matmul_parameters_leave_out_the_look_up():
    dense = spec()
    assert dense.matmul_parameters == 4 * (2 * 64 * 8 * 10 + 3 * 64 * 128) + 100 * 64
    assert spec(tied=False).matmul_parameters == dense.matmul_parameters
    assert spec(tied=False).parameters() == dense.parameters() + 100 * 64


def test_windows():
    assert spec().windows == (None,) * 4
    assert spec(windows=(16, 16, 16, None)).windows[0] == 16


def test_attention_chunks():
    assert spec().masks == ((None, None),) * 4
    chunked = spec(windows=(None, 4, None, 4), attention_chunks=(8, 8, None, None))
    assert chunked.masks == ((None, 8), (4, 8), (None, None), (4, None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers = 0; it must be at least 1"),
        ({"causal": False, "windows": (4, None, None, None)}, "windows = .*; it holds None alone where causal = False"),
        ({"attention_chunks": (8,)}, "attention_chunks = .8,.; it is empty, or holds None .* for all 4 layers"),
        ({"attention_chunks": (8, 0, 8, 8)}, "attention_chunks = .* at least 1 token"),
        ({"kv_heads": 3}, "kv_heads = 3; it must divide the 8 query heads"),
        ({"ffn": 0}, "ffn = 0"),
        ({"windows": (1, 2)}, "needs one entry for each of 4 layers"),
        ({"windows": (-1, 1, 1, 1)}, "None or 0 tokens or more"),
        ({"windows": (0, 1, 1, 1)}, "0 only beside mixers"),
        ({"windows": (0,) * 4, **MIXERS}, "needs a layer with attention"),
        ({**MIXERS, "mixer_layers": (1, 0)}, "rises within 0 to 3"),
        ({**MIXERS, "mixer_layers": (4,)}, "rises within 0 to 3"),
        ({**MIXERS, "mixer_values": 0}, "mixer_values = 0; it must be at least 1"),
        ({**MIXERS, "mixer_exchange": 17}, "mixer_exchange = 17; it must be 0 to 16"),
        ({"mixer_halo": 3}, "mixer_halo = 3; it must be 0 or more, and is 0 without `mixer_layers`"),
        ({**MIXERS, "mixer_flops": -1}, "mixer_flops = -1; it must be 0 or more"),
        ({**MIXERS, "mixer_layers": ()}, "mixer_parameters = 40; it must be at least 1 with `mixer_layers`"),
        ({"rotated": 2}, "rotated = 2; it needs latent attention: set `latent`"),
        ({**LATENTS, "kv_heads": 2}, "kv_heads = 2; it must be 8 with `latent`"),
        ({**LATENTS, "rotated": 8}, "rotated = 8; it must be 0 to 7"),
        ({**LATENTS, "value_dim": 9}, "value_dim = 9; it must be 1 to 8 with `latent`"),
        ({**LATENTS, "latent": -1}, "latent = -1; it must be at least 1"),
        ({"active_experts": 2}, "active_experts = 2; it needs experts"),
        ({"experts": 4, "active_experts": 5, "expert_ffn": 3}, "must be 1 to 4"),
        ({"experts": 4, "active_experts": 2}, "expert_ffn = 0"),
        ({"experts": 4, "active_experts": 2, "expert_ffn": 3, "moe_layers": (4,)}, "rises within 0 to 3"),
        ({"experts": 4, "active_experts": 2, "expert_ffn": 3, "moe_layers": (2, 1)}, "rises within 0 to 3"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(SeqloomError, match=message):
        spec(**changes)


def test_own_file(tmp_path):
    path = tmp_path / "mine.json"
    fields = {name: getattr(spec(), name) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")}
    fields |= {"gated": True, "vocabulary": 100, "tied": True, "windows": [8, None, 8, None]}
    path.write_text(json.dumps(fields))
    assert ModelSpec.load(str(path)) == spec(name="mine", windows=(8, None, 8, None))
    path.write_text(json.dumps(fields | {"head": 8}))
    with pytest.raises(SeqloomError, match="unknown key 'head'; did you mean 'heads'"):
        ModelSpec.load(str(path))


def test_unknown_names_offer_the_nearest():
    with pytest.raises(SeqloomError, match=r"unknown model 'lama3-8b'; did you mean .*llama3-8b.*config\.json"):
        ModelSpec.load("lama3-8b")
    with pytest.raises(SeqloomError, match="does not exist"):
        ModelSpec.load("nowhere.json")
