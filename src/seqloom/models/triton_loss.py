"""Fused losses of a chunk of logits, a module of its own because it imports Triton, which only GPUs have.

One kernel reads the logits twice and leaves the gradient in their place, which `plain_losses` of loss.py does in many
passes over memory. Sums are float32.
"""

# ruff: noqa: N803
from __future__ import annotations

import torch
import triton
import triton.language as tl

from seqloom.attention.kernels.triton_kernels import run_kernel

_BLOCK, _WARPS = 8192, 16  # logits of a row that are read at once


@triton.jit
def _losses_kernel(
    logits,
    labels,
    chosen,
    losses,
    IGNORED: tl.constexpr,
    VOCABULARY: tl.constexpr,  # known when compiled: rows are read in wide, aligned pieces
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Serve one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * VOCABULARY
    label = tl.load(labels + row)
    columns = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    for begin in range(0, VOCABULARY, BLOCK):
        values = tl.load(logits + begin + columns, begin + columns < VOCABULARY, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(values, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(values - higher), 0)
        top = higher
    loss = tl.log(total) - (tl.load(chosen + row).to(tl.float32) - top)
    tl.store(losses + row, tl.where(label == IGNORED, 0.0, loss))
    if GRADIENT:
        for begin in range(0, VOCABULARY, BLOCK):
            inside = begin + columns < VOCABULARY
            values = tl.load(logits + begin + columns, inside, float("-inf")).to(tl.float32)
            slopes = tl.exp(values - top) / total - tl.where(begin + columns == label, 1.0, 0.0)
            slopes = tl.where(label == IGNORED, 0.0, slopes)
            tl.store(logits + begin + columns, slopes.to(logits.dtype.element_ty), inside)


def fused_losses(logits: torch.Tensor, labels: torch.Tensor, ignored: int, needs_gradient: bool) -> torch.Tensor:
    """Return the loss of every row, float32[rows]; see `plain_losses`. Logits are contiguous."""
    rows, vocabulary = logits.shape
    targets = torch.where(labels == ignored, 0, labels)
    chosen = logits.gather(1, targets.unsqueeze(1))  # also refuses labels outside the vocabulary, on the device
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(vocabulary))
        options = {"IGNORED": ignored, "VOCABULARY": vocabulary, "GRADIENT": needs_gradient, "BLOCK": block}
        run_kernel(_losses_kernel, (rows,), logits, labels, chosen, losses, **options, num_warps=_WARPS)
    return losses
