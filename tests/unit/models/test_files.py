"""The reference model as files: read back by Seqloom, and by transformers where it has such a model."""

import json
from dataclasses import replace

import pytest
import torch

from seqloom.describe import ModelSpec
from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.models import Llama3Scaling, Rope, Transformer, TransformerOptions
from seqloom.models.files import load_options, model_config, parameter_reader, write_model

torch.set_num_threads(1)
LENGTHS = [9, 1, 30]
STRETCHED = TransformerOptions(rope=Rope(500_000.0, Llama3Scaling(context=16)), eps=1e-5)


class Wide:
    """torch, in which the dtype that transformers computes norms and angles in is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def written(folder, model: Transformer) -> None:
    write_model(folder, model, {name: p.detach() for name, p in model.named_parameters()}, context=64)


@torch.no_grad()
def logits(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    context = bind_single_rank(LENGTHS)
    return model(ids, context.positions, context)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", TransformerOptions()),
        ("Llama", STRETCHED),
        ("Qwen2", TransformerOptions(qkv_bias=True)),
        ("Qwen3", TransformerOptions(qk_norm=True)),
    ],
)
def test_transformers_computes_the_same(kit, tmp_path, monkeypatch, family, options, tied):
    hf = pytest.importorskip("transformers")
    model = kit.lively(kit.tiny(tied=tied), options)
    written(tmp_path, model)
    kind = getattr(hf, f"{family}ForCausalLM")
    theirs, report = kind.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert theirs.dtype == torch.float64 and (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = kit.documents(LENGTHS)
    found = logits(model, torch.cat(ids))
    with torch.no_grad():
        rounded = torch.cat([theirs(each[None]).logits[0] for each in ids])
        monkeypatch.setattr(f"transformers.models.{family.lower()}.modeling_{family.lower()}.torch", Wide())
        monkeypatch.setattr("transformers.modeling_rope_utils.torch", Wide())
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        theirs.model.rotary_emb.__init__(theirs.config)
        exact = torch.cat([theirs(each[None]).logits[0] for each in ids])
    assert float((found - exact).norm() / exact.norm()) < 1e-10
    assert float((found - rounded).norm() / rounded.norm()) < 1e-5, "as transformers rounds"


@pytest.mark.parametrize(
    "options", [TransformerOptions(), STRETCHED, TransformerOptions(qk_norm=True), TransformerOptions(qkv_bias=True)]
)
def test_spec_and_details_come_back(kit, options):
    spec = kit.tiny()
    config = json.loads(json.dumps(model_config(spec, options)))
    assert TransformerOptions.from_config(config) == options


@pytest.mark.parametrize("windows", [(None, None), (5, 5), (5, None)])
def test_seqloom_reads_it_back(kit, tmp_path, windows):
    model = kit.lively(kit.tiny(windows=windows), None if any(windows) else STRETCHED)
    written(tmp_path, model)
    config = tmp_path / "config.json"
    spec = ModelSpec.load(str(config))
    assert replace(spec, name=model.spec.name) == model.spec
    assert ("model_type" in json.loads(config.read_text())) == (not any(windows)), "transformers has no such model"
    again = Transformer(spec, load_options(str(config)), seed=9, dtype=torch.float64)
    assert load_options(str(tmp_path)) == load_options(str(config)) == model.options
    read = parameter_reader(again, tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, parameter in again.named_parameters():
            assert torch.equal(read(name, slice(1, 3)), read(name, slice(None))[1:3])
            parameter.copy_(read(name, slice(None)))
    ids = torch.cat(kit.documents(LENGTHS))
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_what_no_config_can_say_is_refused(kit):
    for spec, options in (
        (kit.tiny(windows=(5, None)), STRETCHED),
        (kit.tiny(), TransformerOptions(qk_norm=True, qkv_bias=True)),
    ):
        with pytest.raises(SeqloomError, match="no config says all of this"):
            model_config(spec, options)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ffn": 48}, r"6 differ, model.layers.0.mlp.gate_proj.weight is \[40, 24\] there and \[48, 24\]"),
        ({"layers": 3}, "9 differ, model.layers.2.input_layernorm.weight is none there"),
        ({"layers": 1}, "9 differ, model.layers.1.input_layernorm.weight is .* and none in the model"),
        ({"tied": False}, "1 differ, lm_head.weight is none there"),
    ],
)
def test_parameters_of_another_model_are_refused(kit, tmp_path, changes, words, device):
    written(tmp_path, kit.lively(kit.tiny(tied=True)))
    other = Transformer(kit.tiny(**{"tied": True, **changes}), device=device)
    with pytest.raises(SeqloomError, match=words):
        parameter_reader(other, tmp_path / "model.safetensors")


def test_a_file_that_is_none_is_refused(kit, tmp_path):
    (tmp_path / "torn.safetensors").write_bytes(b"{}")
    for name in ("torn.safetensors", "nothing.safetensors"):
        with pytest.raises(SeqloomError, match=f"{name} cannot be read"):
            parameter_reader(Transformer(kit.tiny()), tmp_path / name)
