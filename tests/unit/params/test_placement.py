"""Which rank holds which parameters, and models of which only a part has values."""

import pytest
import torch

from seqloom.errors import SeqloomError
from seqloom.models import Transformer
from seqloom.models.adapter import ModelAdapter
from seqloom.params.placement import Placement, drop_other_stages, parameters_of_stages
from seqloom.plan import LayerRange, Sharding, Stage
from support.steps import Step, tiny_spec

STEP = Step((3,), tiny_spec(layers=4, tied=True))


def stages(*layers, ranks):
    ends = torch.tensor(layers).cumsum(0).tolist()
    return tuple(Stage(r, (end - n, end)) for n, end, r in zip(layers, ends, ranks, strict=True))


def test_a_v_of_two_pp_ranks():
    low, high = (0, 1, 2, 3), (4, 5, 6, 7)
    placement = Placement(stages(1, 1, 1, 1, ranks=(low, high, high, low)), Sharding.HYBRID, 2)
    assert placement.ranks_by_pp_rank == (low, high) and placement.pp_rank_of(3) == 0
    assert placement.layer_ranges(0) == (LayerRange(0, 1, 4), LayerRange(3, 4, 4)) and placement.layer_ranges(1) == (
        LayerRange(1, 2, 4),
        LayerRange(2, 3, 4),
    )
    assert placement.mesh(8).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize(("sharding", "shape"), [(Sharding.FULL, (2, 1, 3)), (Sharding.NONE, (2, 3, 1))])
def test_the_mesh_of_other_shardings(sharding, shape):
    assert Placement(stages(2, 2, ranks=((0, 1, 2), (3, 4, 5))), sharding, 2).mesh(6).shape == shape


def test_stages_that_do_not_fit_are_refused():
    with pytest.raises(SeqloomError, match="nodes of 2: every stage needs equally many"):
        Placement(stages(2, 2, ranks=((0, 1, 2), (3, 4, 5))), Sharding.HYBRID, 2).mesh(6)
    with pytest.raises(SeqloomError, match="choose a number of stages that divides the ranks"):
        Placement(stages(2, 2, ranks=((0, 1, 2), (3, 4, 5))), Sharding.FULL, 2).mesh(8)


@pytest.mark.parametrize("parts", [(LayerRange(0, 1, 4),), (LayerRange(1, 2, 4), LayerRange(3, 4, 4))])
def test_a_part_of_a_model_has_the_values_of_the_whole(parts):
    """What is tied stays tied."""
    whole = Transformer(STEP.spec, seed=5)
    wanted = {name: each.detach().clone() for name, each in parameters_of_stages(ModelAdapter.of(whole), parts).items()}
    drop_other_stages(ModelAdapter.of(whole), parts)
    own = dict(whole.named_parameters())
    assert [*own] == [name for name, _ in Transformer(STEP.spec, device="meta").named_parameters()]
    assert {name for name, each in own.items() if not each.is_meta} == wanted.keys()
    assert all(torch.equal(own[name], each) for name, each in wanted.items())
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
