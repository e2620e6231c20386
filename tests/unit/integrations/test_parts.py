"""Decoders in parts: composed they are the whole, and what is more than its parts is refused with the reason."""

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from seqloom.dist import bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.integrations.transformers.parts import StageSplitError, split_decoder
from seqloom.models.adapter import ModelWithLoss, meta_parameters
from seqloom.params.placement import parameters_of_stages
from seqloom.plan import LayerRange
from support.tiny_models import MODELS, SIZES, VOCABULARY, gradients, randomised, tiny_model

torch.set_num_threads(1)
LAYERS = 3
CUTS = [LayerRange(0, 1, LAYERS), LayerRange(1, 1, LAYERS), LayerRange(1, 3, LAYERS)]  # the second one has no layer


TYPES = ["sliding_attention", "full_attention", "full_attention"]
WINDOWS = {"head_dim": 6, "layer_types": TYPES, "sliding_window": 3}
QUIET = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
OTHERS = {
    "gemma3": ("Gemma3", "Gemma3Text", WINDOWS),  # embeddings that scale themselves, tables of two kinds
    "gemma4": ("Gemma4", "Gemma4Text", {**WINDOWS, "global_head_dim": 4, "hidden_size_per_layer_input": 0}),
    "gpt2": ("GPT2LMHead", "GPT2", QUIET),  # learned positions, and a result in another view
    "opt": ("OPT", "OPT", {"word_embed_proj_dim": 16, "ffn_dim": 24, "dropout": 0.0}),
    "nanochat": ("NanoChat", "NanoChat", {}),  # one norm before and after the layers
}
"""Name -> beginning of the classes of model and config in transformers, and what the config has beside `SIZES`."""


def model_of(name, **keys):
    if name in MODELS:
        return tiny_model(name, num_hidden_layers=LAYERS, **keys)
    import transformers

    family, config, own = OTHERS[name]
    kind = getattr(transformers, f"{family}Model" if family.endswith("Head") else f"{family}ForCausalLM")
    given = {**SIZES, "num_hidden_layers": LAYERS, "pad_token_id": 0, **own, **keys}
    return randomised(kind(getattr(transformers, f"{config}Config")(**given)), 0).double().train()


@pytest.mark.parametrize("tokens", [9, 0])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_parts_in_turn_are_the_whole(name, tokens):
    context = bind_single_rank((5, 3, 1) if tokens else ())
    ids, labels = (torch.randint(VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(k)) for k in (1, 2))
    models = [model_of(name) for _ in range(2)]
    adapters = [model_adapter(attach(model)) for model in models]
    wanted = ModelWithLoss(adapters[0])(ids, labels, context)
    found = ids
    for part in CUTS:
        found = ModelWithLoss(adapters[1])(found, labels, context, part)
    assert torch.equal(found, wanted)
    wanted.backward()
    found.backward()
    expected = gradients(models[0])
    assert all(torch.equal(each, expected[key]) for key, each in gradients(models[1]).items())


def test_a_decoder_that_moves_ids_to_its_embedding_is_traced_before_it_has_values():
    import transformers

    sizes = {**SIZES, "num_hidden_layers": LAYERS, "head_dim": 4, "intermediate_size_mlp": 24, "pad_token_id": 0}
    with meta_parameters():
        model = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, moe_layers=[]))
    assert model_adapter(attach(model)).single_stage_reason == ""


def test_parameters_belong_to_parts():
    found = model_adapter(attach(tiny_model("qwen3", num_hidden_layers=LAYERS)))  # tied
    names = dict(found.module.named_parameters())
    first, _, last = (parameters_of_stages(found, [part]) for part in CUTS)
    assert first.keys() & last.keys() == {"model.embed_tokens.weight"} and first.keys() | last.keys() == names.keys()
    assert "model.norm.weight" in last and all("layers.0." not in name for name in last)
    assert not parameters_of_stages(found, [CUTS[1]])


def test_modules_before_the_first_layer_belong_to_the_first_part():
    found = model_adapter(attach(model_of("gpt2")))
    first, _, last = (parameters_of_stages(found, [part]) for part in CUTS)
    tables = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert tables < first.keys() and first.keys() & last.keys() == {"transformer.wte.weight"}  # tied


