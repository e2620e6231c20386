"""Parameters of stages on gloo processes: what hosts hold, sums over shards, replicas and tied tables, checkpoints."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import bind_single_rank
from seqloom.engine.executor import run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.params.fsdp import FSDPParameters
from seqloom.params.pipeline_fsdp import PipelineFSDP
from seqloom.params.placement import Placement
from seqloom.plan import LayerRange, Sharding, Stage
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.config import Optimiser
from seqloom.train.model import gather_state_dict
from seqloom.train.optim import make_optimiser, state_by_name
from seqloom.train.run_folder import Manifest, latest_checkpoint
from support.held_memory import waiting_units
from support.scheduled import fixed_step
from support.steps import Found, Step, in_tp_groups, tiny_spec
from support.tiny_models import randomised, tiny_model

torch.set_num_threads(1)
STEP = Step((11, 5, 8, 3, 1, 7), tiny_spec(layers=5, hidden=12))  # rows that two ranks or four do not divide
RANKS = 8


def placed(layers, hosts, sharding=Sharding.FULL, order=None, node_size=2):
    """Stages of so many layers each; `order` names the host of each, 0 .. hosts - 1 by default."""
    each = RANKS // hosts
    ends = torch.tensor(layers).cumsum(0).tolist()
    stages = [
        Stage(tuple(range(host * each, host * each + each)), (end - count, end))
        for host, count, end in zip(order or range(hosts), layers, ends, strict=True)
    ]
    return Placement(tuple(stages), sharding, node_size)


def run_units(transport, step, placement, parameters, weights=None):
    """All forwards, then all backwards: rank i of every host has every document whose number is i in turn."""
    each = len(placement.ranks_by_pp_rank[0])
    place = placement.ranks_by_pp_rank[placement.pp_rank_of(transport.rank)].index(transport.rank)
    ids, labels = step.documents()
    numbers = range(place, len(ids), each)
    contexts = {number: bind_single_rank((len(ids[number]),)) for number in numbers}
    peer = lambda stage: placement.stages[stage].ranks[place]  # noqa: E731
    mine = [stage for stage in range(len(placement.stages)) if peer(stage) == transport.rank]
    parts, total = dict(zip(mine, placement.layer_ranges(placement.pp_rank_of(transport.rank)), strict=True)), 0.0
    open_units, kept, sent = {}, {}, []
    for stage in mine:
        parameters.unshard(parts[stage])
    for stage in range(len(placement.stages)):
        for number in numbers if stage in mine else ():
            part, given = parts[stage], ids[number]
            if stage:
                given = kept.pop((stage - 1, number), None)
                if given is None:
                    given = parameters.empty_hidden_states(len(ids[number]))
                    dist.recv(given, peer(stage - 1))
                given.requires_grad_()
            out = parameters.forward(part, given, labels[number] if part.has_head else None, contexts[number])
            open_units[stage, number] = given, out
            if part.has_head:
                total += out.item() / step.valid
            elif stage + 1 in mine:
                kept[stage, number] = out.detach().clone()
            else:
                sent.append((out, dist.isend(out.detach(), peer(stage + 1))))
    for stage in reversed(range(len(placement.stages))):
        for number in numbers if stage in mine else ():
            given, out = open_units[stage, number]
            last = torch.tensor(1 / step.valid, dtype=out.dtype) if parts[stage].has_head else None
            gradient = kept.pop((stage, number), last)
            if gradient is None:
                gradient = torch.empty_like(out)
                dist.recv(gradient, peer(stage + 1))
            if weights is None:
                parameters.backward(out, gradient, reduce=False)
            else:
                with weights.deferred((stage, number)):
                    parameters.backward(out, gradient, reduce=False)
            if stage and stage - 1 in mine:
                kept[stage - 1, number] = given.grad
            elif stage:
                sent.append((given, dist.isend(given.grad, peer(stage - 1))))
    for key in waiting_units(weights) if weights is not None else ():
        weights.run(key)
    for _, handle in sent:
        handle.wait()
    for stage in mine:
        parameters.reduce(parts[stage])
        parameters.reshard(parts[stage])
    parameters.finish_gradients()
    loss = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(loss)
    return loss.item()


def one_step(transport, step, placement, compute=None):
    adapter = step.model_adapter()
    weights = defer_weight_gradients(adapter.layers)
    parameters = PipelineFSDP(adapter, transport, placement, param_dtype=compute)
    loss = run_units(transport, step, placement, parameters, weights)
    found = Found(loss, float(parameters.gradient_norm()), {k: g.clone() for k, g in parameters.full_gradients()})
    held = {name: tuple(master.to_local().shape) for name, master in parameters.master_weights().items()}
    assert {each.grad.dtype for each in parameters.master_weights().values()} == {step.dtype}
    copies = sum(each.untyped_storage().nbytes() for each in adapter.module.parameters() if not each.is_meta)
    return found, held, copies


CASES = {
    "four hosts, full": (placed((1, 1, 2, 1), 4), False),
    "two hosts, nodes of two": (placed((3, 2), 2, Sharding.HYBRID), True),
    "two hosts in turn, none": (placed((1, 1, 1, 2), 2, Sharding.NONE, (0, 1, 0, 1)), True),
    "two hosts in a V": (placed((1, 1, 1, 2), 2, Sharding.FULL, (0, 1, 1, 0)), True),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_one_process(gloo_pool, name):
    placement, tied = CASES[name]
    step = replace(STEP, spec=replace(STEP.spec, tied=tied))
    results, wanted = gloo_pool.run(one_step, step, placement, ranks=RANKS), step.alone()
    assert max(found.worst(wanted) for found, _, _ in results) < 1e-9
    assert len({found.norm for found, _, _ in results}) == 1


def test_half_precision_adds_up_in_float32(gloo_pool):
    step = replace(STEP, dtype=torch.float32)
    placement = placed((1, 1, 1, 2), 2, Sharding.FULL, (0, 1, 1, 0))
    found = gloo_pool.run(one_step, step, placement, torch.bfloat16, ranks=RANKS)[0][0]
    single = replace(STEP, dtype=torch.bfloat16).alone().worst(STEP.alone())
    assert 1e-4 < found.worst(STEP.alone()) < 2 * single


def of_transformers(step, name, lora):
    """A model of transformers with as many layers."""
    from seqloom.integrations.transformers import attach
    from seqloom.integrations.transformers import model_adapter as described

    model = tiny_model(name, num_hidden_layers=step.spec.layers)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        randomised(model, 1)
    adapter = described(attach(model.double()))
    recompute_layers(adapter.layers)
    return replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers))


def run_transformers(transport, step, plan, name, lora):
    parameters = PipelineFSDP(
        of_transformers(step, name, lora),
        transport,
        Placement(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size),
    )
    result = run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)
    return Found(result.loss, result.gradient_norm, {name: each.clone() for name, each in parameters.full_gradients()})


@pytest.mark.parametrize(("name", "lora"), [("qwen3", False), ("phi", False), ("llama", True)])
def test_models_of_transformers_in_stages(gloo_pool, name, lora):
    """A tied head, one with a bias, or parameters that are not trained; documents in pieces, backwards in halves."""
    step, plan = fixed_step("seq1f1b-zb", 4, 2, (2, 1, 3))
    adapter, context = of_transformers(step, name, lora), bind_single_rank(step.lengths)
    loss = ModelWithLoss(adapter)(*step.rows()(context), context) / step.valid
    loss.backward()
    wanted = {name: each.grad for name, each in adapter.module.named_parameters() if each.requires_grad}
    norm = torch.stack([each.norm() for each in wanted.values()]).norm()
    found = gloo_pool.run(run_transformers, step, plan, name, lora, ranks=RANKS)
    assert max(each.worst(Found(loss.item(), norm.item(), wanted)) for each in found) < 1e-9


def run_mixture(transport, step, plan, folder):
    """A step of a pipeline whose experts are divided; then its values through a checkpoint, with experts undivided."""
    stages, limits = plan.pipelines[0].stages, plan.limits
    make = lambda adapter, transport: PipelineFSDP(  # noqa: E731
        adapter, transport, Placement(stages, plan.sharding, limits.node_size)
    )
    found = step.spread(plan, transport, make)
    values = make(step.model_adapter(), transport)
    whole = {name: each.clone() for name, each in values.full_parameters()}
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(1, model=values.master_weights(), optimiser={}, extra={})
    other = FSDPParameters(step.model_adapter(), transport, Sharding.FULL)
    with torch.no_grad():
        for each in other.master_weights().values():
            each.zero_()
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.load(latest_checkpoint(folder), model=other.master_weights(), optimiser={})
    same = all(torch.equal(each, whole[name]) for name, each in other.full_parameters())
    collected = gather_state_dict(torch.nn.Module(), values, transport, torch.device("cpu"))
    if transport.rank == 0:
        same &= collected.keys() == whole.keys() and all(torch.equal(each, whole[k]) for k, each in collected.items())
    rows = {name: len(each.to_local()) for name, each in values.master_weights().items() if "experts" in name}
    return found, same, rows


@pytest.mark.parametrize(
    ("sharding", "tensor"),
    [(Sharding.FULL, 2), *(pytest.param(each, 2, marks=pytest.mark.slow) for each in (Sharding.NONE, Sharding.HYBRID))],
)
def test_tp_groups_of_stages_divide_their_weights(gloo_pool, tmp_path, sharding, tensor):
    """Documents in pieces and backwards in halves; a checkpoint loads where nothing is divided."""
    step, plan = fixed_step("seq1f1b-zb", 2, 4 // tensor, (2, 1, 3))
    spec = replace(step.spec, heads=step.spec.heads * tensor, kv_heads=step.spec.kv_heads * tensor, vocabulary=24)
    spec = replace(spec, experts=8, active_experts=3, expert_ffn=6, moe_layers=(0, 2))
    step = replace(step, spec=spec)
    plan = in_tp_groups(replace(plan, sharding=sharding), tensor)
    results = gloo_pool.run(run_mixture, step, plan, tmp_path, ranks=RANKS)
    wanted, shards = step.alone(), {Sharding.FULL: 4, Sharding.HYBRID: 4}.get(sharding, tensor)
    assert max(found.worst(wanted) for found, _, _ in results) < 1e-9
    assert all(same and set(rows.values()) == {8 // shards} for _, same, rows in results if rows)
    assert len({found.norm for found, _, _ in results}) == 1


@pytest.mark.parametrize(("sharding", "expert"), [(Sharding.FULL, 2), (Sharding.NONE, 4), (Sharding.HYBRID, 2)])
def test_stages_divide_their_experts(gloo_pool, tmp_path, sharding, expert):
    """Documents in pieces and backwards in halves; a checkpoint loads where experts are not divided."""
    step, plan = fixed_step("seq1f1b-zb", 2, 4, (2, 1, 3))
    spec = replace(step.spec, experts=8, active_experts=3, expert_ffn=6, moe_layers=(0, 2))
    step = replace(step, spec=spec)
    [line] = plan.pipelines
    stages = tuple(replace(stage, expert=expert) for stage in line.stages)
    plan = replace(plan, pipelines=(replace(line, stages=stages),), sharding=sharding)
    plan.validate()
    results = gloo_pool.run(run_mixture, step, plan, tmp_path, ranks=RANKS)
    wanted, shards = step.alone(), {Sharding.FULL: 4, Sharding.HYBRID: 4}.get(sharding, expert)
    assert max(found.worst(wanted) for found, _, _ in results) < 1e-9
    assert all(same and set(rows.values()) == {8 // shards} for _, same, rows in results if rows)
    assert sum(bool(rows) for _, _, rows in results) == RANKS


def test_a_rank_holds_its_stages_alone(gloo_pool):
    """Names are those of the whole model; the table of a tied head is on the first host and on the last."""
    step = replace(STEP, spec=replace(STEP.spec, tied=True))
    results = gloo_pool.run(one_step, step, placed((1, 1, 2, 1), 4), ranks=RANKS)
    whole = {name: tuple(each.shape) for name, each in step.model().named_parameters()}
    layers = {0: {0}, 1: {1}, 2: {2, 3}, 3: {4}}
    for rank, (_, held, copies) in enumerate(results):
        host = rank // 2
        beside = {0: {"model.embed_tokens.weight"}, 3: {"model.embed_tokens.weight", "model.norm.weight"}}
        wanted = {name for name in whole if any(f"layers.{layer}." in name for layer in layers[host])}
        assert set(held) == wanted | beside.get(host, set())
        assert copies == 0  # released
    for name, shape in whole.items():
        rows = [held[name][0] for _, held, _ in results if name in held]
        assert sum(rows) == shape[0] * len(rows) // 2


def kept(transport, step, placement):
    """Parameters as a placement says, or sharded by FSDP2, with an optimiser."""
    adapter = step.model_adapter()
    with torch.no_grad():
        for each in adapter.module.parameters():
            each += placement is None  # other values: a checkpoint must bring all of them
    if placement is None:
        parameters = FSDPParameters(adapter, transport, Sharding.FULL)
    else:
        parameters = PipelineFSDP(adapter, transport, placement)
    return parameters, make_optimiser(parameters.master_weights(), Optimiser(lr=0.1))


def everything(parameters, optimiser):
    """Values of the whole model, and this rank's moments, whole."""
    moments = {name: state["exp_avg_sq"].full_tensor() for name, state in state_by_name(optimiser).items()}
    return {name: value.clone() for name, value in parameters.full_parameters()}, moments


