"""The papers' tables: the arithmetic of their rows, and that each reads the committed result of its script."""

import numpy as np
import pytest
from paper_figures import Figure, seq1f1b, zeppelin
from paper_tables import TABLES


def test_the_difference_is_relative_and_needs_both_figures():
    assert Figure("", 2.0, 3.0).difference == 0.5 and Figure("", 4.0, 3.0).difference == -0.25
    assert Figure("", None, 3.0).difference is None and Figure("", 2.0).difference is None


@pytest.mark.parametrize("name", TABLES)
def test_a_committed_result_has_published_simulated_and_ours(name):
    table = TABLES[name]
    figures = list(table.read(table.result(committed=True)["figures"]))
    assert len({each.what for each in figures}) == len(figures) > 2
    planned = name not in ("flexsp-buckets", "usp-costs")  # in these nothing is planned
    assert any(None not in each[: 4 if planned else 3] for each in figures)
    for each in figures:
        assert all(value is None or value >= 0 for value in each[1:])


def test_published_cells_are_beside_the_same_order_and_unit():
    row = {"tokens_s": 110.0, "peak_gib": 30.0, "published_tokens_s": 100, "published_gb": 40.0}
    ours = {"tokens_s": 120.0, "peak_gib": 50.0}
    cell = {
        "model": "7B",
        "context": 32768,
        "micro_batches": 8,
        "orders": {"1F1B": row, "ours, memory of Seq1F1B": ours},
    }
    found = {each.what: each[1:] for each in seq1f1b({"cells": [cell]})}
    assert found == {"7B 32K x 8, 1F1B, tokens/s": (100, 110.0, 120.0), "7B 32K x 8, 1F1B, GB": (40.0, 30.0, 50.0)}


def test_ours_is_the_mean_of_the_cells_that_the_published_figure_covers():
    seconds = [{"te-cp": 6.0, "auto": 2.0}, {"te-cp": 10.0, "auto": 2.0}]
    cells = [{"cluster": "A", "gpus": gpus, "seconds": each} for gpus, each in zip((16, 32), seconds, strict=True)]
    rows = {name: {"published": 2.8, "found": 5.0} for name in ("all cells", "16 GPUs", "routing")}
    found = zeppelin({"clusters": {"A": "A800"}, "cells": cells, "validation": rows})
    assert [(each.what, each.ours) for each in found] == [("all cells", 4.0), ("16 GPUs", 3.0), ("routing", None)]


def test_tokens_that_buckets_of_equal_width_add():
    from bench_flexsp_buckets import equal_width

    # width 10: 3 and 10 count as 10, 11 and 15 as 15, 40 as itself
    assert equal_width(np.array([3, 10, 11, 15, 40]), 4) == 10 + 10 + 15 + 15 + 40
    assert equal_width(np.array([7, 7, 7]), 16) == 21


def test_state_and_traffic_are_the_published_formulas_but_for_what_the_head_says():
    from bench_usp_costs import GIB, state_rows, traffic_rows

    from seqloom.describe import ModelSpec

    parameters = ModelSpec.load("llama-7b").parameters()
    plain, zero_1, zero_3, tensor = state_rows("llama-7b")
    assert plain.published * GIB == 16 * parameters and plain.simulated * GIB == 18 * parameters
    assert zero_1.published * GIB == 5.5 * parameters and zero_1.simulated > zero_1.published
    assert zero_3.published == tensor.published == plain.published / 8
    ulysses, other, share = traffic_rows("llama3-8b", 5.0)  # 4 for queries and outputs, 1 for a quarter of the keys
    assert (ulysses.simulated, other.simulated, share.simulated) == (5.0, 8.0, 5 / 64)


def test_static_packing_deals_packs_in_order_of_arrival_to_groups_of_four():
    from bench_megatron import static_rounds

    rounds = static_rounds(np.array([8000, 192, 1, 8192, 100]), 8)
    places = [[(group.ranks, group.documents) for group in each] for each in rounds]
    assert places == [[((0, 1, 2, 3), [0, 1]), ((4, 5, 6, 7), [2])], [((0, 1, 2, 3), [3]), ((4, 5, 6, 7), [4])]]
