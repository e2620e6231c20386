"""Hooks around MLPs of transformers: only while a layer runs, under transformers' own checkpointing, and refusals."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from seqloom.dist import bind, run_ranks
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.integrations.transformers.layers import remap_layers
from seqloom.layout import Layout, Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.plan import Checkpoint, Group, Remap, StageMicroBatch
from support.tiny_models import SIZES, documents, gradients, one_by_one, targets, tiny_model

torch.set_num_threads(1)
LENGTHS = (9, 4)
GROUPS = (Group((0, 1), 1, 2, (Span(0, 0, 9),)), Group((1,), 1, 1, (Span(1, 0, 4),)))
LINEAR = Layout.of([(0, 0, 0, 9), (0, 1, 0, 1), (1, 1, 1, 4)])
WORK = StageMicroBatch(GROUPS, Checkpoint.NONE, linear=LINEAR, remap=Remap.MLP)


def hooks(model):
    return [hook for part in model.modules() for hook in (*part._forward_hooks, *part._forward_pre_hooks)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_gradients_are_those_of_plain_transformers(name, checkpointing):
    plain, ids = tiny_model(name), documents(LENGTHS)
    models, seen = [attach(copy.deepcopy(plain)) for _ in range(2)], [[], []]
    labels = [targets(each) for each in ids]
    one_by_one(plain, ids)

    def body(transport):
        own, context = models[transport.rank], bind(WORK, transport)
        if checkpointing:
            own.gradient_checkpointing_enable()
        described = model_adapter(own)
        first = next(own.model.layers[0].mlp.children())
        first.register_forward_pre_hook(lambda _, args: seen[transport.rank].append(args[0].numel() // 16))
        rows = [torch.cat([each[d][a:b] for d, a, b in context.spans]) for each in (ids, labels)]
        before = hooks(own)
        ModelWithLoss(described)(*rows, context).backward()
        assert hooks(own) == before, "what a layer put up it has taken away"

    run_ranks(2, body, strict=True)
    for rank, tokens in enumerate((10, 3)):
        assert seen[rank] == [tokens] * (2 if checkpointing else 1)
    found = [gradients(model) for model in models]
    for parameter, wanted in gradients(plain).items():
        total = found[0][parameter] + found[1][parameter]
        assert float((total - wanted).norm()) <= 1e-9 * max(float(wanted.norm()), 1e-3), parameter


def check_refused(call, words):
    """All ranks refuse to run a round that remaps around the MLP, and leave no hooks."""

    def body(transport):
        model, context = Layer(*call), bind(WORK, transport)
        remap_layers([model])
        with pytest.raises(SeqloomError, match=words):
            model(torch.zeros(1, context.tokens, 16, dtype=torch.float64), context)
        assert not hooks(model)

    run_ranks(2, body)


class Layer(nn.Module):
    """A layer that calls its MLP with whatever it is told."""

    def __init__(self, *call):
        super().__init__()
        self.mlp, self._call = Mlp(), call

    def forward(self, x, context):
        return self.mlp(*(x if each == "x" else each for each in self._call))


class Mlp(nn.Module):
    """Adds what it is given."""

    def forward(self, x, other=None):
        return x if other is None else x + other


@pytest.mark.parametrize(
    "call, words",
    [
        (("x", "x"), r"Mlp is called with 2 tensors .* plan with remap 'attention'"),
        ((torch.zeros(1, 3, 16),), r"\[1, 3, 16\] in or out of an MLP, where \d+ tokens are"),
    ],
)
def test_mlps_that_cannot_be_moved(call, words):
    check_refused(call, words)


def test_a_layer_whose_mlp_has_no_name_of_ours():
    keys = {
        "ffn_dim": 24,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
    }
    model = hf.OPTForCausalLM(hf.OPTConfig(**{**SIZES, **keys})).double()
    models = [attach(copy.deepcopy(model)) for _ in range(2)]

    def body(transport):
        own, context = model_adapter(models[transport.rank]), bind(WORK, transport)
        with pytest.raises(SeqloomError, match=r"OPTDecoderLayer .* none of its parts is called mlp, .* 'attention'"):
            own.hidden(torch.zeros(context.tokens, dtype=torch.int64), context)
        plain = bind(StageMicroBatch(GROUPS, Checkpoint.NONE, linear=LINEAR), transport)
        assert own.hidden(torch.zeros(plain.tokens, dtype=torch.int64), plain).shape == (plain.tokens, 16)

    run_ranks(2, body)
