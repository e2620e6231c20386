"""What plans, simulations and evaluations show of themselves in a notebook."""

import re

import seqloom as sl
from seqloom.api import evaluate
from seqloom.plan.notebook import html_table

LENGTHS, CLUSTER, MODEL = (512, 700, 1_300, 33_000, 4_096, 260), "1x8xH200", "llama3-8b"


def cells(table: str) -> list[list[str]]:
    return [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", table)][1:]


def test_texts_are_escaped():
    table = html_table("<b>", ["&"], [["<script>"]])
    assert "<caption>&lt;b&gt;</caption>" in table and "<th>&amp;</th>" in table and "<td>&lt;script&gt;</td>" in table


def test_a_plan_shows_its_groups_with_all_tokens():
    plan = sl.plan(LENGTHS, cluster=CLUSTER, model=MODEL, planner="flex")
    rows = cells(plan._repr_html_())
    assert sum(int(row[-1].replace(",", "")) for row in rows) == plan.tokens == sum(LENGTHS)
    assert f"hash {plan.hash[:8]}" in plan._repr_html_()


def test_a_simulation_and_an_evaluation_show_their_figures():
    cost = sl.cost_model(CLUSTER, MODEL)
    one = evaluate(sl.plan(LENGTHS, cluster=CLUSTER, model=MODEL, planner="flex"), cost)
    assert dict(cells(one.simulation._repr_html_()))["step"] == f"{one.simulation.step_ns / 1e6:,.2f} ms"
    shown = dict(cells(one._repr_html_()))
    assert shown["step_ms"] == str(one.as_dict()["step_ms"]) and shown["rounds"] == str(one.plan.rounds)
