"""What a rank keeps of a unit between its forward and its backward on one stage.

The output's memory is not kept: its place in the graph is enough to go backward from. Where the stage is recomputed,
there is no graph either, only the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from seqloom.pipeline.offload import Offload

Run = Callable[[torch.Tensor], torch.Tensor]
"""A stage's forward: from token ids or hidden states to hidden states or a loss."""


class Kept:
    """One unit on one stage, from forward to backward."""

    def __init__(self, run: Run, given: torch.Tensor, *, again: bool, offload: Offload | None) -> None:
        """Take what the stage is given.

        Args:
            run: the stage's forward; called once more if `again`.
            given: token ids, or hidden states of which nobody else has a graph.
            again: keep the input only, and run forward again before the backward.
            offload: what is kept lies in host memory meanwhile; None: where it is.
        """
        self._run, self._given, self._again, self._offload = run, given, again, offload
        self.dtype = given.dtype  # of the output, once there is a graph
        self._device = given.device
        self._edge: GradientEdge | None = None
        self._number: int | None = None

    def forward(self) -> torch.Tensor:
        """Run the stage and return its output, outside of any graph."""
        if not self._again:
            return self._with_graph()
        with torch.no_grad():
            output = self._run(self._given)
        if self._offload is not None and self._given.is_floating_point():
            self._number = self._offload.hold(self._given)
            self._given = torch.empty(0)
        return output

    def edge(self) -> GradientEdge | None:
        """Return where backward starts, with all it needs in place; None where nothing wants a gradient."""
        offload, self._offload = self._offload, None
        if offload is not None:
            offload.bring_back(self._device)
            if self._number is not None:
                self._given = offload.held(self._number)
        if self._again:
            self._with_graph()
        return self._edge

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the hidden states that the stage was given, after its backward."""
        found = self._given.grad
        return torch.zeros_like(self._given) if found is None else found

    def _with_graph(self) -> torch.Tensor:
        if self._given.is_floating_point():
            self._given.requires_grad_()
        if self._offload is None:
            output = self._run(self._given)
        else:
            with self._offload.saving():
                output = self._run(self._given)
        self.dtype = output.dtype
        self._edge = get_gradient_edge(output) if output.requires_grad else None
        return output.detach()
