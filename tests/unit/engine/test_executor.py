"""A step through the executor: fixed plans against one process, and what is refused."""

from dataclasses import replace

import pytest
import torch

from seqloom.dist import SingleRankTransport, run_ranks
from seqloom.engine.executor import evaluate, run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models.adapter import ModelAdapter
from seqloom.params.interface import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Reduce, Sharding
from support.steps import Step, one_stage_plan, open_together, tiny_spec

torch.set_num_threads(1)
STEP = Step((20, 9, 1, 17, 3), tiny_spec())
ROUNDS = [
    [Group((0, 1, 2, 3), 2, 2, (Span(0, 0, 20),)), Group((1, 0), 1, 2, (Span(1, 0, 9),))],
    [Group((2, 3), 2, 1, (Span(3, 0, 17), Span(2, 0, 1))), Group((0,), 1, 1, (Span(4, 0, 3),))],
]


def spread(step, plan, **options):
    return run_ranks(plan.limits.ranks, lambda transport: step.spread(plan, transport, **options), strict=True)


@pytest.mark.parametrize("reduce", Reduce)
@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize("checkpoint", Checkpoint)
def test_groups_side_by_side_and_in_rounds_equal_one_process(checkpoint, sharding, reduce):
    """Ranks that have whole parameters run the plans of any sharding: more of them take part with nothing."""
    plan = one_stage_plan(ROUNDS, ranks=5, node_size=5, checkpoint=checkpoint, sharding=sharding, reduce=reduce)
    wanted = STEP.alone()
    for found in spread(STEP, plan):
        assert found.worst(wanted) < 1e-13


@pytest.mark.parametrize("tied", [False, True])
def test_float32_and_tied_heads(tied):
    step = replace(STEP, dtype=torch.float32, spec=tiny_spec(tied=tied))
    exact = replace(step, dtype=torch.float64).alone()
    plan = one_stage_plan(ROUNDS, ranks=4, checkpoint=Checkpoint.SELECTIVE)
    found = spread(step, plan)
    assert found[0].worst(step.alone()) < 1e-5 and found[0].worst(exact) < 1e-5
    assert len({each.loss for each in found}) == len({each.norm for each in found}) == 1
    assert all(torch.equal(found[0].gradients[n], other.gradients[n]) for other in found for n in other.gradients)


def test_rounds_may_be_open_together():
    plan = open_together(one_stage_plan(ROUNDS, ranks=4, checkpoint=Checkpoint.FULL, reduce=Reduce.STEP))
    assert spread(STEP, plan)[0].worst(STEP.alone()) < 1e-13


def test_ranks_whose_labels_do_not_count_are_fine():
    step = replace(STEP, masked=1.1)
    assert step.valid == 1
    assert spread(step, one_stage_plan(ROUNDS, ranks=4))[3].worst(step.alone()) < 1e-13


def test_the_result_has_the_numbers_of_the_step():
    plan = one_stage_plan(ROUNDS, ranks=4)

    def body(transport):
        return run_step(
            bind_plan(plan, transport),
            ReplicatedParameters(ModelAdapter.of(STEP.model()), transport),
            STEP.rows(),
            STEP.valid,
        )

    results = run_ranks(4, body)
    assert sum(each.tokens for each in results) == sum(STEP.lengths) and {each.valid for each in results} == {
        STEP.valid
    }
    for each in results:
        phases = (each.forward_s, each.backward_s, each.parameters_s, each.messages_s, each.rows_s)
        assert min(phases) > 0 and sum(phases) <= each.step_s


def test_steps_follow_each_other_and_optimisers_step():
    """Three steps of plain descent on four ranks equal three on one; gradients do not pile up."""

    def train(plan):
        def body(transport):
            adapter = ModelAdapter.of(STEP.model())
            parameters = ReplicatedParameters(adapter, transport, chunk=7)
            optimiser = torch.optim.SGD(parameters.master_weights().values(), lr=0.05)
            losses = []
            for _ in range(3):
                result = run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid, max_norm=0.5)
                optimiser.step()
                losses.append(result.loss)
            return losses

        return run_ranks(plan.limits.ranks, body)[0]

    alone = one_stage_plan([[Group((0,), 1, 1, tuple(Span(k, 0, n) for k, n in enumerate(STEP.lengths)))]], ranks=1)
    assert train(one_stage_plan(ROUNDS, ranks=4)) == pytest.approx(train(alone), rel=1e-12)
    assert train(alone)[2] < train(alone)[0]


