"""Memory by counting: parameters of stages, activations by checkpoint, state by sharding, tensor ranks, KV caches."""

from dataclasses import replace
from functools import cache

import pytest

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes, stage_parameters
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Group, LayerRange, Reduce

HEAVY = (Checkpoint.SELECTIVE, Checkpoint.FULL)
NONE = MemoryPolicy(Checkpoint.NONE, Reduce.STEP)
ATTENTION, FEED_FORWARD, TABLE = 2 * 1024 * 128 * 12, 3 * 1024 * 4096, 32000 * 1024
"""Weights of a layer that tensor ranks cut, and of embedding or head."""


@cache
def cost_of(tied=False, learned=False, sharding="full"):
    shape = (9, 1024, 8, 4, 128, 4096, True, 32000, tied)
    model = ModelSpec("small", *shape, learned_positions=learned)
    return CostModel(Cluster.parse("2x4xH100"), model, sharding=sharding)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_the_stages_are_those_of_the_model(tied, learned):
    cost = cost_of(tied, learned)
    shares = [LayerRange(0, 2, 9), LayerRange(2, 7, 9), LayerRange(7, 9, 9)]
    own = [stage_parameters(cost, share) for share in shares]
    twice = cost.model.head_parameters if tied else 0  # the table is on the first and on the last stage
    assert sum(own) == cost.model.parameters(384 * 1024) + twice
    assert own[1] == sum(map(cost.model.layer_parameters, range(2, 7)))
    assert stage_parameters(cost, LayerRange(0, 9, 9)) == cost.model.parameters(384 * 1024)


def test_what_is_kept_falls_from_choice_to_choice():
    memory, stage = cost_of().memory, LayerRange(3, 6, 9)
    order = [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE]
    held = [memory.activation_bytes(stage, checkpoint).held for checkpoint in order]
    assert held == sorted(held, reverse=True) and held[-1] == 2 * 1024  # the stage's input, bf16
    assert held[2] == 3 * held[3]  # one input per layer
    assert all(memory.activation_bytes(stage, checkpoint, 3).held == 0 for checkpoint in order)
    whole = memory.activation_bytes(stage, Checkpoint.NONE)
    assert whole.deferred <= whole.held and whole.split == 0
    again = memory.activation_bytes(stage, Checkpoint.STAGE)
    assert again.backward >= whole.held and again.split == again.deferred == whole.deferred


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL])
def test_layers_that_are_offloaded_leave_two_of_them_on_the_gpu(checkpoint):
    """One that is worked on, and one that is copied; what is in host memory is what the GPU no longer holds."""
    memory, stage = cost_of().memory, LayerRange(2, 6, 9)
    plain = memory.activation_bytes(stage, checkpoint)
    for count in range(5):
        offloaded = memory.activation_bytes(stage, checkpoint, count)
        away = memory.host_bytes(stage, checkpoint, count)
        assert (offloaded.held, away) == (plain.held * (4 - count) / 4, plain.held * count / 4)
        assert offloaded.forward - plain.forward == offloaded.backward - plain.backward == (count > 0) * plain.held / 2
        assert offloaded[3:] == plain[3:]
    assert memory.host_bytes(stage, Checkpoint.STAGE, 4) == 2 * 1024


def test_only_the_last_stage_has_logits():
    cost = cost_of()
    first, last = (cost.memory.working_bytes(LayerRange(*layers, 9)) for layers in ((0, 3), (6, 9)))
    assert last - first == cost.profile.head_chunk * 32000 * 6


