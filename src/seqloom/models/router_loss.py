"""The load-balancing loss of routers (Switch Transformer), over all tokens of a step, whatever the plan.

    loss = coefficient * experts * sum over e of f_e P_e

f_e is the share of (layer, token) pairs whose top-k experts include e, P_e the mean probability that routers give it;
both are over all layers with experts. A product of two means is no sum over tokens, but f has no gradient: once it is
known for the whole step, the gradient is that of a sum,

    sum over layers, tokens and e of slope_e p_e,    slope_e = coefficient * experts * f_e / pairs

So a step runs forward twice. The first pass, without gradients, counts (`RouterLoss.counting`); ranks add up what they
counted. In the second every layer with experts adds its part of the sum to the backward of its output (`add_loss`), as
Megatron's MoEAuxLossAutoScaler does: no scalar has to be carried to the loss. `engine.run_step` does so; a loop of
one's own writes it out:

    with torch.no_grad(), loss.counting(device) as counted:
        ...                                         the whole step forward
    all_reduce(counted)
    with loss.step(counted) as value:
        ...                                         forward and backward; `value` is the loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from seqloom.errors import SeqloomError


@dataclass(slots=True, eq=False)
class RouterLoss:
    """The load-balancing loss of one model on one rank.

    Attributes:
        coefficient: of the loss.
        experts: that a router chooses from.
        top_k: experts of a token.
    """

    coefficient: float
    experts: int
    top_k: int
    _sums: torch.Tensor | None = field(default=None, init=False)  # float64[3, experts], while counting
    _slopes: torch.Tensor | None = field(default=None, init=False)  # float64[experts], in a step

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[torch.Tensor]:
        """Count in the block, which runs the whole step forward; yield what is counted, to be added up over ranks.

        Rows are the times each expert was chosen, its summed probabilities, and, in each column, the pairs.
        """
        self._sums = torch.zeros(3, self.experts, dtype=torch.float64, device=device)
        try:
            yield self._sums
        finally:
            self._sums = None

    @contextmanager
    def step(self, counted: torch.Tensor) -> Iterator[torch.Tensor]:
        """Add the loss's gradient to every backward of the block; yield the loss, a scalar in float64.

        `counted` is what `counting` yielded, of all ranks.
        """
        chosen, probabilities, pairs = counted
        self._slopes = self.coefficient * self.experts * chosen / pairs.clamp(min=1).square()
        try:
            yield (self._slopes * probabilities).sum()
        finally:
            self._slopes = None

    def of_tokens(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Count tokens by their logits [tokens, experts], or return their part of the sum above; None: nothing to add.

        Raises:
            SeqloomError: gradients are wanted outside of a step.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        if self._sums is not None:
            with torch.no_grad():
                shares = torch.softmax(logits.to(wide), dim=-1)
                chosen = shares.topk(self.top_k).indices
                self._sums[0] += torch.zeros_like(shares).scatter_(1, chosen, 1.0).double().sum(0)
                self._sums[1] += shares.double().sum(0)
                self._sums[2] += len(logits)
            return None
        if not torch.is_grad_enabled() or not logits.requires_grad:
            return None
        if self._slopes is None:
            raise SeqloomError(
                f"a router loss of coefficient {self.coefficient} outside of a step: it is over all tokens of the "
                "step, which must be counted first; run the step with seqloom.engine.run_step, or in a loop of your "
                "own twice, in counting() and step() of model_adapter(model).router_loss; or load the model with "
                "output_router_logits=False"
            )
        return (torch.softmax(logits.to(wide), dim=-1) * self._slopes.to(wide)).sum()


def add_loss(output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return `output` as it is; its backward adds the gradient of the scalar `loss` to what it is given."""
    add: Callable[..., Any] = _AddLoss.apply
    return add(output, loss)


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = torch.ones((), dtype=loss.dtype, device=loss.device)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return grad_outputs[0], ctx.one
