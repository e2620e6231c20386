"""Sharded parameters on gloo processes: every sharding, reduction and checkpointing gives what one process finds."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import SingleRankTransport
from seqloom.engine.executor import evaluate, run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import TransformerOptions
from seqloom.models.adapter import ModelAdapter
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.params.fsdp import FSDPParameters
from seqloom.params.interface import ReplicatedParameters
from seqloom.params.resharding import ReshardingParameters
from seqloom.plan import Checkpoint, Group, Reduce, Remap, Sharding
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.config import Optimiser
from seqloom.train.model import gather_state_dict
from seqloom.train.optim import make_optimiser, state_by_name
from seqloom.train.run_folder import latest_checkpoint
from support.steps import Found, Step, in_tp_groups, one_stage_plan, open_together, tiny_spec
from support.tiny_models import HYBRIDS, tiny_model
from support.two_layouts import shifted

torch.set_num_threads(1)
STEP = Step((20, 9, 1, 17, 3, 30), tiny_spec())
ROUNDS = [
    [Group((0, 1, 2, 3), 2, 2, (Span(0, 0, 20),)), Group((4, 5, 6, 7), 1, 4, (Span(5, 0, 30),))],
    [Group((2, 3), 2, 1, (Span(3, 0, 17), Span(2, 0, 1))), Group((0,), 1, 1, (Span(4, 0, 3),))],  # node 0 alone
    [Group((6, 7), 1, 2, (Span(1, 0, 9),))],  # node 1 alone
]
NODE = 4


def spread(transport, step, plan):
    """The step under the plan's own sharding."""
    return step.spread(plan, transport, partial(sharded, plan=plan))


def sharded(adapter, transport, plan):
    """Parameters under a plan's sharding."""
    if plan.sharding == Sharding.FREE:
        return ReshardingParameters(adapter, transport)
    stage = plan.pipelines[0].stages[0]
    degrees = {"expert": stage.expert, "tensor": stage.tensor}
    return FSDPParameters(adapter, transport, plan.sharding, node_size=NODE, **degrees)


def collected(transport, step, plan):
    """What rank 0 gathers of the parameters, and what they are."""
    parameters = sharded(step.model_adapter(), transport, plan)
    found = gather_state_dict(torch.nn.Module(), parameters, transport, torch.device("cpu"))
    wanted = dict(step.model().named_parameters())
    return transport.rank, found.keys() == wanted.keys(), all(torch.equal(found[k], wanted[k]) for k in found)


def planned(rounds=ROUNDS, **options):
    return one_stage_plan(rounds, ranks=8, node_size=NODE, **options)


KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)


@pytest.mark.parametrize("reduce", Reduce)
@pytest.mark.parametrize("sharding", Sharding)
def test_every_sharding_equals_one_process(gloo_pool, sharding, reduce):
    """Three rounds, each with a checkpointing of its own; nodes run different rounds where the sharding lets them."""
    plan = planned(sharding=sharding, reduce=reduce, checkpoint=KINDS)
    found = gloo_pool.run(spread, STEP, plan, ranks=8)
    wanted = STEP.alone()
    assert max(each.worst(wanted) for each in found) < 1e-9
    assert len({each.loss for each in found}) == len({each.norm for each in found}) == 1


@pytest.mark.parametrize("remap", Remap)
@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.HYBRID])
def test_two_layouts_equal_one_process(gloo_pool, sharding, remap):
    """Around attention and around the MLP; a node's ranks, or all, meet in one all-to-all."""
    plan = shifted(planned(sharding=sharding, checkpoint=KINDS), remap)
    found, wanted = gloo_pool.run(spread, STEP, plan, ranks=8), STEP.alone()
    assert max(each.worst(wanted) for each in found) < 1e-9


@pytest.mark.parametrize("sharding", Sharding)
def test_tied_heads_in_float32(gloo_pool, sharding):
    exact = replace(STEP, spec=tiny_spec(tied=True))
    plan = planned(sharding=sharding, checkpoint=KINDS[::-1])
    found = gloo_pool.run(spread, replace(exact, dtype=torch.float32), plan, ranks=8)
    assert max(each.worst(exact.alone()) for each in found) < 1e-5


