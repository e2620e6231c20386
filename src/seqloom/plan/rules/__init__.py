"""All invariants of a plan, as code.

A rule is a small function that raises `PlanError`; later rules rely on earlier ones. No rule builds a layout for a
round that has no explicit one, so checking costs microseconds per document: 8,192 documents on 1,024 ranks take some
tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seqloom.plan.rules import actions, groups, structure, tokens

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

RULES: dict[str, Callable[[Plan], None]] = {
    "documents": structure.documents,
    "limits": structure.limits,
    "stage-ranks": structure.stage_ranks,
    "layers": structure.layers,
    "work": structure.work,
    "offload": structure.offload,
    "lighter": structure.lighter,
    "group-ranks": structure.group_ranks,
    "group-shape": structure.group_shape,
    "heads": structure.heads,
    "family": structure.family,
    "tensor": structure.tensor,
    "expert": structure.expert,
    "group-order": groups.group_order,
    "methods": groups.methods,
    "routes": groups.routes,
    "spans": tokens.spans,
    "coverage": tokens.coverage,
    "pieces": tokens.pieces,
    "stage-spans": tokens.stage_spans,
    "pairs": groups.pairs,
    "layouts": tokens.layouts,
    "capacity": tokens.capacity,
    "remap": tokens.remap,
    "table": actions.table,
    "order": actions.order,
    "reduce": actions.reduce,
    "shards": actions.shards,
    "messages": actions.messages,
    "deadlock": actions.deadlock,
}
"""Every rule by its name, in the order in which they are checked."""
