"""The loss of packed tokens, in chunks: the logits of all tokens never exist at once.

Forward computes the logits of a chunk, the token losses and, in the memory of the logits, their gradient, from which it
adds up the gradients of hidden states and head. So backward only scales these, and no logits are computed twice.

In a TP group that cuts the head, rank k has the k-th of t equal parts of the vocabulary. Every rank makes the logits of
all tokens of the group for its part, and ranks tell each other of every token three numbers (`sharded_losses`):

    hidden states of a rank -> all-gather -> logits of its part -> maximum, sum of exponentials, label's logit of each
    gradient of its tokens  <- sum        <- logits' gradients  <- the same of the whole vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from seqloom.dist.tensor_parallel import TPGroup
from seqloom.errors import SeqloomError

IGNORED = -100
"""The label of a position that the loss does not count."""
CHUNK = 2048
"""Tokens whose logits exist at once; what profiles call `head_chunk`."""


class HeadGradients:
    """The sums of the head's gradients, weight and bias, of all rounds of a step that wait for their backward.

    Each would be as large as the head, and where a document is in pieces, all of them wait at once. A forward adds its
    round's gradients to the sums, and the next backward takes all of them: the rounds of a step have the same scale.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum for "weight" or "bias", to be added to; it has the shape of this parameter."""
        if name not in self._sums:
            self._sums[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return self._sums[name]

    def take(self) -> dict[str, torch.Tensor]:
        """Return the sums, if any, by name, and start anew."""
        sums, self._sums = self._sums, {}
        return sums

    def clear(self) -> None:
        """Drop the sums, as after a failed step."""
        self._sums = {}


class Logits(NamedTuple):
    """What a model makes of the products of hidden states and head, bias added: cap * tanh(scale * product / cap).

    Attributes:
        scale: of the products.
        cap: that logits stay below; None: no cap.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply(self, products: torch.Tensor, *, needs_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits, in the place of the products, and their derivative; None: it is 1, or not needed."""
        if self == PRODUCTS:
            return products, None
        logits = products.mul_(self.scale)
        if self.cap is None:
            return logits, logits.new_tensor(self.scale) if needs_slope else None
        shares = logits.div_(self.cap).tanh_()
        slope = (1 - shares.square()).mul_(self.scale) if needs_slope else None
        return shares.mul_(self.cap), slope


PRODUCTS = Logits()
"""The products themselves."""


def summed_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk: int = CHUNK,
    head_gradients: HeadGradients | None = None,
    logits: Logits = PRODUCTS,
    token_weights: torch.Tensor | None = None,
    tp_group: TPGroup | None = None,
) -> torch.Tensor:
    """Return the sum of the token losses, a scalar in float32 (float64 for float64).

    No tokens, or none that count, give exactly 0 and zero gradients.

    Args:
        hidden: [tokens, hidden], after the final norm.
        weight: [vocabulary, hidden] of the head, unsharded; the token embedding where the head is tied to it.
        labels: int64[tokens], shifted already; `IGNORED` where the loss does not count.
        bias: [vocabulary] of the head; None: it has none.
        chunk: tokens whose logits exist at once.
        head_gradients: sums the head's gradients with those of other calls until backward; None: sums of its own.
        logits: what they are of the products of hidden states and head.
        token_weights: [tokens] factors of the token losses, constants for autograd; None: 1.
        tp_group: that cuts the vocabulary: weight and bias are this rank's part, tokens its own, and all ranks of the
            group call it; None: nothing cuts it.
    """
    _check(hidden, weight, bias, labels, chunk, tp_group)
    given = (hidden, weight, bias)
    needs = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in given)
    return _SummedLoss.apply(*given, labels, chunk, needs, head_gradients, logits, token_weights, tp_group)


@torch.no_grad()
def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk: int = CHUNK,
    logits: Logits = PRODUCTS,
    tp_group: TPGroup | None = None,
) -> torch.Tensor:
    """Return the loss of every token, [tokens] in float32 (float64 for float64), without gradients: `summed_loss`."""
    _check(hidden, weight, bias, labels, chunk, tp_group)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden, labels = _of_all_ranks(tp_group, hidden, labels)
    losses, function = labels.new_zeros(len(labels), dtype=wide), _losses_function(hidden.device, wide, tp_group)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        made, _ = logits.apply(linear(hidden[rows], weight, bias), needs_slope=False)
        losses[rows] = function(made, labels[rows], IGNORED, False)
    return losses if tp_group is None else tp_group.own_rows(losses)