@pytest.mark.parametrize("sharding", [Sharding.HYBRID, Sharding.NONE])
def test_a_replica_may_have_nothing_to_do(gloo_pool, sharding):
    step = replace(STEP, lengths=(20, 9))
    plan = planned([[Group((0, 1), 1, 2, (Span(0, 0, 20), Span(1, 0, 9)))]], sharding=sharding)
    found = gloo_pool.run(spread, step, plan, ranks=8)
    assert max(each.worst(step.alone()) for each in found) < 1e-9


def test_rounds_may_be_open_together(gloo_pool):
    plan = open_together(planned(sharding=Sharding.FULL, reduce=Reduce.STEP, checkpoint=KINDS))
    assert gloo_pool.run(spread, STEP, plan, ranks=8)[0].worst(STEP.alone()) < 1e-9


def trained_with(transport, step, plan, compute, kind):
    """Losses of four clipped AdamW steps, and what a rank holds."""
    adapter = ModelAdapter.of(step.model())
    recompute_layers(adapter.layers)
    names = [name for name, _ in adapter.module.named_parameters()]
    if kind == Sharding.FREE:
        parameters = ReshardingParameters(adapter, transport, param_dtype=compute)
    else:
        parameters = FSDPParameters(adapter, transport, kind, node_size=NODE, param_dtype=compute, keep_gathered=True)
    assert list(parameters.master_weights()) == names
    optimiser = torch.optim.AdamW(parameters.master_weights().values(), lr=0.02)
    bound, losses = bind_plan(plan, transport), []
    for _ in range(4):
        result = run_step(bound, parameters, step.rows(), step.valid, max_norm=1.0)
        optimiser.step()
        losses.append(result.loss)
    losses.append(evaluate(bound, parameters, step.rows(), step.valid))
    held = {parameter.grad.dtype for parameter in parameters.master_weights().values()}
    return losses, held, sum(parameter.to_local().numel() for parameter in parameters.master_weights().values())


def idle_then_busy(transport, step, plans, kind):
    """Evaluate everywhere, train where only node 0 works, and return the loss that everyone then finds."""
    parameters = FSDPParameters(ModelAdapter.of(step.model()), transport, kind, node_size=NODE)
    optimiser = torch.optim.SGD(parameters.master_weights().values(), lr=0.1)
    evaluate(bind_plan(plans[0], transport), parameters, step.rows(), step.valid)
    run_step(bind_plan(plans[1], transport), parameters, step.rows(), step.valid)
    optimiser.step()
    return evaluate(bind_plan(plans[2], transport), parameters, step.rows(), step.valid)


@pytest.mark.parametrize("kind", [Sharding.HYBRID, Sharding.NONE])
def test_a_rank_that_only_evaluated_has_the_new_parameters(gloo_pool, kind):
    """What evaluation gathered is dropped: a rank that skips the next step's rounds must not keep old values."""
    step = replace(STEP, lengths=(12, 8))
    documents = (Span(0, 0, 12), Span(1, 0, 8))
    node0, node1 = (planned([[Group((rank,), 1, 1, documents)]], sharding=kind) for rank in (0, 7))
    both = planned([[Group((0,), 1, 1, documents[:1]), Group((7,), 1, 1, documents[1:])]], sharding=kind)
    after = [gloo_pool.run(idle_then_busy, step, (both, node0, last), kind, ranks=8)[0] for last in (node0, node1)]
    assert after[0] == pytest.approx(after[1], rel=1e-12) and after[0] < step.alone().loss


