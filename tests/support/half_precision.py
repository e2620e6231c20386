"""Models of transformers of every kind in bfloat16: a step of the engine beside documents one by one without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seqloom.dist import run_ranks
from seqloom.engine import bind_plan, run_step
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.layout import Span
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.params import ReplicatedParameters
from seqloom.plan import Group
from support.dropout import expected_attention_dropout, with_expected_dropout
from support.model_kinds import (
    dynamic_frequencies,
    eurobert,
    gemma2,
    gpt2_with_dropout,
    llama4,
    llama_dynamic,
    longrope_frequencies,
    phi3_longrope,
    with_frequencies,
)
from support.oracle import visible
from support.steps import one_stage_plan
from support.tiny_models import VOCABULARY, targets, tiny_model

LENGTHS = (300, 7, 129, 64, 2)
VALID, LONGEST = sum(LENGTHS) - len(LENGTHS), max(LENGTHS)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
WIDE = {**SIZES, "head_dim": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
DELTA = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 48}
ROPE = {"dim": 32, "pretrained": 64}
CHUNKS = {"attention_chunk_size": 64, "floor_scale": 16, "intermediate_size_mlp": 256, "moe_layers": []}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
GPT2 = {"n_embd": 128, "n_positions": 512}


class Kind(NamedTuple):
    """A model of one kind, and what plain transformers needs to compute it."""

    build: Callable[[], Any]
    eager: bool = False  # torch's own attention does not know it
    frequencies: Callable[[int], np.ndarray] | None = None  # of RoPE, by the longest document
    seed: int | None = None  # of dropout
    prompts: tuple[int, ...] = ()  # how many of its first tokens see each other, of every document


def of(name: str, **changes: Any) -> Kind:
    """A model of `tiny_models`."""
    return Kind(partial(tiny_model, name, **SIZES, **changes))


def settled_gpt_oss() -> Any:
    """Sinks, windows and a router loss; every token has experts 0 and 2, which no rounding changes."""
    model = tiny_model("gpt-oss", **{**WIDE, "sliding_window": 50}, **ROUTED)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.weight *= 0.1
            layer.mlp.router.bias.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    return model


KINDS = {
    "qwen3": of("qwen3", head_dim=32),
    "qwen2-windows": of("qwen2-windows", sliding_window=50),
    "sinks and router loss": Kind(settled_gpt_oss, eager=True),
    "capped logits": Kind(partial(gemma2, **WIDE, sliding_window=50), eager=True),
    "chunks": Kind(partial(llama4, **WIDE, **CHUNKS)),
    "bidirectional": of("llama", is_causal=False),
    "prompts that see themselves": Kind(partial(tiny_model, "qwen3", **WIDE), prompts=(140, 0, 129, 1, 2)),
    "encoder": Kind(partial(eurobert, **SIZES)),
    "head with a bias": of("phi"),
    "scaled head": of("granite"),
    "longrope": Kind(partial(phi3_longrope, **ROPE, **SIZES), frequencies=partial(longrope_frequencies, **ROPE)),
    "dynamic rope": Kind(
        partial(llama_dynamic, 64, hidden_size=128, intermediate_size=256),
        frequencies=partial(dynamic_frequencies, **ROPE),
    ),
    "latents": of("minicpm3", **LATENT),
    "convolutions": of("lfm2"),
    "gated delta rule": of("qwen3-next", **DELTA),
    "mamba-2": of("bamba", **MAMBA),
    "mamba-2 beside attention": of("falcon-h1", **MAMBA, mamba_d_ssm=256),
    "dropout": Kind(partial(gpt2_with_dropout, **GPT2), seed=3),
    "dropout of attention weights": Kind(
        partial(gpt2_with_dropout, attn_pdrop=0.3, resid_pdrop=0.0, **GPT2), eager=True, seed=3
    ),
}
GROUPS = {"one rank": (1, 1), "ulysses": (2, 1), "ring": (1, 2)}


class Found(NamedTuple):
    """Mean loss of the valid labels and every gradient."""

    loss: float
    gradients: dict[str, torch.Tensor]

    def errors(self, truth: Found) -> tuple[float, float]:
        """Relative errors of the loss, and of all gradients together."""
        pairs = [(self.gradients[name].float(), each.float()) for name, each in truth.gradients.items()]
        difference = sum(float((own - each).square().sum()) for own, each in pairs)
        whole = sum(float(each.square().sum()) for _, each in pairs)
        return abs(self.loss / truth.loss - 1), (difference / whole) ** 0.5


def plain(kind: Kind, model: Any, ids: list[torch.Tensor]) -> Found:
    """One document after the other, by plain transformers."""
    if kind.frequencies:
        with_frequencies(model, kind.frequencies(LONGEST))
    drops = nullcontext()
    if kind.seed is not None and kind.eager:
        drops = expected_attention_dropout(model, kind.seed)
    elif kind.seed is not None:
        model = with_expected_dropout(model, kind.seed)
    model.set_attn_implementation("eager" if kind.eager else "sdpa")
    loss, routers = torch.zeros((), device=ids[0].device), []
    with drops:
        for each, prompt in zip(ids, kind.prompts or (0,) * len(ids), strict=True):
            shown = {"attention_mask": visible(len(each), True, None, prefix=prompt)[None, None].to(each.device)}
            found = model(input_ids=each[None], use_cache=False, **(shown if kind.prompts else {}))
            labels = targets(each.cpu()).to(each.device)
            loss = loss + cross_entropy(found.logits[0].float(), labels, reduction="sum", ignore_index=-100) / VALID
            routers.append(getattr(found, "router_logits", None))
    if getattr(model.config, "output_router_logits", False):
        logits = tuple(torch.cat(layer).float() for layer in zip(*routers, strict=True))
        aux = load_balancing_loss_func(logits, model.num_experts, model.num_experts_per_tok)
        loss = loss + model.router_aux_loss_coef * aux
    loss.backward()
    zeros = torch.zeros_like
    return Found(loss.item(), {n: zeros(p) if p.grad is None else p.grad for n, p in model.named_parameters()})


def by_engine(kind: Kind, model: Any, ids: list[torch.Tensor], ulysses: int, ring: int) -> Found:
    """All documents in one step of one group, on ranks that are threads."""
    ranks, device = ulysses * ring, ids[0].device
    spans = tuple(Span(number, 0, length) for number, length in enumerate(LENGTHS))
    plan = one_stage_plan([[Group(tuple(range(ranks)), ulysses, ring, spans)]], ranks=ranks, heads=4)
    models = [attach(copy.deepcopy(model), longest=LONGEST if kind.frequencies else None) for _ in range(ranks)]
    labels = [targets(each.cpu()).to(device) for each in ids]

    def read(context: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([each[d][a:b] for d, a, b in context.spans]) for each in (ids, labels))

    def body(transport: Any) -> Found:
        adapter = model_adapter(models[transport.rank])
        recompute_layers(adapter.layers)
        parameters = ReplicatedParameters(adapter, transport)
        prefixes = dict(enumerate(kind.prompts))
        bound = bind_plan(plan, transport, device=device, dropout_seed=kind.seed, prefixes=prefixes)
        result = run_step(bound, parameters, read, VALID)
        return Found(result.loss, dict(parameters.full_gradients()))

    return run_ranks(ranks, body, timeout_s=120)[0]


def in_half_precision(model: Any) -> Any:
    """Return a copy with bfloat16 parameters; buffers (of RoPE) stay in float32, as in `from_pretrained`."""
    half = copy.deepcopy(model)
    for parameter in half.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return half


def compared(name: str, device: str) -> tuple[tuple[float, float], dict[str, tuple[float, float]]]:
    """Errors in bfloat16 of plain transformers, and of the engine by groups."""
    kind = KINDS[name]
    exact = kind.build().float().to(device)
    with torch.no_grad():  # drawn for widths of 16: here the same values would amplify every rounding
        for parameter in exact.parameters():
            parameter *= 0.35 if parameter.ndim > 1 else 1
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCABULARY, (length,), generator=generator).to(device) for length in LENGTHS]
    half = in_half_precision(exact)
    truth = plain(kind, copy.deepcopy(exact), ids)
    engine = {each: by_engine(kind, half, ids, *shape).errors(truth) for each, shape in GROUPS.items()}
    return plain(kind, half, ids).errors(truth), engine