def test_layers_that_share_keys_are_refused_where_they_are_cut():
    found = model_adapter(attach(model_of("gemma4", num_kv_shared_layers=1)))
    context, ids = bind_single_rank((2,)), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SeqloomError, match=r"have the keys and values of layers before them.*pipeline\.stages = 1"):
        found.run(CUTS[0], ids, context)
    assert found.run(LayerRange(0, 3, 3), ids, context).shape == (2, SIZES["hidden_size"])


def test_parts_are_found_without_values():
    with torch.device("meta"):
        found = model_adapter(attach(tiny_model("qwen3")))
    assert not found.single_stage_reason and found.embedding is found.module.model.embed_tokens


class Decoder(nn.Module):
    """A decoder that may do something beside its parts."""

    def __init__(self, odd=""):
        super().__init__()
        self.odd = odd
        self.embed, self.norm, self.turn = nn.Embedding(7, 4), nn.LayerNorm(4), Turn()
        self.places = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(Layer(odd == "pairs") for _ in range(3))

    def forward(self, input_ids, position_ids, use_cache, seqloom_context):
        embedded = x = self.embed(input_ids)
        x = x * 2 if self.odd == "factor" else x
        x = self.norm(x + self.places(position_ids)) if self.odd == "positions and norm" else x
        axes = position_ids[None].expand(3, -1, -1)[1:] if self.odd == "axes" else position_ids
        table = self.turn(axes[:, :1] if self.odd == "first position" else axes)
        for number, layer in enumerate(self.layers[:2] if self.odd == "skipped" else self.layers):
            own = {"own": x + 0} if self.odd == "own input" else {}
            x = layer(x, table=table, number=number, context=seqloom_context, **own)
            if self.odd == "pairs":
                x, _ = x
            if self.odd == "in place" and number == 0:
                x += 1
            if self.odd == "between":
                x = self.turn(x)
            if self.odd == "changed":
                x = x + 1
            if self.odd == "embedding again":
                x = x + embedded
        if self.odd == "error":
            raise ValueError("too short")
        x = self.norm(self.norm(x)) if self.odd == "two norms" else self.norm(x)
        x = x.view(*input_ids.shape, 4) if self.odd == "view" else x
        return BaseModelOutput(last_hidden_state=2 * x if self.odd == "result" else x)


class Turn(nn.Module):
    def forward(self, positions):
        return positions.sum(0) if positions.ndim == 3 else positions


class Layer(nn.Linear):
    def __init__(self, returns_pair):
        super().__init__(4, 4)
        self.returns_pair = returns_pair

    def forward(self, x, table, number, context, own=None):
        x = x + super().forward(x) * table[..., None] * number
        return (x, None) if self.returns_pair else x


@pytest.mark.parametrize("make", ["", "pairs", "axes", "factor", "positions and norm", "view"])
def test_a_decoder_of_any_make(make):
    decoder = Decoder(make)
    parts = split_decoder(decoder, decoder.embed, tuple(decoder.layers))
    context, ids = bind_single_rank((3, 2)), torch.arange(5)
    wanted = decoder(ids[None], context.positions[None], False, context).last_hidden_state[0]
    found = parts.body(parts.body(parts.embed(ids, context), context, 0, 2), context, 2, 3)
    assert torch.equal(parts.norm(found), wanted)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ("embedding again", "layer 1 is not given what layer 0 returned"),
        ("skipped", "every layer once"),
        ("own input", "own of Layer is neither"),
        ("first position", "argument 0 of Turn is neither hidden states, positions"),
        ("in place", "what layer 0 returned is changed in place"),
        ("between", "one after the other"),
        ("changed", "layer 1 is not given what layer 0 returned"),
        ("error", "cannot be traced .ValueError: too short"),
        ("two norms", "2 calls follow its last layer"),
        ("result", "its result is not that of its final norm"),
    ],
)
def test_what_is_more_than_its_parts_is_refused(odd, reason):
    decoder = Decoder(odd)
    with pytest.raises(StageSplitError, match=reason):
        split_decoder(decoder, decoder.embed, tuple(decoder.layers))
    with pytest.raises(StageSplitError, match="2 layers are not one list"):
        split_decoder(decoder, decoder.embed, tuple(decoder.layers)[:2])
