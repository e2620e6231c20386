"""The loss of packed tokens, in chunks: the logits of all tokens never exist at once.

For every chunk the logits are made, turned into token losses and, in the same memory, into their own gradient, which
is multiplied out at once. So backward only scales what forward has found, and a chunk's logits are made only once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from seqloom.errors import SeqloomError

IGNORED = -100
"""The label of a position that the loss does not count."""
CHUNK = 2048
"""Tokens whose logits exist at once; what profiles call `head_chunk`."""


class HeadGradients:
    """The head's gradients of all rounds of a step that wait for their backward, in one sum.

    Each would be as large as the head, and where a document is in pieces, all of them wait at once. Forward adds a
    round's to the sum, and the next backward takes all of it. So rounds must be scaled alike, as those of a step are.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._sum: torch.Tensor | None = None

    def room(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum, to be added to; it has the shape of the weight."""
        if self._sum is None:
            self._sum = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        return self._sum

    def take(self) -> torch.Tensor | None:
        """Return the sum, if any, and start anew."""
        found, self._sum = self._sum, None
        return found

    def clear(self) -> None:
        """Forget what waits: a step was given up."""
        self._sum = None


def summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk: int = CHUNK,
    together: HeadGradients | None = None,
) -> torch.Tensor:
    """Return the sum of the token losses, a scalar in float32 (float64 for float64).

    No tokens, or none that count, give exactly 0 and zero gradients.

    Args:
        hidden: [tokens, hidden], after the final norm.
        weight: [vocabulary, hidden] of the head, whole; the table of tokens where the head is tied to it.
        labels: int64[tokens], shifted already; `IGNORED` where the loss does not count.
        chunk: tokens whose logits exist at once.
        together: where the weight's gradient waits for backward with those of other calls; None: by itself.
    """
    _check(hidden, weight, labels, chunk)
    wants = torch.is_grad_enabled() and (hidden.requires_grad, weight.requires_grad)
    return _SummedLoss.apply(hidden, weight, labels, chunk, wants or (False, False), together)


def valid_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return how many labels count, a scalar int64 on the device of the labels."""
    return (labels != IGNORED).sum()


class _Found(NamedTuple):
    """The sum and its gradients; None where they are not asked for."""

    loss: torch.Tensor
    hidden: torch.Tensor | None
    weight: torch.Tensor | None


class _SummedLoss(torch.autograd.Function):
    """The one node of a loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk: int,
        wants: tuple[bool, bool],
        together: HeadGradients | None,
    ) -> torch.Tensor:
        found = _sum_chunks(hidden, weight, labels, chunk, wants, together)
        ctx.save_for_backward(found.hidden, found.weight)
        ctx.together, ctx.dtype = together if wants[1] else None, weight.dtype
        return found.loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        scale, (hidden, weight) = grad_outputs[0], ctx.saved_tensors
        if ctx.together is not None:
            weight = ctx.together.take()
        scaled = [None if each is None else each * scale for each in (hidden, weight)]
        return scaled[0], None if scaled[1] is None else scaled[1].to(ctx.dtype), None, None, None, None


def _sum_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int,
    wants: tuple[bool, bool],
    together: HeadGradients | None,
) -> _Found:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    dhidden = torch.empty_like(hidden) if wants[0] else None
    dweight = (together or HeadGradients()).room(weight, wide) if wants[1] else None
    for start in range(0, len(hidden), chunk):
        rows = hidden[start : start + chunk]
        losses, slopes = _one_chunk(rows, weight, labels[start : start + chunk], wide, any(wants))
        total += losses
        if dhidden is not None:
            torch.mm(slopes, weight, out=dhidden[start : start + chunk])
        if dweight is not None:
            dweight += slopes.T @ rows
    own = dweight.to(weight.dtype) if dweight is not None and together is None else None
    return _Found(total, dhidden, own)


def _one_chunk(
    rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, wide: torch.dtype, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a chunk's losses and, if wanted, its gradient by the logits, [rows, vocabulary]."""
    logits = rows @ weight.T
    losses = _losses_on(logits.device, wide)(logits, labels, IGNORED, wanted)
    return losses.sum(), logits


def plain_losses(logits: torch.Tensor, labels: torch.Tensor, ignored: int, wanted: bool) -> torch.Tensor:
    """Return the loss of every row in float32 (float64 for float64), 0 where its label is `ignored`.

    Args:
        logits: [rows, vocabulary]; overwritten, where wanted by their own gradient.
        labels: int64[rows].
        ignored: the label that does not count.
        wanted: whether the gradient is.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    counts = (labels != ignored).unsqueeze(1)
    targets = torch.where(counts, labels.unsqueeze(1), 0)
    top = logits.amax(1, keepdim=True).to(wide)
    values = logits.sub_(top) if logits.dtype == wide else logits - top
    chosen = values.gather(1, targets)
    sums = values.exp_().sum(1, keepdim=True)
    if wanted:
        values.scatter_add_(1, targets, -sums)
        torch.mul(values, counts / sums, out=logits)
    return torch.where(counts, sums.log() - chosen, 0).squeeze(1)


def _losses_on(device: torch.device, wide: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return `plain_losses`, or what does the same faster on this device."""
    if device.type == "cuda" and wide == torch.float32 and find_spec("triton") is not None:
        from seqloom.models.triton_loss import fused_losses

        return fused_losses
    return plain_losses


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> None:
    shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or labels.shape != hidden.shape[:1]:
        raise SeqloomError(
            f"{shapes}: the loss takes hidden [tokens, hidden], the head's weight [vocabulary, hidden] and one label "
            "for every token; drop the batch axis"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point() or labels.dtype != torch.int64:
        raise SeqloomError(
            f"hidden {hidden.dtype}, weight {weight.dtype}, labels {labels.dtype}: hidden and weight need one floating "
            "dtype and labels int64; convert them"
        )
    if not hidden.device == weight.device == labels.device:
        raise SeqloomError(
            f"hidden on {hidden.device}, weight on {weight.device}, labels on {labels.device}; move them to one device"
        )
    if chunk < 1:
        raise SeqloomError(f"chunks of {chunk} tokens: a chunk has at least 1; {CHUNK} is a good choice on a GPU")
    if labels.is_cpu and len(labels):  # elsewhere looking would wait for the device, which refuses by itself
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= len(weight)))]
        if len(wrong):
            raise SeqloomError(
                f"label {int(wrong[0])} with a vocabulary of {len(weight)}: labels are {IGNORED} (not counted) or "
                f"0 .. {len(weight) - 1}; use the tokenizer that the model was made with"
            )
