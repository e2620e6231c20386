"""Properties of every price, over random clusters, models, shardings and documents."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span

MODELS = ("llama3-8b", "qwen2.5-0.5b", "qwen3-30b-a3b", "qwen2.5-7b", "gpt-7b", "deepseek-v2-lite", "minicpm3-4b")


@st.composite
def costs(draw):
    nodes, gpus = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    device = draw(st.sampled_from(["H200", "H100", "A100-80G", "A800", "B200", "L40S"]))
    try:
        return CostModel(
            Cluster.of(nodes, gpus, device),
            ModelSpec.load(draw(st.sampled_from(MODELS))),
            sharding=draw(st.sampled_from(["full", "hybrid", "none"])),
        )
    except SeqloomError as error:
        assert "does not fit" in str(error)
        assume(False)


lengths = st.lists(st.integers(1, 300_000), min_size=1, max_size=20)


@given(costs(), lengths, st.data())
def test_prices_are_sane_integers(cost, documents, data):
    policy = data.draw(st.sampled_from(cost.policies))
    tables = cost.tables(np.sort(documents), policy)
    assert tables.cost.shape == (3, len(cost.shapes), len(documents)) and tables.cost.dtype == np.int64
    assert (tables.cost >= 0).all() and (tables.fixed >= 0).all() and tables.capacity >= 1
    assert (np.diff(tables.cost, axis=2) >= 0).all()  # a longer document never costs less
    assert (tables.tokens >= np.sort(documents)).all()


@given(costs(), lengths, st.data())
def test_parts_tables_and_pieces_agree(cost, documents, data):
    policy = data.draw(st.sampled_from(cost.policies))
    s = data.draw(st.integers(0, len(cost.shapes) - 1))
    shape, tables = cost.shapes[s], cost.tables(documents, policy)
    start = data.draw(st.sampled_from(cost.family.blocks(shape.degree))).start
    ranks = tuple(range(start, start + shape.degree))

    def group(cut):
        edges = [(k, 0, cut) if cut < n else (k, 0, n) for k, n in enumerate(documents)]
        spans = [Span(*edge) for edge in edges] + [Span(k, cut, n) for k, n in enumerate(documents) if cut < n]
        return cost.group(shape, ranks, spans)

    whole = group(10**9)
    parts = cost.group_cost(whole, policy)
    assert parts.stream_ns == tuple(tables.fixed[:, s] + tables.cost[:, s].sum(axis=1))
    cut = data.draw(st.integers(1, 300_000))  # kernels are called again, and a ring shares the prefix again
    pieces, cuts = cost.group_cost(group(cut), policy), sum(cut < n for n in documents)
    added = {name: value - parts._asdict()[name] for name, value in pieces._asdict().items()}
    again = np.rint(cost.engine.prefix_ns(np.array([float(cut)]), shape, policy))
    assert added.pop("attention") == cuts * int(again[0])
    shared = {name: added.pop(name) for name in ("ring", "steps", "network", "kv_gather", "link")}
    assert not any(added.values())
    assert all(value >= 0 for value in shared.values()) and (any(shared.values()) <= (shape.ring > 1 and cuts > 0))
    assert (cost.group_costs([whole, whole], policy) == [parts, parts]).all()


@given(costs())
def test_a_model_is_a_function_of_its_inputs(cost):
    again = CostModel(cost.cluster, cost.model, cost.profile, cost.sharding)
    assert again.shapes == cost.shapes and again.limits() == cost.limits()
    for policy in cost.policies:
        assert (again.tables([7, 7777], policy).cost == cost.tables([7, 7777], policy).cost).all()
        used = cost.memory.fixed_bytes(policy) + cost.capacity(policy) * cost.memory.token_bytes(policy)
        assert used <= cost.budget_bytes < used + cost.memory.token_bytes(policy) + 1