@pytest.mark.slow
def test_training_is_the_same_under_every_sharding(gloo_pool):
    curves = {}
    for kind in Sharding:
        found = gloo_pool.run(trained_with, STEP, planned(sharding=kind, checkpoint=KINDS), None, kind, ranks=8)
        curves[kind] = found[0][0]
        whole = sum(parameter.numel() for parameter in STEP.model().parameters())
        copies = {Sharding.FULL: 1, Sharding.HYBRID: 2, Sharding.NONE: 8, Sharding.FREE: 1}[kind]
        assert sum(each[2] for each in found) == copies * whole
    for kind in Sharding:
        assert curves[kind] == pytest.approx(curves[Sharding.NONE], rel=1e-9)
    assert curves[Sharding.NONE][4] < curves[Sharding.NONE][0]


@pytest.mark.slow  # tests/nccl trains in bfloat16 under every sharding too
@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.NONE])
def test_half_precision_has_masters_and_gradients_in_float32(gloo_pool, sharding):
    step = replace(STEP, dtype=torch.float32)
    plan = planned(sharding=sharding, reduce=Reduce.STEP, checkpoint=KINDS)
    losses, dtypes, _ = gloo_pool.run(trained_with, step, plan, torch.bfloat16, sharding, ranks=8)[0]
    exact = gloo_pool.run(trained_with, step, plan, None, sharding, ranks=8)[0][0]
    assert dtypes == {torch.float32} and losses != exact
    assert losses[0] == pytest.approx(exact[0], rel=0.01) and losses[4] == pytest.approx(exact[4], rel=0.1)


def adapted(transport, step, plan):
    """Gradients of a model with frozen parts, and with one that ranks without tokens do not touch."""
    model = step.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    model.shift = torch.nn.Parameter(torch.zeros(16, dtype=step.dtype))

    def hidden(ids, context):
        found = model.model(ids, context.positions, context)
        return found + model.shift if context.tokens else found

    adapter = ModelAdapter(model, tuple(model.model.layers), hidden, model.lm_head)
    recompute_layers(adapter.layers)
    parameters = FSDPParameters(adapter, transport, plan.sharding, node_size=NODE)
    run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)
    return dict(parameters.full_gradients())


@pytest.mark.parametrize("reduce", Reduce)
def test_frozen_parameters_and_parameters_that_some_ranks_do_not_touch(gloo_pool, reduce):
    plan = planned(sharding=Sharding.FULL, reduce=reduce, checkpoint=KINDS)
    found, wanted = gloo_pool.run(adapted, STEP, plan, ranks=8)[1], STEP.alone().gradients
    assert found.pop("shift").norm() > 0 and len(found) == 2
    for name, each in found.items():
        assert float((each - wanted[name]).norm() / wanted[name].norm()) < 1e-9


MIXTURE = replace(STEP, spec=tiny_spec(experts=8, active_experts=3, expert_ffn=6, shared_ffn=8, moe_layers=(1,)))


@pytest.mark.parametrize(
    ("sharding", "expert", "experts"),
    [
        (Sharding.FULL, 2, 12),  # six experts over four ranks: each is cut inside
        *((Sharding.FULL, 8, 8), (Sharding.HYBRID, 4, 8), (Sharding.NONE, 2, 8), (Sharding.FREE, 4, 8)),
        pytest.param(Sharding.FULL, 4, 8, marks=pytest.mark.slow),
        pytest.param(Sharding.HYBRID, 2, 6, marks=pytest.mark.slow),
        pytest.param(Sharding.NONE, 8, 8, marks=pytest.mark.slow),
    ],
)
def test_divided_experts_under_every_sharding(gloo_pool, sharding, expert, experts):
    """Ranks keep shards of their own experts alone, inside a node and over both."""
    step = replace(MIXTURE, spec=replace(MIXTURE.spec, experts=experts))
    plan = planned(sharding=sharding, checkpoint=KINDS, reduce=Reduce.STEP)
    [line] = plan.pipelines
    plan = replace(plan, pipelines=(replace(line, stages=(replace(line.stages[0], expert=expert),)),))
    plan.validate()
    found, wanted = gloo_pool.run(spread, step, plan, ranks=8), step.alone()
    assert max(each.worst(wanted) for each in found) < 1e-9
    assert len({each.loss for each in found}) == len({each.norm for each in found}) == 1
    for rank, all_there, right in gloo_pool.run(collected, step, plan, ranks=8):
        assert right and all_there == (rank == 0), "rank 0 alone gathers what ranks have shards of"


