"""The mixed-integer solver HiGHS, as the planners that need one talk to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from seqloom.errors import SeqloomError


class Matrix(NamedTuple):
    """A sparse matrix, row after row."""

    start: np.ndarray
    """int32[rows + 1]: where each row begins."""
    column: np.ndarray
    """int32[entries]"""
    value: np.ndarray
    """float64[entries]"""


def require_highspy() -> Any:
    """The solver's module; SeqloomError with the way out if it is not installed."""
    try:
        import highspy
    except ImportError:
        raise SeqloomError("planners flexsp and exact need the HiGHS solver: pip install 'seqloom[exact]'") from None
    return highspy


def programme(
    cost: np.ndarray,
    columns: tuple[np.ndarray, np.ndarray],
    whole: Sequence[bool],
    rows: tuple[np.ndarray, np.ndarray],
    matrix: Matrix,
) -> Any:
    """Minimise ``cost @ x`` with ``x`` and ``matrix @ x`` between their bounds, as HiGHS reads it.

    Args:
        cost: float64[columns].
        columns: lower and upper bounds of x; infinities are allowed.
        whole: which columns take whole numbers only.
        rows: lower and upper bounds of the rows.
        matrix: the rows.
    """
    highspy = require_highspy()
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(cost), len(rows[0])
    model.col_cost_ = cost
    model.col_lower_, model.col_upper_ = columns
    model.row_lower_, model.row_upper_ = rows
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    model.integrality_ = [kinds[bool(each)] for each in whole]
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = matrix
    return model
