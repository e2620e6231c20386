"""A head on all stages, on gloo processes with sharded parameters: its gradient is the sum of all, counted once."""

from dataclasses import replace

import pytest
import torch

from seqloom.engine.executor import evaluate, run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.params.pipeline_fsdp import PipelineFSDP
from seqloom.params.placement import Placement
from seqloom.plan import Sharding
from support.head_stages import STEP, plan_with_head_stages
from support.steps import Found, tiny_spec

torch.set_num_threads(1)


def one_step(transport, step, plan):
    """A step, and then its loss without gradients; which ranks save the head."""
    parameters = PipelineFSDP(
        step.model_adapter(), transport, Placement(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size)
    )
    bound = bind_plan(plan, transport)
    result = run_step(bound, parameters, step.rows(), step.valid)
    gradients = {name: each.clone() for name, each in parameters.full_gradients()}
    loss = evaluate(bind_plan(plan, transport), parameters, step.rows(), step.valid)
    saves = {name for name, shard in parameters.shards() if shard.values is not None}
    return Found(result.loss, result.gradient_norm, gradients), loss, saves


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "pp_size", "options"),
    [
        ("1f1b", 4, {"width": 2, "lead": 2}),
        ("seq1f1b", 2, {"pieces": 2, "width": 4, "sharding": Sharding.HYBRID, "node_size": 2}),
        ("zb-h1", 4, {"width": 2, "sharding": Sharding.NONE}),
    ],
)
def test_a_head_on_all_stages_equals_one_process(gloo_pool, name, pp_size, options, tied):
    step = replace(STEP, spec=tiny_spec(layers=4, tied=tied))
    plan = plan_with_head_stages(name, pp_size, step=step, **options)
    results, wanted = gloo_pool.run(one_step, step, plan, ranks=8), step.alone()
    assert max(found.worst(wanted) for found, _, _ in results) < 1e-9
    assert len({found.norm for found, _, _ in results}) == 1
    assert all(abs(loss - wanted.loss) < 1e-12 for _, loss, _ in results)
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert {rank for rank, (*_, saves) in enumerate(results) if head in saves} <= set(range(8 // pp_size))
