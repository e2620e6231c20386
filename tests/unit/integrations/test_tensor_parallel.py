"""Models of transformers in TP groups: gradients of plain transformers, by the plans they publish; and refusals."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import transformers as hf
from torch import nn

from seqloom.attention.context_parallel import KVCache
from seqloom.dist import bind, run_ranks
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.integrations.transformers.layers import tp_layers
from seqloom.integrations.transformers.tensor_parallel import Region
from seqloom.layout import Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.plan import Checkpoint, Group, LayerRange, StageMicroBatch
from support.tensor_parallel import slice_parameters, whole_gradients
from support.tiny_models import FEW_EXPERTS, SIZES, documents, gradients, one_by_one, randomised, targets, tiny_model

torch.set_num_threads(1)
LENGTHS = (13, 1, 6)
SPANS = tuple(Span(document, 0, length) for document, length in enumerate(LENGTHS))
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}


def hooks(model):
    return [hook for part in model.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]


def assert_same(
    plain, tensor, ranks, rounds, checkpoint=Checkpoint.NONE, *, pieces=None, split=False, stages=False, tolerance=1e-9
):
    """Assert that TP groups find the gradients of plain transformers; `rounds` are lists of groups."""
    ids = documents(LENGTHS)
    models = [attach(copy.deepcopy(plain)) for _ in range(ranks)]
    labels = [targets(each) for each in ids]
    one_by_one(plain, ids)

    def body(transport):
        own = model_adapter(models[transport.rank])
        if split:
            own = replace(own, weight_gradients=defer_weight_gradients(own.layers))
        recompute_layers(own.layers)
        cuts = slice_parameters(own, tensor, transport.rank % tensor)
        before, kv_cache, losses = hooks(own.module), KVCache(), []
        first = transport.rank - transport.rank % tensor
        for groups in rounds:
            options = {"pieces": pieces, "kv_cache": kv_cache, "tensor": tensor}
            options["tp_ranks"] = tuple(range(first, first + tensor))
            context = bind(StageMicroBatch(tuple(groups), checkpoint), transport, **options)
            own.prepare(context, torch.float64)
            none = [torch.empty(0, dtype=torch.int64)]
            given, wanted = (torch.cat([each[d][a:b] for d, a, b in context.spans] or none) for each in (ids, labels))
            if stages:
                given = ModelWithLoss(own)(given, None, context, LayerRange(0, 1, 2))
            losses.append(ModelWithLoss(own)(given, wanted, context, LayerRange(1, 2, 2) if stages else None))
        with own.weight_gradients.deferred(0):
            sum(losses).backward()
        assert not split or own.layers[0].mlp.down_proj.weight.grad is None
        own.weight_gradients.run(0)
        assert hooks(own.module) == before, "what a layer put up it has taken away"
        return cuts

    cuts = run_ranks(ranks, body, strict=True)[0]
    found = whole_gradients([gradients(model) for model in models], cuts, tensor)
    for name, wanted in gradients(plain).items():
        assert float((found[name] - wanted).norm()) <= tolerance * max(float(wanted.norm()), 1e-3), name


@pytest.mark.parametrize("vocabulary", [29, 32])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "qwen2-windows", "granite", "phi"])
def test_gradients_are_those_of_plain_transformers(name, vocabulary):
    """Also of embedding and head that are cut by rows of the vocabulary, tied or with a bias."""
    plain = tiny_model(name, vocab_size=vocabulary)
    assert bool(model_adapter(attach(copy.deepcopy(plain))).cut_tables(2)) == (vocabulary == 32)
    assert_same(plain, 2, 4, [[Group((0, 1, 2, 3), 4, 1, SPANS)]])


@pytest.mark.parametrize("padding", [0, 17, 29])
def test_an_embedding_with_a_padding_id_and_a_factor(padding):
    """Gemma 2, tied, multiplies embeddings; the gradient of the padding id is that of the head alone."""
    keys = {"head_dim": 4, "sliding_window": 4, "vocab_size": 32, "pad_token_id": padding}
    plain = hf.Gemma2ForCausalLM(hf.Gemma2Config(**{**SIZES, **keys})).double().train()
    assert plain.model.embed_tokens.padding_idx == padding
    assert_same(plain, 2, 4, [[Group((0, 1), 2, 1, SPANS[:2])], [Group((2, 3), 2, 1, SPANS[2:])]], tolerance=1e-6)


def test_fused_projections_and_both_parts_beside_each_other():
    """GPT-NeoX: q, k and v of a head side by side, attention and MLP of the same input, biases everywhere."""
    keys = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    plain = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{**SIZES, **keys})).double().train()
    assert_same(randomised(plain, 0), 2, 2, [[Group((0, 1), 2, 1, SPANS)]])


@pytest.mark.parametrize("ring", [1, 2])
def test_sinks_are_cut_with_their_heads(ring):
    """Granite, whose own code scales by sinks in float32, whatever it is in."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    plain = (
        hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model("granite_swa", **SIZES, **kinds)).double().train()
    )
    assert_same(randomised(plain, 0), 2, 2 * ring, [[Group(tuple(range(2 * ring)), 2, ring, SPANS)]], tolerance=1e-5)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", ["Olmo2", "Olmo3", "Glm", "Glm4"])
