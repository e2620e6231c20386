"""Adapters of `model.lora`: what is drawn, and that merging is peft's."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from seqloom.integrations.lora import adapter_reader, add_adapters, merge_adapters, plain_name
from support.tiny_models import VOCABULARY, randomised, tiny_model


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
    return randomised(GPT2LMHeadModel(GPT2Config(**sizes)), 0).double()


@pytest.mark.parametrize("build", [lambda: tiny_model("llama"), lambda: tiny_model("llama-tied"), gpt2])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_merged_weights_are_those_of_peft(build, recwarn):
    model = get_peft_model(build(), LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", task_type="CAUSAL_LM"))
    randomised(model, 1)
    state = {name: each.detach().clone() for name, each in model.named_parameters()}
    merged = merge_adapters(model, state)
    plain = model.merge_and_unload()
    assert merged.keys() == dict(plain.named_parameters()).keys()
    for name, each in plain.named_parameters():
        assert torch.allclose(merged[name], each, rtol=1e-12, atol=1e-14), name


def test_adapters_are_drawn_by_name_as_peft_draws_them(tmp_path):
    settings = SimpleNamespace(rank=3, alpha=5.0, dropout=0.0, targets=("q_proj",))
    model = tiny_model("llama").to("meta")
    names = {name for name, _ in model.named_parameters()}
    wrapped = add_adapters(model, settings, tmp_path)
    asked = []

    def read_base(name, rows):
        asked.append(name)
        return torch.zeros(1)

    read = adapter_reader(wrapped, read_base, 7)
    values = {name: read(name, slice(None)) for name, _ in wrapped.named_parameters()}
    assert all(each.is_meta and each.dtype == torch.float64 for _, each in wrapped.named_parameters())
    assert {*asked} == names == {plain_name(name) for name in values if "lora" not in name}
    first = [value for name, value in values.items() if "lora_A" in name]
    assert len(first) == 2 and not torch.equal(*first)
    assert all(value.shape == (3, 16) and 0.2 < value.abs().max() < 0.25 for value in first)
    assert not any(value.any() for name, value in values.items() if "lora_B" in name)
    one = next(name for name in values if "lora_A" in name)
    assert torch.equal(read(one, slice(1, 3)), values[one][1:3])
    assert not torch.equal(adapter_reader(wrapped, read_base, 8)(one, slice(None)), values[one])
