"""Steps of several stages: the numbers of one process, whatever is kept, sent or put off."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from seqloom.dist import Channel, Ranks, SingleRankTransport
from seqloom.dist.transport import Completed
from seqloom.engine.executor import evaluate, run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Span
from seqloom.models.adapter import ModelAdapter
from seqloom.models.split_backward import WeightGradients
from seqloom.params.interface import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.schedules import build_schedule
from support.held_memory import kv_cache_bytes, waiting_units
from support.offloads import copy_on_cpu
from support.pipelines import stages_on
from support.steps import Step, tiny_spec
from support.transports import CountingTransport

torch.set_num_threads(1)
STEP = Step((11, 8, 5, 4), tiny_spec(layers=4))
KINDS = tuple(Checkpoint)


def plan_of(name, hosts, *, pieces=1, chunks=None, width=1, groups=None, kinds=(Checkpoint.NONE,), step=STEP, **more):
    """A plan in the order of a schedule: a sequence is a document.

    Args:
        groups: groups(stage number, ranks, spans) -> the groups of a stage; by default one of all its ranks.
        kinds: checkpointing of the rounds, in turn.
    """
    sharding, offloads = more.pop("sharding", Sharding.FULL), more.pop("offload", False)
    schedule = build_schedule(name, hosts, len(step.lengths), pieces, chunks)
    stages = stages_on(schedule.pp_ranks, width, step.spec.layers)
    groups = groups or (lambda _, ranks, spans: [Group(ranks, len(ranks), 1, spans)])
    rounds = []
    for number, (document, piece, count) in enumerate(schedule.units):
        low, high = (step.lengths[document] * (piece + k) // count for k in (0, 1))
        spans, kind = (Span(document, low, high),), kinds[number % len(kinds)]
        dealt = [tuple(groups(s, stage.ranks, spans)) for s, stage in enumerate(stages)]
        counts = [stage.layer_count if offloads else 0 for stage in stages]
        each_stage = zip(dealt, counts, strict=True)
        works = [StageMicroBatch(each, kind, offloaded_layers=count) for each, count in each_stage]
        rounds.append(Round(tuple(works)))
    limits = Limits(hosts * width, hosts * width, step.spec.heads, tuple((kind, 10**6) for kind in Checkpoint))
    line = Pipeline(stages, tuple(rounds), schedule.pipeline_actions())
    plan = Plan(limits, sharding, Reduce.STEP, step.lengths, (line,), name)
    plan.validate()
    return plan


def worst(threads, plan, step=STEP, *, strict=True):
    wanted = step.alone()
    found = threads(plan.limits.ranks).run(lambda transport: step.spread(plan, transport), strict=strict)
    return max(each.worst(wanted) for each in found)


@pytest.mark.parametrize(
    ("kind", "offloads"),
    [
        *((kind, False) for kind in KINDS[:4]),
        (Checkpoint.NONE, True),
        (Checkpoint.SELECTIVE, True),
        (Checkpoint.FULL, True),
        (Checkpoint.STAGE, True),
    ],
)
def test_every_choice_of_what_is_kept_with_pieces_and_two_ranks_in_a_stage(threads, kind, offloads, monkeypatch):
    copy_on_cpu(monkeypatch)
    assert worst(threads, plan_of("seq1f1b", 2, pieces=2, width=2, kinds=(kind,), offload=offloads)) < 1e-9


@pytest.mark.parametrize(
    ("name", "hosts", "options"),
    [
        ("gpipe", 4, {}),
        ("interleaved", 2, {"chunks": 2}),
        ("zb-v", 2, {}),
        ("zb-v", 1, {}),
        ("seq1f1b-zb", 4, {"pieces": 2}),
        ("seq1f1b-zb", 1, {"pieces": 3}),
        ("seq1f1b-i", 2, {"pieces": 2, "chunks": 2}),
    ],
)
def test_placements_split_backwards_and_tied_heads(threads, name, hosts, options):
    step = replace(STEP, spec=tiny_spec(layers=4, tied=hosts != 4))
    assert worst(threads, plan_of(name, hosts, kinds=KINDS, step=step, **options), step) < 1e-9


@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.NONE])
@pytest.mark.parametrize(("name", "hosts"), [("1f1b", 2), ("zb-v", 1), ("interleaved", 2)])
def test_stages_that_deal_tokens_differently(threads, name, hosts, sharding):
    """Heads, positions, the first rank alone, the second alone; also between two stages of one host."""

    def groups(stage, ranks, spans):
        shapes = ((ranks, 2, 1), (ranks, 1, 2), (ranks[:1], 1, 1), (ranks[1:], 1, 1))
        return [Group(*shapes[stage % 4], spans)]

    plan = plan_of(name, hosts, width=2, groups=groups, sharding=sharding, kinds=KINDS)
    assert worst(threads, plan, strict=sharding == Sharding.NONE) < 1e-9


def test_hidden_states_travel_in_the_linear_layout(threads):
    plan = plan_of("1f1b", 2, width=2)
    line = plan.pipelines[0]

    def moved(work):
        rows = work.attention_layout()
        return replace(work, linear=Layout(rows.rank ^ 1, *rows.columns()[1:]))

    rounds = tuple(Round((moved(each.by_stage[0]), each.by_stage[1])) for each in line.rounds)
    plan = replace(plan, pipelines=(replace(line, rounds=rounds),))
    plan.validate()
    assert worst(threads, plan) < 1e-9


def test_a_plan_may_be_run_again_and_evaluated_and_leaves_nothing_behind(threads):
    plan, wanted = plan_of("seq1f1b-zb", 2, pieces=2, width=2, kinds=KINDS), STEP.alone()

    def body(transport):
        parameters = ReplicatedParameters(STEP.model_adapter(), transport)
        bound, found = bind_plan(plan, transport), []
        for _ in range(2):
            result = run_step(bound, parameters, STEP.rows(), STEP.valid)
            found.append((result.loss, result.gradient_norm, evaluate(bound, parameters, STEP.rows(), STEP.valid)))
            assert (bound.kv_cache is None or kv_cache_bytes(bound.kv_cache) == 0) and not waiting_units(
                parameters.weight_gradients
            )
        return found, result

    told = threads(4).run(body, strict=True)
    for found, result in told:
        assert np.allclose(found, [(wanted.loss, wanted.norm, wanted.loss)] * 2, rtol=1e-12)
        assert result.messages_s > 0 and result.step_s > result.forward_s + result.backward_s + result.messages_s
    assert sum(result.tokens for _, result in told) == 2 * sum(STEP.lengths), "every stage has all tokens"


def test_after_a_step_that_failed_the_next_one_is_right(threads):
    plan, wanted = plan_of("seq1f1b-zb", 1, pieces=2), STEP.alone()
    adapter = STEP.model_adapter()
    parameters, bound = ReplicatedParameters(adapter, SingleRankTransport()), bind_plan(plan, SingleRankTransport())
    read, calls = STEP.rows(), []

    def breaks(context):
        calls.append(context)
        if len(calls) == 4:
            raise OSError("no data")
        return read(context)

    with pytest.raises(OSError, match="no data"):
        run_step(bound, parameters, breaks, STEP.valid)
    assert kv_cache_bytes(bound.kv_cache) > 0
    result = run_step(bound, parameters, read, STEP.valid)
    assert abs(result.gradient_norm / wanted.norm - 1) < 1e-12


def test_weights_wait_for_w(threads, monkeypatch):
    waited, plain = [], WeightGradients.run
    monkeypatch.setattr(
        WeightGradients, "run", lambda self, key: (waited.append(len(self._waiting[key])), plain(self, key))
    )
    assert worst(threads, plan_of("zb-h1", 2)) < 1e-9
    assert waited == [14] * 8, "seven matrices in each of two layers, for four documents on two stages"


def test_messages_are_what_the_plan_says(threads):
    plan = plan_of("1f1b", 4)

    def body(transport):
        counting = CountingTransport(transport)
        STEP.spread(plan, counting)
        return counting.traffic("exchange")

    row = 16 * 8
    for rank, found in enumerate(threads(4).run(body, strict=True)):
        neighbours = 1 if rank in (0, 3) else 2
        assert (found.calls, found.bytes) == (2 * 4 * neighbours, 28 * row * neighbours)


class Losing:
    """A transport that loses the third forward message."""

    def __init__(self, transport, channel=Channel.LAYERS, sent=None):
        self._transport, self._channel, self._sent = transport, channel, [] if sent is None else sent

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def on(self, channel):
        return Losing(self._transport.on(channel), channel, self._sent)

    def exchange(self, sends, receives):
        if self._channel == Channel.FORWARD_EVEN:
            self._sent.append(sends)
            if len(self._sent) == 3:
                return Completed()
        return self._transport.exchange(sends, receives)


def test_a_hang_is_told_with_the_grid(threads):
    plan = plan_of("1f1b", 2)
    with pytest.raises(SeqloomError, match=r"deadlock|size") as caught:
        threads(2).run(lambda transport: STEP.spread(plan, transport if transport.rank else Losing(transport)))
    told = "\n".join(caught.value.__notes__)
    assert "with rank 0" in told or "with rank 1" in told
    assert "pp_rank 0 |" in told and "pp_rank 1 |" in told and "<" in told


def test_a_model_that_cannot_be_cut_is_refused_and_one_of_other_layers():
    def uncut():
        model = STEP.model()
        hidden = lambda ids, context: model.model(ids, context.positions, context)  # noqa: E731
        return ModelAdapter(model, tuple(model.model.layers), hidden, model.lm_head)

    def fewer():
        return ModelAdapter.of(replace(STEP, spec=tiny_spec(layers=2)).model())

    plan = plan_of("1f1b", 2)
    for make, words in ((uncut, "Transformer cannot be cut into stages"), (fewer, "of 4 asked of a model with 2")):

        def body(transport, make=make):
            parameters = ReplicatedParameters(make(), transport)
            return run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)

        with pytest.raises(SeqloomError, match=words), Ranks(2) as two:
            two.run(body)


@pytest.mark.parametrize(("hosts", "pieces"), [(1, 2), (2, 2), (2, 1)])
def test_a_model_of_which_little_learns(threads, hosts, pieces):
    """The first layers are frozen: below what learns, documents in pieces still hand back what they carry."""
    plan = plan_of("seq1f1b-zb", hosts, pieces=pieces)

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2.mlp" in name or "layers.3.self_attn.v" in name)
        return model

    def body(transport):
        parameters = ReplicatedParameters(ModelAdapter.of(freeze(STEP.model())), transport)
        run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)
        return dict(parameters.full_gradients())

    wanted = STEP.alone().gradients
    for found in threads(hosts).run(body):
        assert len(found) == 4
        assert max(float((each - wanted[name]).norm() / wanted[name].norm()) for name, each in found.items()) < 1e-9