@torch.no_grad()
def token_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk: int = CHUNK // 4,
    logits: Logits = PRODUCTS,
    tp_group: TPGroup | None = None,
) -> torch.Tensor:
    """Return what trainers log of each label's distribution, [tokens, 5] in float32 (float64 for float64).

    Columns: the label's log-probability; the entropy; the log of the sum of squared probabilities; the mean logit; 1
    where the label is the likeliest token. Rows of labels that do not count are 0. For the arguments see `summed_loss`.
    """
    _check(hidden, weight, bias, labels, chunk, tp_group)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    hidden, labels = _of_all_ranks(tp_group, hidden, labels)
    found = labels.new_zeros((len(labels), 5), dtype=wide)
    for rows in (labels != IGNORED).nonzero().squeeze(1).split(chunk):
        made = logits.apply(linear(hidden[rows], weight, bias), needs_slope=False)[0].to(wide)
        made = made if tp_group is None else tp_group.all_gather_columns(made)
        values = made.log_softmax(1)
        chosen, entropy = values.gather(1, labels[rows, None]).squeeze(1), -(values.exp() * values).sum(1)
        top = (made.argmax(1) == labels[rows]).to(wide)
        found[rows] = torch.stack((chosen, entropy, (2 * values).logsumexp(1), made.mean(1), top), dim=1)
    return found if tp_group is None else tp_group.own_rows(found)


def valid_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return how many labels count, a scalar int64 on the device of the labels."""
    return (labels != IGNORED).sum()


class _SummedLoss(torch.autograd.Function):
    """The autograd node of a loss. Forward computes the gradients too; `needs` says which (hidden, weight, bias)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunk: int,
        needs: tuple[bool, ...],
        head_gradients: HeadGradients | None,
        made: Logits,
        token_weights: torch.Tensor | None,
        tp_group: TPGroup | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        hidden, labels, token_weights = _of_all_ranks(tp_group, hidden, labels, token_weights)
        function, of_chunks = _losses_function(hidden.device, wide, tp_group), list[torch.Tensor]()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        dhidden = torch.empty_like(hidden) if needs[0] else None
        sums = head_gradients or HeadGradients()
        dweight = sums.buffer("weight", weight, wide) if needs[1] else None
        dbias = sums.buffer("bias", bias, wide) if bias is not None and needs[2] else None
        for start in range(0, len(hidden), chunk):
            rows = hidden[start : start + chunk]
            logits, slope = made.apply(linear(rows, weight, bias), needs_slope=any(needs))
            losses = function(logits, labels[start : start + chunk], IGNORED, any(needs))
            if token_weights is not None:
                factors = token_weights[start : start + chunk]
                losses = losses * factors
                if any(needs):
                    logits.mul_(factors.unsqueeze(1))
            if tp_group is None:
                total += losses.sum()
            else:
                of_chunks.append(losses)
            if slope is not None:  # the logits are their own gradient now
                logits.mul_(slope)
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[start : start + chunk])
            if dweight is not None:
                dweight += logits.T @ rows
            if dbias is not None:
                dbias += logits.sum(0, dtype=wide)
        if tp_group is not None:  # tokens of a rank count there, and add up what all parts of the vocabulary say
            total += tp_group.own_rows(torch.cat([total.new_zeros(0), *of_chunks])).sum()
            dhidden = None if dhidden is None else tp_group.reduce_scatter(dhidden)
        own = (None, None) if head_gradients is not None else (dweight, dbias)
        ctx.save_for_backward(dhidden, *(None if each is None else each.to(weight.dtype) for each in own))
        ctx.head_gradients, ctx.dtype = head_gradients if any(needs[1:]) else None, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        scale, (dhidden, *head) = grad_outputs[0], ctx.saved_tensors
        if ctx.head_gradients is not None:
            sums = ctx.head_gradients.take()
            head = [sums.get("weight"), sums.get("bias")]
        return (
            None if dhidden is None else dhidden * scale,
            *(None if each is None else (each * scale).to(ctx.dtype) for each in head),
            *[None] * 7,
        )


