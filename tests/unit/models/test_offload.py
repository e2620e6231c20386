"""Activations in host memory: what goes, when it comes back, and that nobody reads what has gone."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from seqloom.dist import SingleRankTransport, bind, run_ranks
from seqloom.engine.executor import run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import offload as module
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.offload import HostCopies, Offload, OffloadedLayer
from seqloom.params import ReplicatedParameters
from seqloom.plan import Action, Checkpoint, Group, Round, StageMicroBatch
from support.offloads import copy_on_cpu
from support.steps import Found, Step, one_stage_plan, tiny_spec

torch.set_num_threads(1)
LAYERS = 5
STEP = Step((40, 9, 3), tiny_spec(layers=LAYERS))
SPANS = (Span(0, 0, 40), Span(1, 0, 9), Span(2, 0, 3))
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)


@pytest.fixture(autouse=True)
def _copied(monkeypatch):
    copy_on_cpu(monkeypatch)


def offloaded(plan, count):
    """The plan with so many offloaded layers of every round."""
    [line] = plan.pipelines
    works = [replace(each.by_stage[0], offloaded_layers=count) for each in line.rounds]
    changed = replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))
    changed.validate()
    return changed


def plan_of(count, kind=Checkpoint.FULL, ulysses=1, ring=1, rounds=1):
    ranks = tuple(range(ulysses * ring))
    parts = [SPANS] if rounds == 1 else [SPANS[:1], SPANS[1:]]
    groups = [[Group(ranks, ulysses, ring, spans)] for spans in parts]
    return offloaded(one_stage_plan(groups, ranks=len(ranks), layers=LAYERS, checkpoint=kind), count)


def run(plan, transport=None, backend=None):
    """Run a step on one rank; return what was found."""
    transport = transport or SingleRankTransport()
    adapter = ModelAdapter.of(STEP.model())
    if backend is not None:
        compile_layers(adapter.layers, backend=backend)
    recompute_layers(adapter.layers)
    parameters = ReplicatedParameters(adapter, transport)
    result = run_step(bind_plan(plan, transport), parameters, STEP.rows(), STEP.valid)
    return Found(result.loss, result.gradient_norm, dict(parameters.full_gradients()))


class Log:
    """What happens to the tensors of layers, and which of them are on the device."""

    def __init__(self, monkeypatch):
        self.numbers, self.events, self.bytes, self.most = {}, [], [], 0
        self._on_device = weakref.WeakSet()
        send, receive, drop = HostCopies.send, HostCopies.receive, OffloadedLayer.drop

        def sent(copies, layer, tensors):
            self.numbers[id(layer)] = len(self.numbers)
            self.bytes.append(sum(each.nbytes for each in tensors))
            self.note("out", layer)
            return send(copies, layer, tensors)

        def dropped(layer):
            drop(layer)
            self._on_device.discard(layer)
            self.events.append(f"drop {self.numbers[id(layer)]}")

        def fetched(layer):
            if layer._device is None:
                layer._device, layer._ready = receive(layer._copies, layer._host)
                self.note("in", layer)

        monkeypatch.setattr(HostCopies, "send", sent)
        monkeypatch.setattr(OffloadedLayer, "drop", dropped)
        monkeypatch.setattr(OffloadedLayer, "fetch", fetched)

    def note(self, what, layer):
        self._on_device.add(layer)
        self.most = max(self.most, len(self._on_device))
        self.events.append(f"{what} {self.numbers[id(layer)]}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, LAYERS])
def test_the_result_is_that_of_layers_that_stay(kind, count):
    """Bit by bit; and dropped tensors are overwritten, so nobody has read them."""
    here, there = (run(plan_of(each, kind, rounds=2)) for each in (0, count))
    assert (here.loss, here.norm) == (there.loss, there.norm)
    assert all(torch.equal(each, there.gradients[name]) for name, each in here.gradients.items())
    assert there.worst(STEP.alone()) < 1e-12


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_several_ranks(kind, ulysses, ring):
    wanted, plan = STEP.alone(), plan_of(3, kind, ulysses, ring, rounds=2)
    assert max(found.worst(wanted) for found in run_ranks(4, lambda t: run(plan, t), strict=True)) < 1e-12


@pytest.mark.filterwarnings("ignore::Warning:torch")  # its compiler does what it warns others of
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers(kind):
    assert run(plan_of(3, kind), backend="aot_eager").worst(STEP.alone()) < 1e-12


def test_the_device_has_two_layers_and_the_next_one_is_fetched_early(monkeypatch):
    log = Log(monkeypatch)
    run(plan_of(4))
    forward = ["out 0", "out 1", "drop 0", "out 2", "drop 1", "out 3"]
    backward = ["drop 3", "in 1", "drop 2", "in 0", "drop 1"]  # layers 3 and 2 were still there
    assert log.events == forward + backward
    assert log.most == 2


def test_what_has_left_before_the_backward_is_fetched_at_its_beginning(monkeypatch):
    """Two rounds go forward before the first goes backward."""
    log = Log(monkeypatch)
    plan = plan_of(2, rounds=2)
    [line] = plan.pipelines
    row = ["0F0", "0F1", "0B1", "0REDUCE1", "0B0", "0REDUCE0"]
    run(replace(plan, pipelines=(replace(line, actions=(tuple(map(Action.parse, row)),)),)))
    assert log.events[:4] == ["out 0", "out 1", "drop 0", "out 2"]
    assert log.events[-3:] == ["in 1", "in 0", "drop 1"] and log.most == 2


def test_only_activations_move(monkeypatch):
    """Of full checkpointing the layers' inputs; neither parameters nor what all layers are given."""
    log = Log(monkeypatch)
    run(plan_of(LAYERS, Checkpoint.FULL))
    rows, hidden, heads, dim, size = 52, 16, 4, 4, 8
    assert log.bytes == [rows * hidden * size] * LAYERS
    log.bytes.clear()
    run(plan_of(LAYERS, Checkpoint.SELECTIVE))
    assert log.bytes == [rows * (hidden + heads * dim + heads) * size] * LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_layout_come_back_as_they_were(dtype):
    copies = HostCopies(torch.device("cpu"))
    whole = torch.arange(7 * 9 * 10).view(7, 9, 10).remainder(3).to(dtype)
    views = [whole, whole.transpose(0, 2), whole[:, 2:5], whole[..., ::2], whole[:1].expand(4, 9, 10), whole[3:]]
    layer = OffloadedLayer(copies, None)
    packed = [layer.pack(each) for each in views]
    layer.send()
    assert len(layer._host) == len(views) and any(len(each.blocks) > 1 for each in layer._host)
    copies.release()
    whole.zero_()
    expected = torch.arange(7 * 9 * 10).view(7, 9, 10).remainder(3).to(dtype)
    wanted = [
        expected,
        expected.transpose(0, 2),
        expected[:, 2:5],
        expected[..., ::2],
        expected[:1].expand(4, 9, 10),
        expected[3:],
    ]
    for each, view in zip(packed, wanted, strict=True):
        assert torch.equal(layer.unpack(each), view)


