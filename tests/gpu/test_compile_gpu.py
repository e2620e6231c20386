"""Compiled layers on a GPU: one graph, however many tokens a round has."""

import pytest
import torch
from torch._dynamo.utils import counters

from seqloom.describe import ModelSpec
from seqloom.dist import SingleRankTransport
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import ReplicatedParameters
from seqloom.plan import Group
from seqloom.train.model import prepare_layers
from support.steps import one_stage_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch 2.11, at tracing
]
SPEC = ModelSpec(
    "layers", 2, 2048, heads=16, kv_heads=8, head_dim=128, ffn=2048, gated=True, vocabulary=1000, tied=True
)
TOKENS = (200, 3_000, 4_500, 6_000, 20_000, 1_000)
"""On all sides of the sizes by which Inductor decides what it fuses: 2,560, 4,096 and 5,120 tokens for these widths."""


def test_one_graph_serves_any_number_of_tokens():
    device = torch.device("cuda", 0)
    adapter = ModelAdapter.of(Transformer(SPEC, seed=0, dtype=torch.bfloat16).to(device))
    adapter = prepare_layers(adapter, compiled=True, split_backward=False)
    parameters = ReplicatedParameters(adapter, SingleRankTransport())
    counters.clear()
    graphs = []
    for tokens in TOKENS:
        group = Group((0,), 1, 1, (Span(0, 0, tokens),))
        plan = one_stage_plan([[group]], ranks=1, layers=SPEC.layers, heads=SPEC.heads)
        ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        run_step(
            bind_plan(plan, SingleRankTransport(), device=device), parameters, lambda _, ids=ids: (ids, ids), tokens
        )
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1] * len(TOKENS)
