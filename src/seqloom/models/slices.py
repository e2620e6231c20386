"""Slices of weights in a team: what a layer runs with must be its member's share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.comm.context import Context


def check_slice(weight: torch.Tensor, rows: int, context: Context | torch.Tensor) -> None:
    """Refuse a weight of which not this rank's share is in hand: the sum over a team would be that of another model.

    Args:
        weight: [rows in hand, ...], cut by rows.
        rows: of the whole weight.
        context: of the round. A rank that is in no group may not know its team, and has no tokens either; a ticket, as
            compiled layers have it, has no team.
    """
    team = None if isinstance(context, torch.Tensor) else context.team
    members = 1 if team is None else len(team.ranks)
    if weight.shape[0] * members != rows and (team is None or members > 1):
        raise SeqloomError(
            f"{weight.shape[0]} of {rows} rows of a weight in a team of {members}: every member computes with an equal "
            "share; keep parameters where each plan wants them (sharding 'free'), or plan with tensor = 1"
        )