def test_norms_over_all_heads_and_halves_in_one_projection(family, ranks):
    """OLMo's norms of queries and keys see the heads of all ranks; GLM's gate and up are one matrix, cut in a row."""
    keys = {"Glm": {"head_dim": 4}, "Glm4": {"head_dim": 4}, "Olmo3": {"sliding_window": 4}}.get(family, {})
    config = getattr(hf, f"{family}Config")(**{**SIZES, **WIDE, **keys, "pad_token_id": 0, "eos_token_id": 0})
    plain = randomised(getattr(hf, f"{family}ForCausalLM")(config), 0).double().train()
    for path in [name for name, _ in plain.named_modules() if family[:4] == "Olmo" and name.endswith("norm")]:
        own = plain.get_submodule(path)  # OLMo's compute in float32, whatever they are in; torch's in float64
        plain.set_submodule(path, nn.RMSNorm(len(own.weight), own.variance_epsilon, dtype=torch.float64))
        plain.get_submodule(path).load_state_dict(own.state_dict())
    rounds = [[Group(tuple(range(ranks)), ranks, 1, SPANS[:1])], [Group(tuple(range(ranks)), ranks, 1, SPANS[1:])]]
    assert_same(plain, ranks, ranks, rounds, Checkpoint.FULL, split=family == "Olmo2")


@pytest.mark.parametrize("ranks", [2, 4])
def test_queries_keys_and_values_in_one_projection(ranks):
    """Phi 3, whose code tells them apart by numbers of heads; those of the model are as before after the call."""
    keys = {"num_key_value_heads": ranks, "sliding_window": 5, "pad_token_id": 0, "eos_token_id": 0}
    plain = randomised(hf.Phi3ForCausalLM(hf.Phi3Config(**{**SIZES, **WIDE, **keys})), 0).double().train()
    groups = [Group(tuple(range(ranks)), ranks, 1, (span,)) for span in SPANS]
    assert_same(plain, ranks, ranks, [[each] for each in groups], Checkpoint.SELECTIVE, split=True)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL])
def test_whole_experts_on_each_rank(name, checkpoint):
    """Qwen 2 has dense layers, and a gated shared expert of which its plan is silent. A token alone, then the rest."""
    rounds = [[Group((0, 1, 2, 3), 4, 1, SPANS[1:2])], [Group((0, 1, 2, 3), 2, 2, SPANS[:1] + SPANS[2:])]]
    plain = tiny_model(name)
    assert_same(plain, 2, 4, rounds, checkpoint)
    own = model_adapter(attach(plain))
    assert own.tp_divisors["experts"] == 4
    assert {own.tp_axes[each] for each in own.expert_parameters} == {0}


def test_experts_beside_shared_ones_that_are_cut():
    """GLM-4 MoE: a shared expert is a region of its own. A document in pieces, in two stages. It scores in float32."""
    keys = {**FEW_EXPERTS, "head_dim": 4, "n_group": 1, "eos_token_id": 0, "num_hidden_layers": 2}
    plain = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**{**SIZES, **keys}))
    plain.set_experts_implementation("eager")
    pieces = (Span(0, 0, 6), Span(0, 6, 13))
    rounds = [[Group((0, 1), 2, 1, pieces[:1])], [Group((0, 1), 2, 1, (pieces[1], *SPANS[1:]))]]
    assert_same(randomised(plain, 0).double().train(), 2, 2, rounds, pieces={0: pieces}, stages=True, tolerance=1e-6)


@pytest.mark.parametrize("checkpoint", [Checkpoint.SELECTIVE, Checkpoint.FULL])
def test_with_a_ring_and_whatever_is_kept_or_put_off(checkpoint):
    groups = [Group((0, 1), 2, 1, SPANS[1:2]), Group((2, 3), 2, 1, SPANS[2:])]
    rounds = [[Group((0, 1, 2, 3), 2, 2, SPANS[:1])], groups]
    assert_same(tiny_model("llama", attention_bias=True, mlp_bias=True), 2, 4, rounds, checkpoint, split=True)


