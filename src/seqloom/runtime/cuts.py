"""Along which axes the members of a team cut a model's weights, and how many members a model allows.

A team of t ranks runs the wide parts of a layer together: each member has 1/t of the heads and of the MLP's width.

    q, k, v, gate, up    [out, in]    rows are cut       member k has rows k/t .. (k+1)/t, and of the biases too
    o, down              [out, in]    columns are cut    what members return are parts of one sum

All else (norms, table of tokens, head) is whole on every member.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from seqloom.errors import SeqloomError
from seqloom.models import Transformer

ROWS, COLUMNS = 0, 1
_AXES = {"q_proj": ROWS, "k_proj": ROWS, "v_proj": ROWS, "gate_proj": ROWS, "up_proj": ROWS} | {
    "o_proj": COLUMNS,
    "down_proj": COLUMNS,
}


def reference_cuts(model: Transformer) -> dict[str, int]:
    """Return the axis of every parameter of the reference model that a team cuts, by name."""
    owners = {name: name.split(".")[-2] for name, _ in model.named_parameters()}
    return {name: _AXES[owner] for name, owner in owners.items() if owner in _AXES}


def reference_divided(model: Transformer) -> dict[str, int]:
    """Return what a tensor degree must divide in the reference model."""
    spec = model.spec
    return {"heads": spec.heads, "kv heads": spec.kv_heads, "MLP width": spec.ffn}


def check_degree(model: str, degree: int, divided: Mapping[str, int], uncuttable: str) -> None:
    """Refuse a tensor degree that a model does not allow.

    Args:
        model: what to call it.
        degree: ranks of a team; 1 is always fine.
        divided: what -> how many there are; the degree divides each.
        uncuttable: why there is no degree above 1; "" if there may be one.
    """
    if degree == 1:
        return
    if uncuttable:
        raise SeqloomError(f"tensor degree {degree}: {model} cannot be cut: {uncuttable}; plan with tensor = 1")
    wrong = [f"{what} {count}" for what, count in divided.items() if degree < 1 or count % degree]
    if wrong:
        common = math.gcd(*divided.values())
        legal = [each for each in range(1, common + 1) if common % each == 0]
        nearest = min(legal, key=lambda each: (abs(each - degree), each))
        raise SeqloomError(
            f"tensor degree {degree}: {model} has {', '.join(wrong)}, and every member of a team has an equal share; "
            f"nearest: tensor = {nearest} (possible: {', '.join(map(str, legal))})"
        )