@pytest.mark.parametrize("share", [0.25, 1.0, 4.0])
def test_gradients_are_scaled_to_the_largest_norm(share):
    plan = one_stage_plan(ROUNDS, ranks=4)

    def body(transport):
        parameters = ReplicatedParameters(ModelAdapter.of(STEP.model()), transport)
        bound, rows = bind_plan(plan, transport), STEP.rows()
        norm = run_step(bound, parameters, rows, STEP.valid).gradient_norm
        plain = [each.grad.clone() for each in parameters.master_weights().values()]
        found = run_step(bound, parameters, rows, STEP.valid, max_norm=share * norm)
        clipped = [each.grad for each in parameters.master_weights().values()]
        return norm, found.gradient_norm, plain, clipped

    for norm, again, plain, clipped in run_ranks(4, body):
        assert again == norm, "of the gradients before they are scaled"
        for before, after in zip(plain, clipped, strict=True):
            torch.testing.assert_close(after, min(1.0, share) * before, rtol=1e-14, atol=0)


def test_evaluation_is_the_same_loss_without_gradients():
    plan = one_stage_plan(ROUNDS, ranks=4, checkpoint=Checkpoint.FULL)

    def body(transport):
        parameters = ReplicatedParameters(ModelAdapter.of(STEP.model()), transport)
        loss = evaluate(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)
        return loss, [parameter.grad for parameter in parameters.master_weights().values()]

    for loss, gradients in run_ranks(4, body, strict=True):
        assert loss == pytest.approx(STEP.alone().loss, rel=1e-13) and not any(g is not None for g in gradients)


def test_frozen_parameters_are_neither_summed_nor_counted():
    plan = one_stage_plan(ROUNDS, ranks=4)

    def body(transport):
        model = STEP.model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        parameters = ReplicatedParameters(ModelAdapter.of(model), transport)
        run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)
        return dict(parameters.full_gradients())

    wanted = STEP.alone().gradients
    found = run_ranks(4, body, strict=True)[2]
    assert len(found) == 2
    assert all(torch.allclose(each, wanted[name], rtol=1e-10) for name, each in found.items())


def run_alone(step=STEP, *, rows=None, valid=None):
    spans = tuple(Span(k, 0, n) for k, n in enumerate(step.lengths))
    plan = one_stage_plan([[Group((0,), 1, 1, spans)]], ranks=1)
    parameters = ReplicatedParameters(ModelAdapter.of(step.model()), SingleRankTransport())
    bound = bind_plan(plan, SingleRankTransport())
    return run_step(bound, parameters, rows or step.rows(), step.valid if valid is None else valid)


def test_bad_input_is_refused():
    with pytest.raises(SeqloomError, match="0 valid tokens in the whole step"):
        run_alone(valid=0)
    with pytest.raises(SeqloomError, match=f"{STEP.valid} labels of this step count, {STEP.valid + 1} were announced"):
        run_alone(valid=STEP.valid + 1)
    with pytest.raises(SeqloomError, match="rank 0 holds 50 tokens in it"):
        run_alone(rows=lambda context: tuple(each[1:] for each in STEP.rows()(context)))
    with pytest.raises(SeqloomError, match="label 22 with a vocabulary of 22"):
        run_alone(replace(STEP, spec=tiny_spec(vocabulary=22)), rows=lambda c: (c.positions * 0, c.positions * 0 + 22))
    with pytest.raises(SeqloomError, match="Linear is not the reference transformer"):
        ModelAdapter.of(torch.nn.Linear(2, 2))


def test_shards_on_ranks_that_skip_rounds_are_refused():
    plan = one_stage_plan(ROUNDS, ranks=4, node_size=2, sharding=Sharding.HYBRID)

    class Sharing(ReplicatedParameters):
        shard_ranks = (0, 1, 2, 3)

    def body(transport):
        parameters = Sharing(ModelAdapter.of(STEP.model()), transport)
        return run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)

    with pytest.raises(SeqloomError, match=r"hybrid sharding, in which rank \d runs the rounds of ranks"):
        run_ranks(4, body)