def plain_losses(logits: torch.Tensor, labels: torch.Tensor, ignored: int, needs_gradient: bool) -> torch.Tensor:
    """Return the loss of every row in float32 (float64 for float64), 0 where its label is `ignored`.

    Args:
        logits: [rows, vocabulary]; overwritten, by their own gradient where that is needed.
        labels: int64[rows].
        ignored: the label that does not count.
        needs_gradient: of the logits.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    counts = (labels != ignored).unsqueeze(1)
    targets = torch.where(counts, labels.unsqueeze(1), 0)
    top = logits.amax(1, keepdim=True).to(wide)
    values = logits.sub_(top) if logits.dtype == wide else logits - top
    chosen = values.gather(1, targets)
    sums = values.exp_().sum(1, keepdim=True)
    if needs_gradient:
        values.scatter_add_(1, targets, -sums)
        torch.mul(values, counts / sums, out=logits)
    return torch.where(counts, sums.log() - chosen, 0).squeeze(1)


def sharded_losses(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int, needs_gradient: bool, *, tp_group: TPGroup
) -> torch.Tensor:
    """Return what `plain_losses` returns, of logits whose columns are cut over a TP group; all of its ranks call it.

    Args:
        logits: [rows, vocabulary / t], of this rank's part of the vocabulary, see `plain_losses`.
        labels: int64[rows], of the whole vocabulary.
        ignored, needs_gradient: see `plain_losses`.
        tp_group: whose k-th rank has the k-th part.
    """
    wide, counts = torch.promote_types(logits.dtype, torch.float32), labels != ignored
    own = labels - tp_group.index * logits.shape[1]
    here = (counts & (own >= 0) & (own < logits.shape[1])).unsqueeze(1)
    targets = torch.where(here, own.unsqueeze(1), 0)
    chosen = torch.where(here, logits.gather(1, targets).to(wide), 0)
    top = logits.amax(1, keepdim=True).to(wide)
    values = logits.sub_(top) if logits.dtype == wide else logits - top
    sums = values.exp_().sum(1, keepdim=True)
    every = tp_group.all_gather_columns(torch.cat((top, sums, chosen), dim=1)).view(len(logits), -1, 3)
    tops, parts, labelled = every.unbind(2)
    highest = tops.amax(1, keepdim=True)
    total = (parts * (tops - highest).exp()).sum(1, keepdim=True)
    if needs_gradient:
        values.mul_((top - highest).exp() / total)
        values.scatter_add_(1, targets, -here.to(wide))
        torch.mul(values, counts.unsqueeze(1), out=logits)
    return torch.where(counts, total.log().squeeze(1) - (labelled.sum(1) - highest.squeeze(1)), 0)


def _of_all_ranks(tp_group: TPGroup | None, *of_tokens: Any) -> Any:
    """Return tensors of this rank's tokens, or None, as they are of all tokens of its TP group, if it has one."""
    if tp_group is None:
        return of_tokens
    return tuple(None if each is None else tp_group.all_gather(each) for each in of_tokens)


def _losses_function(
    device: torch.device, wide: torch.dtype, tp_group: TPGroup | None = None
) -> Callable[..., torch.Tensor]:
    """Return `plain_losses`, or the fused kernel that does the same on a GPU; `sharded_losses` in a TP group."""
    if tp_group is not None:
        return partial(sharded_losses, tp_group=tp_group)
    if device.type == "cuda" and wide == torch.float32 and find_spec("triton") is not None:
        from seqloom.models.triton_loss import fused_losses

        return fused_losses
    return plain_losses


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk: int,
    tp_group: TPGroup | None,
) -> None:
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
    if bias is not None and (bias.shape, bias.dtype, bias.device) != (weight.shape[:1], weight.dtype, weight.device):
        raise SeqloomError(
            f"bias {list(bias.shape)} of {bias.dtype} on {bias.device} for a head of weight {list(weight.shape)} of "
            f"{weight.dtype} on {weight.device}: a bias has a number for every token of the vocabulary, in the "
            "weight's dtype and place; convert it"
        )
    if chunk < 1:
        raise SeqloomError(f"chunks of {chunk} tokens: a chunk has at least 1; {CHUNK} is a good choice on a GPU")
    if labels.is_cpu and len(labels):  # elsewhere looking would wait for the device, which refuses by itself
        vocabulary = len(weight) * (1 if tp_group is None else len(tp_group.ranks))
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))]
        if len(wrong):
            raise SeqloomError(
                f"label {int(wrong[0])} with a vocabulary of {vocabulary}: labels are {IGNORED} (not counted) or "
                f"0 .. {vocabulary - 1}; use the tokenizer that the model was made with"
            )