@pytest.mark.parametrize("name", ["llama", "mixtral", "olmo2", "phi3"])
def test_a_tp_group_without_tokens_or_without_a_group(name):
    """Nothing of a norm over all heads either, of experts, or of columns that are exchanged."""
    rounds = [
        [Group((0, 1, 2, 3), 4, 1, SPANS[1:2])],
        [Group((0, 1), 2, 1, SPANS[:1])],
        [Group((2, 3), 2, 1, SPANS[2:])],
    ]
    families = {"olmo2": (hf.Olmo2Config, hf.Olmo2ForCausalLM), "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM)}
    if name in families:
        config, model = families[name]
        plain = randomised(model(config(**SIZES, pad_token_id=0, eos_token_id=0)), 0).double().train()
    else:
        plain = tiny_model(name)
    assert_same(plain, 2, 4, rounds, Checkpoint.SELECTIVE, tolerance=1e-6 if name == "olmo2" else 1e-9)


def test_four_members_two_stages_and_a_document_in_pieces():
    pieces = (Span(0, 0, 6), Span(0, 6, 13))
    rounds = [[Group((0, 1, 2, 3), 4, 1, pieces[:1])], [Group((0, 1, 2, 3), 4, 1, (pieces[1], *SPANS[1:]))]]
    plain = tiny_model("mistral", **WIDE, vocab_size=32)
    assert_same(plain, 4, 4, rounds, pieces={0: pieces}, stages=True)


def test_norms_around_both_parts():
    """Gemma 3, tied, with windows. Its norms add up the gradients of their weights in float32, whatever it is in."""
    config = hf.Gemma3TextConfig(**SIZES, head_dim=4, sliding_window=4, layer_types=["sliding_attention"] * 2)
    plain = hf.Gemma3ForCausalLM(config).double().train()
    assert_same(plain, 2, 2, [[Group((0, 1), 2, 1, SPANS)]], Checkpoint.SELECTIVE, tolerance=1e-6)


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, r"silent of attention, self_attn"),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4}, r"no tensor-parallel plan"),
        ("Cohere", {"use_qk_norm": True, "logit_scale": 1.0, "eos_token_id": 0}, r"silent of self_attn.q_norm.weight"),
        ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}, r"no tensor-parallel plan"),
    ],
)
def test_models_that_cannot_be_cut(family, keys, words):
    config = getattr(hf, f"{family}Config")(**{**SIZES, **keys})
    own = model_adapter(attach(getattr(hf, f"{family}ForCausalLM")(config)))
    own.check_tp_degree(1)
    assert not own.tp_axes
    with pytest.raises(SeqloomError, match=rf"degree 2: {family}ForCausalLM cannot be sharded: .*{words}.*tensor = 1"):
        own.check_tp_degree(2)


def test_a_decoder_whose_hidden_states_depend_on_positions():
    """OPT, with a plan that could be followed, adds a table of positions to what its layers are given."""
    own = attach(hf.OPTForCausalLM(hf.OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0)))
    styles = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "out_proj": "rowwise"}
    own._tp_plan = {f"model.decoder.layers.*.self_attn.{name}": style for name, style in styles.items()}
    assert "its forward cannot be traced" in model_adapter(own).no_tp_reason


def test_adapters_are_not_cut():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.0))
    found = model_adapter(attach(model)).no_tp_reason
    assert re.search(r"self_attn.q_proj is a peft\..*Linear, and only plain linear layers are cut", found)


def test_degrees_that_shapes_do_not_allow():
    own = model_adapter(attach(tiny_model("llama", **WIDE, intermediate_size=30)))
    own.check_tp_degree(2)
    with pytest.raises(SeqloomError, match=r"degree 4: LlamaForCausalLM has mlp width 30, and .* \(possible: 1, 2\)"):
        own.check_tp_degree(4)


class Odd(nn.Module):
    """A layer that calls its part with whatever it is told."""

    def __init__(self, *call):
        super().__init__()
        self.mlp, self._call = Sum(), call

    def forward(self, x, context):
        return self.mlp(*(x if each == "x" else each for each in self._call))


class Sum(nn.Module):
    """Adds what it is given."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 12, bias=False), nn.Linear(12, 16, bias=False)

    def forward(self, x, other=0.0):
        return self.down(self.up(x + other))


@pytest.mark.parametrize(
    ("call", "rows", "words"),
    [
        (("x", "x"), 6, r"Sum is called with 2 tensors of hidden states in a TP group"),
        ((torch.zeros(1, 3, 16),), 6, r"\[1, 3, 16\] in or out of a part of a layer, where \d+ tokens are"),
        (("x",), 12, r"12 of 12 rows of a weight in a TP group of 2"),
    ],
)
def test_layers_that_cannot_run_in_a_tp_group(call, rows, words):
    def body(transport):
        layer = Odd(*call)
        tp_layers([layer], [(Region("mlp", ("mlp.up",), ("mlp.down",)),)])
        layer.mlp.up.weight.data = layer.mlp.up.weight.data[:rows]
        context = bind(StageMicroBatch((Group((0, 1), 2, 1, SPANS),), Checkpoint.NONE), transport, tensor=2)
        with pytest.raises(SeqloomError, match=words):
            layer(torch.zeros(1, context.tokens, 16), context)
        assert not hooks(layer)

    run_ranks(2, body)
