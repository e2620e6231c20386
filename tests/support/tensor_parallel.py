"""Models on the ranks of tp_groups, as simply as possible: parameters sliced once, gradients put together once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from seqloom.models.adapter import ModelAdapter


@torch.no_grad()
def slice_parameters(adapter: ModelAdapter, degree: int, index: int) -> dict[str, int]:
    """Leave a tp_group member's slices in the parameters of a network, in place; return the axis of each by name.

    Args:
        adapter: of the network, whole.
        degree: ranks of the tp_group.
        index: of the member.
    """
    cuts = {**adapter.tp_axes, **dict.fromkeys(adapter.cut_tables(degree), 0)}
    for name, parameter in adapter.module.named_parameters():
        if name in cuts:
            parameter.data = parameter.data.chunk(degree, cuts[name])[index].clone()
    return cuts


def whole_gradients(
    shares: Sequence[Mapping[str, torch.Tensor]], cuts: Mapping[str, int], degree: int
) -> dict[str, torch.Tensor]:
    """Return whole gradients, by name: slices side by side, copies of a slice added up.

    Args:
        shares: gradients of every rank, by name; rank k is member k % degree of its tp_group.
        cuts: axis of every parameter that is cut, by name.
        degree: ranks of a tp_group.
    """
    found = {}
    for name in shares[0]:
        slices = [torch.stack([share[name] for share in shares[index::degree]]).sum(0) for index in range(degree)]
        found[name] = torch.cat(slices, cuts[name]) if name in cuts else torch.stack(slices).sum(0)
    return found
