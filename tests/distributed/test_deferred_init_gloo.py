"""Values that are read while parameters are cut: those of a whole model, which no rank ever has."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqloom.models import ModelAdapter, Transformer
from seqloom.models.adapter import DeferredParameters
from seqloom.params import FSDPParameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.plan import Sharding, Stage
from seqloom.train.checkpoint import Checkpoints
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


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator has returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = (each for each in tree_leaves(out) if isinstance(each, torch.Tensor) and not each.is_meta)
        self.elements = max(
            self.elements,
            *(each.numel() for each in found if each.is_floating_point() and not isinstance(each, DTensor)),
            0,
        )
        return out


MIXTURE = tiny_spec(layers=4, experts=8, active_experts=2, expert_ffn=24)
LARGEST = 8 * 2 * 24 * 16
"""Elements of the gates and ups of all experts of a layer: no other parameter has as many."""
DIVISIONS = {"full": 4, "hybrid": 2, "none": 2, "stages": 2}  # expert degree by layout


def largest_of_divided(transport, layout, folder):
    """Place, save and load a model of divided experts; return the most elements of a tensor that this rank has had."""
    model, asked = Transformer(MIXTURE, device="meta", dtype=torch.float64), {}
    values = {name: each.detach() for name, each in Transformer(MIXTURE, seed=SEED).named_parameters()}

    def watched(name, rows):
        asked[name] = rows
        return values[name][rows].clone()

    adapter = replace(ModelAdapter.of(model), deferred=DeferredParameters(watched, torch.device("cpu")))
    with Largest() as placing:
        if layout == "stages":
            stages = tuple(Stage(tuple(range(2 * k, 2 * k + 4)), (k, k + 2), expert=2) for k in (0, 2))
            parameters = PipelineFSDP(adapter, transport, Placement(stages, Sharding.FULL, RANKS))
        else:
            options = {"node_size": 4, "expert": DIVISIONS[layout]}
            parameters = FSDPParameters(adapter, transport, Sharding(layout), **options)
    read_rows = {rows.stop - rows.start for name, rows in asked.items() if ".experts." in name}
    masters = {name: each.detach() for name, each in parameters.master_weights().items()}
    with Largest() as saving, Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(1, model=masters, optimiser={}, extra={})
        checkpoints.wait()
        checkpoints.load(checkpoints.latest, model=masters, optimiser={})
    return placing.elements, saving.elements, read_rows


@pytest.mark.parametrize("layout", DIVISIONS)
def test_no_rank_has_all_experts_of_a_layer_while_they_are_read_saved_and_loaded(gloo_pool, tmp_path, layout):
    degree = DIVISIONS[layout]
    results = gloo_pool.run(largest_of_divided, layout, str(tmp_path), ranks=RANKS, timeout_s=60)
    for placing, saving, read_rows in results:
        assert max(read_rows) <= 8 // degree
        assert placing == LARGEST // degree >= saving
