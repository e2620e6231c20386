"""An independent model in plain torch, one document at a time, and helpers that run ours on any shape of group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from seqloom.describe import ModelSpec
from seqloom.dist.rank_tokens import bind
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Span
from seqloom.models import Transformer, TransformerOptions
from seqloom.plan import Checkpoint, Group, StageMicroBatch

torch.set_num_threads(1)

Tensors = dict[str, torch.Tensor]


def tiny(**changes) -> ModelSpec:
    fields = {"layers": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 40, "gated": True}
    return ModelSpec(**{"name": "tiny", "vocabulary": 31, "tied": False} | fields | changes)


def lively(
    spec: ModelSpec, options: TransformerOptions | None = None, dtype: torch.dtype = torch.float64
) -> Transformer:
    """A model whose attention is far from uniform and whose norms and biases are not trivial."""
    model = Transformer(spec, options, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 12
    return model


def documents(lengths: Sequence[int], vocabulary: int = 31) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]


def cotangents(lengths: Sequence[int], vocabulary: int = 31) -> list[torch.Tensor]:
    """What every document's logits are multiplied with to make a loss."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(length, vocabulary, generator=generator, dtype=torch.float64) for length in lengths]


def one_group(
    lengths: Sequence[int], ulysses: int = 1, ring: int = 1, order: Sequence[int] | None = None
) -> StageMicroBatch:
    spans = tuple(Span(k, 0, lengths[k]) for k in order or range(len(lengths)))
    return StageMicroBatch((Group(tuple(range(ulysses * ring)), ulysses, ring, spans),), Checkpoint.NONE)


@dataclass
class Result:
    """Logits by document and gradients by parameter, summed over ranks; `shares` are the gradients of every rank."""

    logits: list[torch.Tensor]
    gradients: Tensors
    shares: list[Tensors]


def run(model: Transformer, docs: list[torch.Tensor], work: StageMicroBatch, *, world: int | None = None) -> Result:
    """Run `model` forward and backward on all ranks of `work`; the loss is the sum of logits x cotangents."""
    weights = cotangents([len(doc) for doc in docs])
    layout = work.attention_layout()

    def body(transport):
        local = Transformer(model.spec, model.options, dtype=next(model.parameters()).dtype)
        local.load_state_dict(model.state_dict())
        context = bind(work, transport, device=torch.device("cpu"))
        spans = layout.spans(transport.rank)
        ids = torch.cat([docs[d][a:b] for d, a, b in spans] or [torch.empty(0, dtype=torch.int64)])
        cotangent = torch.cat([weights[d][a:b] for d, a, b in spans] or [torch.empty(0, model.spec.vocabulary)])
        logits = local(ids, context.positions, context)
        (logits.double() * cotangent).sum().backward()
        return spans, logits.detach(), {name: p.grad for name, p in local.named_parameters()}

    results = run_ranks(world or 1 + max(max(group.ranks) for group in work.groups), body, strict=True)
    whole = [torch.full((len(doc), model.spec.vocabulary), torch.nan, dtype=results[0][1].dtype) for doc in docs]
    for spans, logits, _ in results:
        for (d, a, b), rows in zip(spans, logits.split([b - a for _, a, b in spans]), strict=True):
            whole[d][a:b] = rows
    shares = [gradients for _, _, gradients in results]
    summed = {name: sum(share[name].double() for share in shares) for name in shares[0]}
    return Result(whole, summed, shares)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _turn(x: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotary positions as complex numbers: [length, heads, dim], position = row."""
    half = x.shape[-1] // 2
    points = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    turned = points * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def _visible(length: int, window: int | None, chunk: int | None, causal: bool) -> torch.Tensor:
    position = torch.arange(length)
    distance = position[:, None] - position
    same = position[:, None] // (chunk or length) == position // (chunk or length)
    return ((distance >= 0) | (not causal)) & (distance < (window or length + 1)) & same


def plain_document(
    p: Mapping[str, torch.Tensor], spec: ModelSpec, options: TransformerOptions, ids: torch.Tensor
) -> torch.Tensor:
    """Logits of one document, [length, vocabulary], from parameters by their Hugging Face names."""
    speeds = [options.rope.theta ** (-2 * i / spec.head_dim) for i in range(spec.head_dim // 2)]
    frequencies = torch.tensor(speeds, dtype=torch.float64)
    x = p["model.embed_tokens.weight"][ids]
    for layer, mask in enumerate(spec.masks):
        name = f"model.layers.{layer}."
        y = _norm(x, p[name + "input_layernorm.weight"], options.eps)
        heads = []
        for which, count in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
            bias = p.get(f"{name}self_attn.{which}_proj.bias")
            heads.append(functional.linear(y, p[f"{name}self_attn.{which}_proj.weight"], bias).view(len(x), count, -1))
        q, k, v = heads
        if options.qk_norm:
            q = _norm(q, p[name + "self_attn.q_norm.weight"], options.eps)
            k = _norm(k, p[name + "self_attn.k_norm.weight"], options.eps)
        q, k = _turn(q, frequencies), _turn(k, frequencies)
        q, k, v = (h.repeat_interleave(spec.heads // h.shape[1], dim=1).transpose(0, 1) for h in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=_visible(len(x), *mask, spec.causal))
        x = x + out.transpose(0, 1).reshape(len(x), -1) @ p[name + "self_attn.o_proj.weight"].T
        y = _norm(x, p[name + "post_attention_layernorm.weight"], options.eps)
        gate, up, down = (p[f"{name}mlp.{which}_proj.weight"] for which in ("gate", "up", "down"))
        x = x + (functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
    head = p["model.embed_tokens.weight"] if spec.tied else p["lm_head.weight"]
    return _norm(x, p["model.norm.weight"], options.eps) @ head.T


def plain(model: Transformer, docs: list[torch.Tensor], dtype: torch.dtype = torch.float64) -> Result:
    """The independent implementation, document by document, in `dtype`."""
    p = {name: q.detach().to(dtype).requires_grad_() for name, q in model.named_parameters()}
    logits = [plain_document(p, model.spec, model.options, doc) for doc in docs]
    weights = cotangents([len(doc) for doc in docs])
    sum((x.double() * w).sum() for x, w in zip(logits, weights, strict=True)).backward()
    gradients = {name: q.grad.double() for name, q in p.items()}
    return Result([x.detach() for x in logits], gradients, [gradients])


def errors(got: Result, wanted: Result) -> dict[str, float]:
    """norm(difference) / norm(wanted) of all logits and of every gradient.

    A gradient far smaller than the largest (no token attends to another, say) is measured against a thousandth of it.
    """
    floor = 1e-3 * max(float(x.norm()) for x in wanted.gradients.values())
    found = {}
    for name, x in wanted.gradients.items():
        found[name] = float((got.gradients[name].double() - x.double()).norm()) / max(float(x.norm()), floor)
    a, b = torch.cat(got.logits).double(), torch.cat(wanted.logits).double()
    return found | {"logits": float((a - b).norm() / b.norm())}


@dataclass
class Kit:
    """The functions above, handed to tests by one fixture."""

    tiny: Callable = tiny
    lively: Callable = lively
    documents: Callable = documents
    cotangents: Callable = cotangents
    result: Callable = Result
    one_group: Callable = one_group
    run: Callable = run
    plain: Callable = plain
    errors: Callable = errors


@pytest.fixture
def kit() -> Kit:
    return Kit()
