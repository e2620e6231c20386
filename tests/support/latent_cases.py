"""Latent attention on any groups, checked against one process that writes out every key and value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from seqloom.attention import LatentShape, latent_attention
from seqloom.attention.kernels import Kernel
from seqloom.dist import bind
from seqloom.dist.transport import Transport
from seqloom.plan import GroupFamily
from support.attention_cases import Case, rows_of_pack
from support.oracle import attention_truth


class LatentInputs(NamedTuple):
    """q, rows, weight and dout of `latent_attention`."""

    q: torch.Tensor
    rows: torch.Tensor
    weight: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def of(cls, case: Case, shape: LatentShape, dtype: torch.dtype, device: str = "cpu") -> LatentInputs:
        """Draw unit-normal tensors; the weight so that keys and values are about as large."""
        generator, tokens = torch.Generator().manual_seed(0), sum(case.lengths)
        sizes = [
            (tokens, case.heads, shape.unrotated + shape.rotated),
            (tokens, shape.row),
            (case.heads * (shape.unrotated + shape.values), shape.latent),
            (tokens, case.heads, shape.values),
        ]
        q, rows, weight, dout = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
        return cls(*(x.to(device, dtype) for x in (q, rows, weight * shape.latent**-0.5, dout)))


class LatentTruth(NamedTuple):
    """Output, and gradients of q, rows and weight."""

    out: torch.Tensor
    dq: torch.Tensor
    drows: torch.Tensor
    dweight: torch.Tensor


def truth(case: Case, shape: LatentShape, inputs: LatentInputs) -> LatentTruth:
    """What one process computes in float64."""
    q, rows, weight, dout = (x.cpu().double() for x in inputs)
    rows, weight = rows.requires_grad_(), weight.requires_grad_()
    made = (rows[:, : shape.latent] @ weight.T).unflatten(1, (case.heads, -1))
    k, v = made.split([shape.unrotated, shape.values], dim=2)
    k = torch.cat([k, rows[:, None, shape.latent :].expand(-1, case.heads, -1)], dim=2)
    options = case.options | {"scale": case.scale or q.shape[2] ** -0.5}
    wide = [torch.nn.functional.pad(x, (0, shape.head - x.shape[2])).detach() for x in (q, k, v, dout)]
    options |= {"causal": case.causal, "sinks": None, "keep": case.keep_masks(), "prefixes": case.prefixes}
    found = attention_truth(*wide, case.lengths, **options)
    torch.autograd.backward([k, v], [found.dk[..., : k.shape[2]], found.dv[..., : v.shape[2]]])
    return LatentTruth(found.out[..., : shape.values], found.dq[..., : q.shape[2]], rows.grad, weight.grad)


def attend_latents(
    transport: Transport, case: Case, shape: LatentShape, inputs: LatentInputs, kernels: Kernel | None = None
) -> tuple[torch.Tensor, LatentTruth]:
    """Run one rank's share, forward and backward; return where its tokens are in the pack, and what it found."""
    q, rows, weight, dout = inputs
    family = GroupFamily.cached(case.world, case.world)
    places = {"node_size": case.node_size, "dropout_seed": case.dropout_seed}
    places |= {"prefixes": dict(enumerate(case.prefixes))}
    context = bind(case.work, transport, device=q.device, family=family, **places)
    place = rows_of_pack(case, context)
    q, rows, weight = q[place].requires_grad_(), rows[place].requires_grad_(), weight.clone().requires_grad_()
    options = {**case.options, "causal": case.causal, "dropout": case.dropout, "layer": 0}
    out = latent_attention(q, rows, weight, shape, context, **options, kernels=kernels)
    found = out.detach(), *torch.autograd.grad(out, (q, rows, weight), dout[place])
    return place.cpu(), LatentTruth(*(x.cpu() for x in found))


def assemble_latents(parts: Iterable[tuple[torch.Tensor, LatentTruth]]) -> LatentTruth:
    """Put the results of all ranks into the order of the pack, and sum their gradients of the weight."""
    places, found = zip(*parts, strict=True)
    order, (outs, dqs, drows, dweights) = torch.argsort(torch.cat(places)), zip(*found, strict=True)
    by_token = (torch.cat(each)[order] for each in (outs, dqs, drows))
    return LatentTruth(*by_token, sum(each.double() for each in dweights))
