"""Parameters with a free compute layout on a GPU: ranks as threads on one device, another strategy in every step."""

import pytest
import torch

from seqloom.dist import Ranks
from seqloom.engine import bind_plan, run_step
from seqloom.models import ModelAdapter
from seqloom.params import ReshardingParameters
from seqloom.train.model import prepare_layers
from support.shapes import Shape, gathered_per_pass, shaped_plan
from support.steps import Found, Step, tiny_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEP = Step((61, 40, 33, 18, 9), tiny_spec(layers=4, tied=True))
SHAPES = [
    (Shape(1, 2), Shape(2, 1, 1, 1, 3)),
    (Shape(2, 1, 2, 1, 2, "seq1f1b-zb"),),
    (Shape(1, 1, 2, 2),),
    (Shape(1, 2, 2),),
]


def spread(plans, transport):
    """Every plan in turn, with one model."""
    parameters, read, found = (
        ReshardingParameters(prepare_layers(ModelAdapter.of(STEP.model().cuda())), transport),
        STEP.rows(),
        [],
    )
    for plan in plans:
        bound = bind_plan(plan, transport, device="cuda")
        result = run_step(bound, parameters, lambda c: tuple(each.cuda() for each in read(c)), STEP.valid)
        gradients = {name: each.cpu().clone() for name, each in parameters.full_gradients()}
        found.append(Found(result.loss, result.gradient_norm, gradients))
    return found


@pytest.mark.parametrize("per_pass", [False, True])
def test_strategies_in_turn_are_one_process(per_pass):
    plans = [shaped_plan(STEP.lengths, each, ranks=4, layers=4, heads=4) for each in SHAPES]
    plans = [gathered_per_pass(plan, (0, 1)) for plan in plans] if per_pass else plans
    wanted = STEP.alone()
    with Ranks(4) as ranks:
        for found in ranks.run(lambda transport: spread(plans, transport)):
            assert max(each.worst(wanted) for each in found) < 1e-9
