"""Values that are read while parameters are cut: those of a whole model, which no rank ever has."""

from dataclasses import replace

import pytest
import torch

from seqloom.models import ModelAdapter, Transformer
from seqloom.models.adapter import DeferredParameters
from seqloom.params import FSDPParameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.plan import Sharding, Stage
from support.steps import tiny_spec

torch.set_num_threads(1)
RANKS, SEED = 8, 3
SPEC = tiny_spec(layers=4, heads=8, kv_heads=4, tied=True)
LAYOUTS = ("full", "hybrid", "none", "stages", "free")


def place(transport, adapter, layout):
    """Cut the network's parameters."""
    if layout == "free":
        return ReshardingParameters(adapter, transport)
    if layout == "stages":
        stages = (Stage((0, 1, 2, 3), (0, 2)), Stage((4, 5, 6, 7), (2, 4)))
        return PipelineFSDP(adapter, transport, Placement(stages, Sharding.FULL, RANKS))
    return FSDPParameters(adapter, transport, Sharding(layout), node_size=4)


def whole(module):
    """Elements of the parameters of which this rank has all values."""
    return sum(each.numel() for each in module.parameters() if not each.is_meta and type(each) is torch.nn.Parameter)


def read(transport, layout):
    """Place a model; return its values, those of a model that was there from the start, and the most that was there."""
    model, most, asked = Transformer(SPEC, device="meta", dtype=torch.float64), [0], []

    def watched(name, rows):
        most[0] = max(most[0], whole(model))
        asked.append(name)
        return model.initial_value(SEED, name)[rows]

    adapter = replace(ModelAdapter.of(model), deferred=DeferredParameters(watched, torch.device("cpu")))
    found = {name: each.clone() for name, each in place(transport, adapter, layout).full_parameters()}
    there = ModelAdapter.of(Transformer(SPEC, seed=SEED, dtype=torch.float64))
    wanted = {name: each.clone() for name, each in place(transport, there, layout).full_parameters()}
    same = found.keys() == wanted.keys() and all(torch.equal(each, wanted[name]) for name, each in found.items())
    return same, most[0], asked


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_has_the_whole_model_at_any_time(gloo_pool, layout):
    model = Transformer(SPEC, device="meta")
    layer = sum(each.numel() for each in model.model.layers[0].parameters())
    names = [name for name, _ in model.named_parameters()]
    for rank, (same, most, asked) in enumerate(gloo_pool.run(read, layout, ranks=RANKS, timeout_s=60)):
        assert same and len(asked) == len(set(asked))
        assert set(asked) <= set(names) and (layout == "stages") == (set(asked) < set(names))
        if layout == "stages":
            assert f"model.layers.{3 * (rank < 4)}.mlp.up_proj.weight" not in asked
        assert most < layer or layout == "none"