def handed_on(transport, step, placements, folder):
    """A step of the first, then a checkpoint from each to the next; return what each has."""
    found = []
    for number, placement in enumerate(placements):
        parameters, optimiser = kept(transport, step, placement)
        with Checkpoints(Path(folder) / str(number)) as checkpoints:
            state = {"model": parameters.master_weights(), "optimiser": state_by_name(optimiser)}
            if number == 0:
                run_units(transport, step, placement, parameters)
                optimiser.step()
            else:
                checkpoints.load(latest_checkpoint(Path(folder) / str(number - 1)), **state)
            checkpoints.save(1, **state, extra={})
        found.append(everything(parameters, optimiser))
    return found


@pytest.mark.slow
def test_checkpoints_go_from_stages_to_other_stages_and_to_fsdp_and_back(gloo_pool, tmp_path):
    step = replace(STEP, spec=replace(STEP.spec, tied=True))
    fold = placed((2, 1, 1, 1), 2, order=(0, 1, 1, 0))
    placements = [placed((1, 1, 2, 1), 4), None, placed((3, 2), 2, Sharding.HYBRID), fold]
    results = gloo_pool.run(handed_on, step, placements, str(tmp_path), ranks=RANKS)
    manifests = [Manifest.read(latest_checkpoint(tmp_path / str(number))) for number in range(4)]
    begin = dict(step.model().named_parameters())
    assert all(each.model.keys() == begin.keys() for each in manifests)
    values, moments = results[0][0][0], {}
    for found in results:
        moments |= found[0][1]
    assert moments.keys() == begin.keys() and min(float(each.max()) for each in moments.values()) > 0
    for found in results:
        for whole, own in found:
            assert all(torch.equal(whole[name], values[name]) for name in begin)
            assert all(torch.equal(each, moments[name]) for name, each in own.items())
    assert not any(torch.equal(values[name], each) for name, each in begin.items())