def trained_in_tp_groups(transport, step, plan, folder):
    """What a step finds; values after two steps of AdamW; those that a checkpoint brings where nothing is divided."""
    found = spread(transport, step, plan)
    parameters = sharded(step.model_adapter(), transport, plan)
    optimiser = make_optimiser(parameters.master_weights(), Optimiser(lr=0.01, eps=0.01))
    for _ in range(2):
        run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)
        optimiser.step()
        parameters.zero_grad()
    whole = {name: each.clone() for name, each in parameters.full_parameters()}
    with Checkpoints(folder, keep=1) as checkpoints:
        states = state_by_name(optimiser)
        checkpoints.save(1, model=parameters.master_weights(), optimiser=states, extra={})
    other = FSDPParameters(step.model_adapter(), transport, Sharding.FULL)
    others = make_optimiser(other.master_weights(), Optimiser(lr=0.01, eps=0.01))
    with Checkpoints(folder, keep=1) as checkpoints:
        path = latest_checkpoint(folder)
        checkpoints.load(path, model=other.master_weights(), optimiser=state_by_name(others))
    loaded = dict(other.full_parameters())
    collected = gather_state_dict(torch.nn.Module(), parameters, transport, torch.device("cpu"))
    same = all(torch.equal(each, whole[name]) for found in (loaded, collected) for name, each in found.items())
    return found, whole, same and loaded.keys() == whole.keys(), transport.rank or collected.keys() == whole.keys()


SPARSE = {"moe_layers": (1,), "experts": 6, "active_experts": 2, "expert_ffn": 6, "shared_ffn": 8}
UNEVEN = replace(STEP, spec=tiny_spec(ffn=12, hidden=10, head_dim=2, tied=True, vocabulary=26, **SPARSE))
"""Rows of slices that ranks cannot share evenly, and experts and a tied table that TP groups divide."""
WORDS = replace(STEP, spec=replace(STEP.spec, vocabulary=24))
"""Embedding and head that TP groups cut by rows of the vocabulary."""