def test_small_tensors_are_not_worth_it(monkeypatch):
    log = Log(monkeypatch)
    monkeypatch.setattr(module, "MIN_ELEMENTS", 10**6)
    assert run(plan_of(LAYERS)).worst(STEP.alone()) < 1e-12
    assert not log.events


def test_host_memory_is_given_back_without_the_garbage_collector(monkeypatch):
    kept, send = [], HostCopies.send

    def sent(copies, layer, tensors):
        host, done = send(copies, layer, tensors)
        kept.extend(weakref.ref(block) for each in host for block in each.blocks)
        return host, done

    monkeypatch.setattr(HostCopies, "send", sent)
    gc.disable()
    try:
        for kind in KINDS:
            run(plan_of(LAYERS, kind))
        assert len(kept) > 2 * LAYERS and all(each() is None for each in kept)
    finally:
        gc.enable()


def test_backward_twice_through_a_kept_graph():
    adapter = ModelAdapter.of(STEP.model())
    recompute_layers(adapter.layers)
    context = bind_plan(plan_of(LAYERS, Checkpoint.SELECTIVE), SingleRankTransport()).rounds[0].context
    offload = Offload(HostCopies(torch.device("cpu")))
    loss = ModelWithLoss(adapter)(*STEP.rows()(context), offload.context(context))
    offload.begin_backward()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in adapter.module.parameters()]
    loss.backward()
    for first, parameter in zip(once, adapter.module.parameters(), strict=True):
        assert torch.allclose(2 * first, parameter.grad, rtol=1e-13)


def test_nothing_moves_without_gradients(monkeypatch):
    log, adapter = Log(monkeypatch), ModelAdapter.of(STEP.model())
    recompute_layers(adapter.layers)
    context = bind_plan(plan_of(LAYERS), SingleRankTransport()).rounds[0].context
    with torch.no_grad():
        ModelWithLoss(adapter)(*STEP.rows()(context), Offload(HostCopies(torch.device("cpu"))).context(context))
    assert not log.events


def test_a_context_that_does_not_know_its_layers_is_refused():
    work = StageMicroBatch((Group((0,), 1, 1, SPANS),), Checkpoint.FULL, offloaded_layers=1)
    adapter = ModelAdapter.of(STEP.model())
    recompute_layers(adapter.layers)
    context = Offload(HostCopies(torch.device("cpu"))).context(bind(work, SingleRankTransport()))
    with pytest.raises(SeqloomError, match=r"the first 1 layers .*; bind it with layers=stage.layers"):
        ModelWithLoss(adapter)(*STEP.rows()(context), context)