def refused(transport, step):
    """Messages of what cannot be done."""
    messages = {}
    adapter, each = step.model_adapter(), Stage((0, 1, 2, 3), (0, 3))
    half = Placement((each, Stage((4, 5), (3, 5))), Sharding.FULL, 2)
    odd = placed((3, 2), 2, Sharding.HYBRID, node_size=3)
    extra = step.model_adapter()
    extra.module.shift = torch.nn.Parameter(torch.zeros(3))
    whole = replace(step.model_adapter(), body=None, single_stage_reason="it is a test")
    cases = {"ranks": (adapter, half), "nodes": (adapter, odd), "extra": (extra, placed((3, 2), 2))}
    cases |= {"whole": (whole, placed((3, 2), 2))}
    for name, (given, placement) in cases.items():
        try:
            PipelineFSDP(given, transport, placement)
        except SeqloomError as error:
            messages[name] = str(error)
    parameters = PipelineFSDP(adapter, transport, placed((3, 2), 2))
    try:
        parameters.unshard(LayerRange(1, 2, 5))
    except SeqloomError as error:
        messages["part"] = str(error)
    return messages


def test_bad_input_is_refused(gloo_pool):
    found = gloo_pool.run(refused, STEP, ranks=RANKS)[6]
    assert "divides the ranks" in found["ranks"] and "nodes of 3" in found["nodes"]
    assert "parameter shift is neither" in found["extra"]
    assert "cannot be cut into stages: it is a test; plan with one stage" in found["whole"]
    assert "layers 1 to 1 of 5" in found["part"] and "holds the stages with layers 3 to 4" in found["part"]
