"""The reference transformer in one process: against plain torch, its names, its initial values, its refusals."""

import pytest
import torch

from seqloom.describe import ModelSpec
from seqloom.dist.rank_tokens import bind
from seqloom.dist.thread_transport import run_ranks
from seqloom.errors import SeqloomError
from seqloom.models import Rope, Transformer, TransformerOptions

LENGTHS = [5, 1, 23, 12, 2]
CASES = {
    "grouped": ({}, TransformerOptions()),
    "one kv head, tied": ({"kv_heads": 1, "tied": True}, TransformerOptions(eps=1e-3)),
    "every head its own": ({"kv_heads": 4}, TransformerOptions(Rope(500.0))),
    "windows": ({"layers": 3, "windows": (4, None, 1)}, TransformerOptions()),
    "qwen 2": ({"heads": 6, "head_dim": 10}, TransformerOptions(qkv_bias=True)),
    "qwen 3": ({"tied": True}, TransformerOptions(qk_norm=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_all_gradients_equal_plain_torch(kit, case):
    changes, options = CASES[case]
    model, docs = kit.lively(kit.tiny(**changes), options), kit.documents(LENGTHS)
    found = kit.errors(kit.run(model, docs, kit.one_group(LENGTHS)), kit.plain(model, docs))
    assert max(found.values()) < 1e-10, found


def test_float32_and_bf16_lose_no_more_than_plain_torch_does(kit):
    docs = kit.documents(LENGTHS)
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, None)):
        model = kit.lively(kit.tiny(), dtype=dtype)
        exact = kit.plain(model, docs)
        ours = kit.errors(kit.run(model, docs, kit.one_group(LENGTHS)), exact)
        theirs = kit.errors(kit.plain(model, docs, dtype), exact)
        worst = allowed or 2 * max(theirs.values())
        assert max(ours.values()) < worst, (dtype, ours, theirs)


def test_the_numbers_and_the_order_of_documents_do_not_matter(kit):
    model, docs = kit.lively(kit.tiny(windows=(None, 6))), kit.documents(LENGTHS)
    whole = kit.run(model, docs, kit.one_group(LENGTHS))
    listed = kit.run(model, docs, kit.one_group(LENGTHS, order=[3, 0, 4, 2, 1]))
    assert max(kit.errors(listed, whole).values()) < 1e-12
    for k, doc in enumerate(docs):
        alone = kit.run(model, [doc], kit.one_group([len(doc)]))
        assert torch.allclose(alone.logits[0], whole.logits[k], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_changed_token_changes_nothing_in_other_documents_bit_for_bit(kit, dtype):
    model, docs = kit.lively(kit.tiny(windows=(None, 6)), dtype=dtype), kit.documents(LENGTHS)
    before = kit.run(model, docs, kit.one_group(LENGTHS)).logits
    docs[2][0] = (docs[2][0] + 1) % 31
    after = kit.run(model, docs, kit.one_group(LENGTHS)).logits
    for k in range(len(docs)):
        assert torch.equal(before[k], after[k]) == (k != 2)
    assert not torch.equal(before[2][:1], after[2][:1])


def test_parameters_have_hugging_faces_names_and_shapes(kit):
    spec = kit.tiny(layers=1)
    layer = {
        "self_attn.q_proj.weight": (32, 24),
        "self_attn.k_proj.weight": (16, 24),
        "self_attn.v_proj.weight": (16, 24),
        "self_attn.o_proj.weight": (24, 32),
        "mlp.gate_proj.weight": (40, 24),
        "mlp.up_proj.weight": (40, 24),
        "mlp.down_proj.weight": (24, 40),
        "input_layernorm.weight": (24,),
        "post_attention_layernorm.weight": (24,),
    }
    outside = {"model.embed_tokens.weight": (31, 24), "model.norm.weight": (24,), "lm_head.weight": (31, 24)}
    expected = {f"model.layers.0.{name}": shape for name, shape in layer.items()} | outside
    assert {name: tuple(x.shape) for name, x in Transformer(spec).state_dict().items()} == expected

    extra = Transformer(spec, TransformerOptions(qk_norm=True, qkv_bias=True)).state_dict().keys() - expected.keys()
    names = ("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")
    assert extra == {f"model.layers.0.self_attn.{name}" for name in names}


def test_a_tied_head_is_the_embedding(kit):
    model = Transformer(kit.tiny(tied=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_the_preset_models_have_the_parameters_their_spec_counts():
    for name in ("llama3-8b", "qwen2.5-0.5b"):
        spec = ModelSpec.load(name)
        model = Transformer(spec, device="meta")
        assert sum(p.numel() for p in model.parameters()) == spec.parameters()


def test_initial_values_follow_seed_and_name_alone(kit):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    small, large = Transformer(kit.tiny(), seed=11), Transformer(kit.tiny(layers=3, ffn=8), seed=11)
    assert torch.equal(torch.get_rng_state(), state)  # nobody else's random numbers are touched
    shared = [n for n, p in small.named_parameters() if "mlp" not in n]
    assert len(shared) == 15
    for name in shared:
        assert torch.equal(small.get_parameter(name), large.get_parameter(name))
    other = Transformer(kit.tiny(), seed=12)
    assert not torch.equal(small.lm_head.weight, other.lm_head.weight)
    q, k = (small.get_parameter(f"model.layers.{layer}.self_attn.q_proj.weight") for layer in (0, 1))
    assert not torch.equal(q, k)
    assert abs(float(q.detach().std()) - 0.02) < 0.002
    assert torch.equal(
        Transformer(kit.tiny(), seed=11, dtype=torch.bfloat16).lm_head.weight, small.lm_head.weight.bfloat16()
    )


def test_a_model_made_on_meta_is_filled_later(kit):
    model = Transformer(kit.tiny(tied=True), device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.initialize(4)
    expected = Transformer(kit.tiny(tied=True), seed=4)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter)


def test_hidden_states_are_what_the_head_reads(kit):
    model, docs = kit.lively(kit.tiny()), kit.documents(LENGTHS)

    def body(transport):
        context = bind(kit.one_group(LENGTHS), transport, device=torch.device("cpu"))
        hidden = model.model(torch.cat(docs), context.positions, context)
        return hidden, model(torch.cat(docs), context.positions, context)

    ((hidden, logits),) = run_ranks(1, body)
    assert hidden.shape == (sum(LENGTHS), 24)
    assert torch.equal(model.lm_head(hidden), logits)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"learned_positions": True}, "learned_positions = True"),
        ({"gated": False}, "gated = False"),
        ({"mixer_layers": (0,), "mixer_parameters": 4, "mixer_values": 4}, r"mixer_layers = \(0,\)"),
        ({"layers": 2, "head_shapes": ((1, 8), (2, 4))}, r"head_shapes = \(\(1, 8\)"),
        ({"head_dim": 7}, "heads of 7"),
    ],
)
def test_what_the_spec_has_and_the_model_has_not_is_refused(kit, spec, words):
    with pytest.raises(SeqloomError, match=words):
        Transformer(kit.tiny(**spec))


def test_tokens_that_are_not_packed_are_refused(kit):
    model, ids = Transformer(kit.tiny()), torch.zeros(1, 4, dtype=torch.int64)
    for arguments in ((ids, ids), (ids[0], ids[0, :3])):
        with pytest.raises(SeqloomError, match="drop the batch axis"):
            model(*arguments, None)
