"""Gated delta rule and Mamba-2's scan in plain products, because the functions of transformers round to float32.

Every head has a state S [dim, dim of values]. A token decays it, writes a value at its key, and reads at its query:

    S <- exp(g) S,   S <- S + k (v - [delta rule: k' S]) beta,   out = q' S

Tokens are taken in chunks. Inside a chunk the decay between two tokens follows from sums G of g, and what the tokens of
the chunk write, u, from a triangular system; before it there is only the state:

    u = (I + tril(beta K K' D, -1))^-1 beta (V - exp(G) K S)        D_ij = exp(G_i - G_j), j <= i
    out = exp(G) Q S + tril(Q K' D) u        S <- exp(G_last) S + (exp(G_last - G) K)' u

All of it has the dtype of the inputs: what float32 leaves of sums of decays depends on where a document is cut, and
plans are compared in float64.
"""

from __future__ import annotations

import torch

CHUNK = 64
"""Tokens of a chunk."""


def decayed_linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan the tokens of one document, all in one dtype.

    Args:
        q, k: [heads, tokens, dim].
        v: [heads, tokens, dim of values].
        g: [heads, tokens], logarithms of decays.
        beta: [heads, tokens], of the delta rule; None: values are written as they are.
        state: [heads, dim, dim of values] before the first token; None: zeros.

    Returns:
        Output [heads, tokens, dim of values], and the state after the last token.
    """
    if state is None:
        state = v.new_zeros((len(v), k.shape[-1], v.shape[-1]))
    outs = []
    for start in range(0, v.shape[1], CHUNK):
        chunk = slice(start, start + CHUNK)
        gates = None if beta is None else beta[:, chunk]
        out, state = _chunk(q[:, chunk], k[:, chunk], v[:, chunk], g[:, chunk], gates, state)
        outs.append(out)
    return torch.cat(outs, dim=1), state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor | None, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a chunk of tokens and the state after it, see above."""
    total = g.cumsum(-1)
    since = total.exp()[..., None]
    later = torch.ones((g.shape[1], g.shape[1]), dtype=torch.bool, device=g.device).triu(1)
    decay = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()
    written = v
    if beta is not None:
        read = (beta[..., None] * k @ k.mT * decay).tril(-1)
        new = beta[..., None] * (v - since * k @ state)
        written = torch.linalg.solve_triangular(read, new, upper=False, unitriangular=True)
    out = since * q @ state + (q @ k.mT * decay) @ written
    until = (total[:, -1:] - total).exp()[..., None]
    return out, since[:, -1:] * state + (until * k).mT @ written