@pytest.mark.parametrize(("ulysses", "ring", "heads"), [(1, 1, 4), (2, 1, 2), (4, 2, 1), (8, 1, 1), (1, 4, 4)])
def test_keys_and_values_of_a_rank(ulysses, ring, heads):
    """4 key/value heads of 128 for 8 query heads, 3 layers."""
    group = Group(tuple(range(ulysses * ring)), ulysses, ring, ())
    keys, gradients = kv_cache_bytes(cost_of(), LayerRange(0, 3, 9), group, 1000)
    assert keys == 2 * 2 * heads * 128 * (1000 // ring) * 3 and gradients == 2 * keys


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_state_under_free_sharding_by_counting(tensor):
    """2 + 4 bytes of what a rank computes with; 12 + 4 of an eighth of everything."""
    cost = cost_of(sharding="free").with_tensor(tensor)
    layer = (ATTENTION + FEED_FORWARD) // tensor + 2 * 1024
    assert stage_parameters(cost, LayerRange(2, 5, 9)) == 3 * layer
    assert stage_parameters(cost, LayerRange(0, 2, 9)) == 2 * layer + TABLE
    everything = 9 * (ATTENTION + FEED_FORWARD + 2 * 1024) + 2 * TABLE + 1024
    owned = -(-16 * everything // 8)
    memory, stage = cost.memory, LayerRange(2, 5, 9)
    everywhere = memory.working_bytes(LayerRange(0, 9, 9))
    assert memory.fixed_bytes(NONE) == 6 * (9 * layer + 2 * TABLE + 1024) + everywhere
    assert memory.idle_bytes == owned and memory.state_bytes(stage, 1) == 6 * 3 * layer
    assert memory.working_bytes(stage) - int(cost.profile.workspace_gib * 1024**3) == owned + 4 * 2 * layer
    on_four = cost.for_submesh(4, tensor).memory
    assert on_four.working_bytes(stage) == memory.working_bytes(stage)  # masters lie on all ranks, not on the part's


def test_what_tensor_ranks_keep_of_a_token():
    """Both norms of all tokens of the tensor parallel group; while a layer runs, partial sums to and from it."""
    one, two = (
        cost_of(sharding="free").with_tensor(t).memory.activation_bytes(LayerRange(2, 5, 9), Checkpoint.NONE, False)
        for t in (1, 2)
    )
    assert two.held - one.held == 3 * 2 * 2 * 1024
    assert two.forward - one.forward == 2 * 2 * 2 * 1024
    assert two.deferred - one.deferred == 3 * 2 * 4 * 1024  # and gradients of both halves' outputs
    few = [
        cost_of(sharding="free")
        .with_tensor(t)
        .memory.activation_bytes(LayerRange(2, 5, 9), Checkpoint.FULL, False)
        .held
        for t in (1, 4)
    ]
    assert few[0] == few[1] == 3 * 2 * 1024
    tokens = [cost_of(sharding="free").with_tensor(t).memory.token_bytes(NONE) for t in (1, 2)]
    assert tokens[1] - tokens[0] == 9 * 2 * 2 * 1024 + 2 * 2 * 2 * 1024


def test_keys_of_a_document_in_pieces_are_those_of_a_ranks_heads():
    group = Group(tuple(range(4)), 4, 1, ())
    kept = {
        kv_cache_bytes(cost_of(sharding="free").with_tensor(t), LayerRange(2, 5, 9), group, 1000) for t in (1, 2, 4)
    }
    assert kept == {(2 * 2 * 1 * 128 * 1000 * 3, 4 * 2 * 1 * 128 * 1000 * 3)}


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_other_shardings_split_what_they_shard(sharding, cut):
    """Each of two tensor ranks has half of the layers' matrices, and shards them with its peers in other groups.

    So with embedding and head if two divides the vocabulary, and the final norm beside them; otherwise these are
    sharded over all ranks, like those of plans without tensor parallelism.
    """
    spec = replace(cost_of().model, vocabulary=32_000 + (not cut))
    split = CostModel(cost_of().cluster, spec, sharding=sharding, tensor=2, budget_gib=60)
    layer = (ATTENTION + FEED_FORWARD) // 2 + 2 * 1024
    tables = 2 * spec.vocabulary * 1024 // (2 if cut else 1)
    groups, ranks = {"full": (4, 8), "hybrid": (2, 4), "none": (1, 1)}[sharding]
    policy = NONE if sharding == "none" else NONE._replace(reduce=Reduce.ROUND)
    gathered = 0 if sharding == "none" else 2 * (2 * layer + tables) + 4 * 2 * layer  # two layers, and their gradients
    working = split.memory.working_bytes(LayerRange(0, 9, 9))
    assert working - split.memory.working_bytes(LayerRange(0, 8, 9)) == 2048 * spec.vocabulary // (1 + cut) * 6
    sharded = 9 * layer // groups + (tables + 1024) // (groups if cut else ranks)
    assert split.memory.fixed_bytes(policy) == 18 * sharded + gathered + working
    assert split.shard_group_size == {"full": 8, "hybrid": 4, "none": 2}[sharding]
    shards = {"none": 1}.get(sharding, 4)
    assert split.memory.state_bytes(LayerRange(2, 5, 9), shards) == 3 * layer * (18 if shards == 1 else 6 + 16 // 2)
    last = split.memory.state_bytes(LayerRange(8, 9, 9), shards)
    divided = layer + (tables // 2 + 1024 if cut else 0)
    assert last == sum(
        count * (18 if over == 1 else 6 + 16 // over)
        for count, over in ((divided, max(1, shards // 2)), (layer + tables // 2 + 1024 - divided, shards))
    )
    held = [CostModel(cost_of().cluster, spec, sharding=each, tensor=2).memory for each in (sharding, "free")]
    more = [each.activation_bytes(LayerRange(8, 9, 9), Checkpoint.NONE).forward for each in held]
    assert more[0] - more[1] == 2 * 2 * 1024 * cut  # gradients of the hidden states of both ranks


def test_layers_that_recompute_less_store_what_their_checkpoint_stores():
    """Three layers, one of them lighter; recomputing takes the memory of a whole layer however few layers do it."""
    memory, layers = cost_of().memory, LayerRange(2, 5, 9)
    pure = {kind: memory.activation_bytes(layers, kind) for kind in (NONE.checkpoint, *HEAVY)}
    for heavy in HEAVY:
        mixed = memory.activation_bytes(layers, heavy, 0, 1)
        light = pure[heavy.lighter]
        assert mixed.held == (2 * pure[heavy].held + light.held) / 3
        assert mixed[1:] == pure[heavy][1:]


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none", "free"])
def test_an_offloaded_optimiser_leaves_a_copy_and_gradients_on_the_gpu(sharding):
    """12 bytes of a parameter go to the host, and 2 stay of what layers do not have in any case."""

    def memory(**options):
        return CostModel(cost_of().cluster, cost_of().model, sharding=sharding, budget_gib=60, **options).memory

    here, there = memory(), memory(offload_optimiser=True)
    shards = {"full": 8, "hybrid": 4, "none": 1, "free": 8}[sharding]
    part = -(-here.parameters // shards)
    saved = here.fixed_bytes(NONE) - there.fixed_bytes(NONE)
    assert abs(saved - (10 if sharding == "free" else 12) * part) <= 20
    every = (LayerRange(0, 9, 9),)
    assert abs(there.host_state_bytes(every, shards) - 12 * part) <= 12
    assert here.host_state_bytes(every, shards) == 0
    assert here.idle_bytes - there.idle_bytes == (10 * here.parameters // 8 if sharding == "free" else 0)
    stage = LayerRange(2, 5, 9)
    if sharding != "free":
        own = stage_parameters(cost_of(), stage)
        alone, shared = (here.state_bytes(stage, n) - there.state_bytes(stage, n) for n in (1, 4))
        assert alone == 12 * own and shared == 10 * own // 4


def test_an_offloaded_optimiser_is_updated_where_that_takes_least():
    """One GPU has the host's memory to itself, and its link is slower; eight share it, and read less of it."""
    costs = {
        cluster: CostModel(Cluster.parse(cluster), ModelSpec.load("qwen3-1.7b"), offload_optimiser=True)
        for cluster in ("1x1xH200", "1x8xH200")
    }
    for cluster, on_host in (("1x1xH200", True), ("1x8xH200", False)):
        cost = costs[cluster]
        ns = cost.engine.offloaded_update_ns(1e9)
        assert cost.updates_on_host is on_host and (ns["host"] < ns["device"]) is on_host
        plain = CostModel(cost.cluster, cost.model)
        policy = cost.policies[-1]
        extra = cost.step_overhead_ns(policy) - plain.step_overhead_ns(policy)
        parameters = cost.memory.parameters / cost.ranks
        own = plain.engine.compute.optimiser(parameters)
        assert extra == pytest.approx(min(cost.engine.offloaded_update_ns(parameters).values()) - own, abs=2)
    assert costs["1x1xH200"].engine.offloaded_update_ns(1e9) == {"device": 12e9 / 40, "host": 30e9 / 200}


def test_published_constants_say_nothing_of_an_offloaded_optimiser():
    with pytest.raises(SeqloomError, match="published constants say nothing"):
        CostModel(Cluster.parse("8x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", offload_optimiser=True)


def test_an_optimiser_beyond_host_memory_is_refused():
    model, options = ModelSpec.load("llama3-8b"), {"offload_optimiser": True}
    with pytest.raises(SeqloomError, match=r"needs 89.7 GiB of host memory per GPU .* there are 80.0; raise host_gib"):
        CostModel(Cluster.parse("1x1xH200"), model, host_gib=80, **options)
    small = replace(Cluster.parse("1x8xH200"), host_gib=90.0)
    with pytest.raises(SeqloomError, match=r"needs 11.2 GiB of host memory per GPU .* there are 10.1"):
        CostModel(small, model, **options)
    for refused, message in ((0, "above 0"), (float("nan"), "above 0")):
        with pytest.raises(SeqloomError, match=message):
            CostModel(Cluster.parse("1x1xH200"), model, host_gib=refused, **options)
    with pytest.raises(SeqloomError, match="give true, false or 'auto'"):
        CostModel(Cluster.parse("1x1xH200"), model, offload="maybe", **options)
