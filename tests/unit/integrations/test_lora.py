"""Adapters of `model.lora`: what is drawn, and that merging is peft's."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from seqloom.cost import CostModel
from seqloom.cost.compute import forward_flops, training_flops
from seqloom.describe import Adapters, Cluster, ModelSpec
from seqloom.integrations.lora import adapter_reader, add_adapters, describe_adapters, merge_adapters, plain_name
from seqloom.plan import Checkpoint, LayerRange, Reduce
from support.tiny_models import SIZES, VOCABULARY, randomised, tiny_model


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


# -- what plans know of adapters: the oracle is a model of peft, whose tensors and products are counted

SPEC = ModelSpec("tiny", 2, 16, 4, 2, 4, 24, gated=True, vocabulary=VOCABULARY, tied=False)
EVERY = LayerRange(0, 2, 2)


def wrapped_and_spec(targets=(), dropout=0.0):
    """A model of peft, and its shapes as they are read from one without values."""
    on_meta = tiny_model("llama").to("meta")
    add_adapters(on_meta, SimpleNamespace(rank=3, alpha=5.0, dropout=dropout, targets=targets), "nowhere")
    options = {"r": 3, "lora_alpha": 5, "lora_dropout": dropout, "task_type": "CAUSAL_LM"}
    wrapped = get_peft_model(
        tiny_model("llama", dtype=torch.float32), LoraConfig(target_modules=list(targets) or "all-linear", **options)
    )
    return wrapped, replace(SPEC, adapters=describe_adapters(on_meta.model.layers))


def size(tensors):
    return sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")], ids=["all", "two"])
@pytest.mark.parametrize("offload", [False, True])
def test_static_memory_is_that_of_the_tensors_of_a_model(targets, offload):
    model, spec = wrapped_and_spec(targets)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    model(input_ids=torch.arange(8)[None]).logits.sum().backward()
    optimiser.step()
    masters, gradients = (
        size(model.parameters()),
        size(each.grad for each in model.parameters() if each.grad is not None),
    )
    moments = size(each for state in optimiser.state.values() for key, each in state.items() if key != "step")
    copies = size(each.to(torch.bfloat16) for each in model.parameters())
    layers = [list(layer.parameters()) for layer in model.base_model.model.model.layers]
    tables = size(model.get_parameter(f"base_model.model.{each}.weight") for each in ("model.embed_tokens", "lm_head"))
    whole = [size(each for each in layer if each.requires_grad) for layer in layers]
    for sharding, ranks in (("none", 1), ("hybrid", 4), ("full", 8)):
        cost = CostModel(Cluster.parse("2x4xH200"), spec, sharding=sharding, offload_optimiser=offload)
        memory = cost.memory
        state = masters + moments if offload else 0
        assert memory.host_state_bytes((EVERY,), ranks) == -(-state // ranks)
        kept = copies + gradients + (0 if offload else masters + moments)
        for policy in cost.policies:
            static = memory.fixed_bytes(policy) - memory.working_bytes(EVERY)
            if ranks == 1:
                assert static == kept
                continue
            gathered = (2 * max(map(size, layers)) + tables) // 2  # in bf16
            unreduced = 2 * max(whole) if policy.reduce == Reduce.ROUND else sum(whole)
            assert static - gathered - unreduced == pytest.approx(kept / ranks, abs=18)  # shards are rounded up


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")], ids=["all", "two"])
def test_products_are_those_that_torch_counts(targets):
    """Linear layers call mm, eager attention bmm; inputs of the first layer have a gradient, as all others do."""
    model, spec = wrapped_and_spec(targets)
    model.set_attn_implementation("eager")
    model.enable_input_require_grads()
    ids = torch.arange(8)[None] % VOCABULARY
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    counted = sum(flops for op, flops in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op))
    lengths = np.array([ids.numel()])
    attention = float(forward_flops(lengths, spec).sum()) - 2.0 * spec.matmul_parameters * ids.numel()
    assert training_flops(lengths, spec) - 3 * attention == counted
    compute = CostModel(Cluster.parse("1x1xH200"), spec).engine.compute
    moved = 3 * 2 * sum(layer.touched for layer in compute._values) / compute.memory_gb_s
    head = 4 * spec.head_parameters
    linear = (compute.linear(Checkpoint.NONE) - moved) * compute.matmul_tflops * 1e3
    assert (linear + head) * ids.numel() == pytest.approx(counted, rel=1e-9)


def test_sizes_of_adapters_are_read_from_the_layers():
    hidden, kv, ffn = SIZES["hidden_size"], 8, SIZES["intermediate_size"]
    _, spec = wrapped_and_spec(("q_proj", "v_proj", "down_proj"), dropout=0.5)
    assert spec.adapters == (Adapters(3, 3, 2 * hidden + ffn, 2 * hidden + kv, dropout=True),) * 2
    assert spec.trained_parameters(1) == 3 * (2 * hidden + ffn + 2 * hidden + kv)
    assert spec.layer_parameters(1) == SPEC.layer_parameters(1) + spec.trained_parameters(1)