@pytest.mark.parametrize(
    ("sharding", "tensor", "step"),
    [
        (Sharding.FULL, 2, UNEVEN),
        pytest.param(Sharding.HYBRID, 2, UNEVEN, marks=pytest.mark.slow),
        pytest.param(Sharding.NONE, 2, STEP, marks=pytest.mark.slow),
        pytest.param(Sharding.FULL, 4, STEP, marks=pytest.mark.slow),
        pytest.param(Sharding.FULL, 4, WORDS, marks=pytest.mark.slow),
        pytest.param(Sharding.HYBRID, 4, WORDS, marks=pytest.mark.slow),
        pytest.param(Sharding.NONE, 4, WORDS, marks=pytest.mark.slow),
    ],
)
def test_tp_groups_under_every_sharding(gloo_pool, tmp_path, sharding, tensor, step):
    """Nodes run different rounds where the sharding lets them; a checkpoint loads where nothing is divided."""
    kv_heads = max(tensor, step.spec.kv_heads)
    options = TransformerOptions(qk_norm=True, qkv_bias=True)
    step = replace(step, spec=replace(step.spec, kv_heads=kv_heads, heads=2 * kv_heads), options=options)
    units = 8 // tensor
    inner, halves = range(units), (tuple(range(units // 2)), tuple(range(units // 2, units)))
    rounds = [
        [
            Group(halves[0], len(halves[0]), 1, (Span(0, 0, 20),)),
            Group(halves[1], 1, len(halves[1]), (Span(5, 0, 30),)),
        ],
        [Group(halves[0], 1, len(halves[0]), (Span(3, 0, 17), Span(2, 0, 1), Span(4, 0, 3)))],  # node 0 alone
        [Group((inner[-1],), 1, 1, (Span(1, 0, 9),))],
    ]
    options = {"heads": step.spec.heads // tensor, "node_size": NODE // tensor, "sharding": sharding}
    plan = in_tp_groups(one_stage_plan(rounds, ranks=units, checkpoint=KINDS, **options), tensor)
    results = gloo_pool.run(trained_in_tp_groups, step, plan, tmp_path, ranks=8)
    wanted, alone = step.alone(), ReplicatedParameters(step.model_adapter(), SingleRankTransport())
    optimiser = make_optimiser(alone.master_weights(), Optimiser(lr=0.01, eps=0.01))
    single = one_stage_plan([[Group((0,), 1, 1, tuple(Span(k, 0, n) for k, n in enumerate(step.lengths)))]], ranks=1)
    for _ in range(2):
        run_step(bind_plan(single, SingleRankTransport()), alone, step.rows(), step.valid)
        optimiser.step()
        alone.zero_grad()
    for found, whole, same, all_there in results:
        assert found.worst(wanted) < 1e-9 and same and all_there
        for name, each in alone.full_parameters():
            assert float((whole[name] - each).norm() / each.norm()) < 1e-7, name
    assert len({found.norm for found, *_ in results}) == 1


def with_transformers(transport, name, lora, plan, make):
    """A step of a tiny Hugging Face model on this rank; `make` says how its parameters are kept."""
    from seqloom.integrations.transformers import attach, model_adapter

    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if name == "mixtral" else {}
    model = tiny_model(name, **routed)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=drawn))
    own = model_adapter(attach(model.double()))
    recompute_layers(own.layers)
    parameters = (
        ReplicatedParameters(own, transport) if make is None else FSDPParameters(own, transport, make, node_size=NODE)
    )
    result = run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)
    return Found(result.loss, result.gradient_norm, {name: each.clone() for name, each in parameters.full_gradients()})


@pytest.mark.parametrize(
    ("name", "lora", "sharding", "remap"),
    [
        pytest.param("llama-tied", False, Sharding.HYBRID, None, marks=pytest.mark.slow),
        ("mixtral", False, Sharding.FULL, None),  # a rank without tokens has experts that nobody calls
        pytest.param("qwen2-windows", False, Sharding.NONE, None, marks=pytest.mark.slow),
        ("llama", True, Sharding.FULL, None),
        ("phi", False, Sharding.HYBRID, None),  # a head with a bias
        pytest.param("llama-tied", False, Sharding.FULL, Remap.ATTENTION, marks=pytest.mark.slow),
        pytest.param("mixtral", False, Sharding.HYBRID, Remap.MLP, marks=pytest.mark.slow),
        pytest.param("llama", True, Sharding.FULL, Remap.MLP, marks=pytest.mark.slow),
        ("minicpm3", False, Sharding.FULL, None),  # latents travel, and every rank has gradients of their projection
        pytest.param("minicpm3", False, Sharding.HYBRID, Remap.ATTENTION, marks=pytest.mark.slow),
        ("bamba", False, Sharding.FULL, None),  # states do, and a rank without tokens scans nothing
        pytest.param("qwen3-next", False, Sharding.HYBRID, Remap.ATTENTION, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")  # transformers warns of missing kernels
def test_models_of_transformers_under_every_sharding(gloo_pool, name, lora, sharding, remap):
    spans = tuple(Span(k, 0, n) for k, n in enumerate(STEP.lengths))
    alone = one_stage_plan([[Group((0,), 1, 1, spans)]], ranks=1)
    wanted = with_transformers(SingleRankTransport(), name, lora, alone, None)
    rounds = [[replace(group, latent=True, states=True) for group in groups] for groups in ROUNDS]
    plan = planned(rounds, sharding=sharding, checkpoint=KINDS)
    plan = plan if remap is None else shifted(plan, remap)
    found = gloo_pool.run(with_transformers, name, lora, plan, sharding, ranks=8)
    tolerance = 1e-6 if name in HYBRIDS else 1e-9  # mixers compute norms and decays in float32
    assert max(each.worst(wanted) for each in found) < tolerance


def refused(transport, step):
    """Messages of what cannot be done."""
    adapter, messages = ModelAdapter.of(step.model()), []
    cases = {
        "no node size": (adapter, Sharding.HYBRID, None),
        "odd nodes": (adapter, Sharding.HYBRID, 3),
        "free": (adapter, Sharding.FREE, None),
        "meta": (ModelAdapter.of(type(step.model())(step.spec, device="meta")), Sharding.FULL, None),
    }
    for name, (given, kind, node) in cases.items():
        try:
            FSDPParameters(given, transport, kind, node_size=node)
        except SeqloomError as error:
            messages.append((name, str(error)))
    adapter.head.float()
    try:
        FSDPParameters(adapter, transport, Sharding.FULL)
    except SeqloomError as error:
        messages.append(("dtypes", str(error)))
    return dict(messages)


def test_bad_input_is_refused(gloo_pool):
    found = gloo_pool.run(refused, STEP, ranks=8)[5]
    assert "nodes of None" in found["no node size"] and "nodes of 3" in found["odd nodes"]
    assert "use ReshardingParameters" in found["free"]
    assert "load the model there" in found["meta"] and "torch.float32', 'torch.float64" in found["dtypes"]


def other_sharding(transport, step, plan):
    parameters = FSDPParameters(ModelAdapter.of(step.model()), transport, Sharding.FULL)
    try:
        run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)
    except SeqloomError as error:
        return str(error)


def test_a_plan_for_another_sharding_is_refused_before_anything_is_sent(gloo_pool):
    for message in gloo_pool.run(other_sharding, STEP, planned(sharding=Sharding.HYBRID), ranks=8):
        assert "hybrid sharding" in message and "shards are on ranks (0, 1, 2, 3, 4, 5, 6, 7)" in message


def test_part_of_a_job_is_refused():
    assert not dist.is_initialized()
    with pytest.raises(SeqloomError, match=r"no torch\.distributed job"):
        FSDPParameters(ModelAdapter.of(STEP.model()), SingleRankTransport(), Sharding.FULL)


PIECES = [
    [Group((0, 1, 2, 3), 2, 2, (Span(5, 0, 13),)), Group((4,), 1, 1, (Span(2, 0, 1), Span(4, 0, 3)))],
    [Group((0, 1, 2, 3), 2, 2, (Span(5, 13, 22),)), Group((4, 5, 6, 7), 1, 4, (Span(0, 0, 20),))],
    [Group((0, 1, 2, 3), 2, 2, (Span(5, 22, 30),))],  # node 0 alone
    [Group((6, 7), 1, 2, (Span(1, 0, 9),)), Group((0, 1), 1, 2, (Span(3, 0, 17),))],
]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("sharding", "reduce"),
    [
        (Sharding.FULL, Reduce.ROUND),
        *(pytest.param(each, Reduce.STEP, marks=SLOW) for each in Sharding),
        *(pytest.param(each, Reduce.ROUND, marks=SLOW) for each in (Sharding.HYBRID, Sharding.NONE, Sharding.FREE)),
    ],
)
def test_pieces_of_a_document_on_one_stage_equal_one_process(gloo_pool, sharding, reduce):
    """Forward piece after piece, then backward from the last; all but the last are run forward once more."""
    kinds = (Checkpoint.STAGE, Checkpoint.STAGE, Checkpoint.NONE, Checkpoint.FULL)
    plan = planned(PIECES, sharding=sharding, reduce=reduce, checkpoint=kinds)
    assert [str(action) for action in plan.pipelines[0].actions[0] if action.kind in "FB"][:6] == (
        ["0F0", "0F1", "0F2", "0B2", "0B1", "0B0"]
    )
    found = gloo_pool.run(spread, STEP, plan, ranks=8)
    assert max(each.worst(STEP.alone()) for each in found) < 1e-9
