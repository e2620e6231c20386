"""Reference transformer: a decoder of the Llama family on packed tokens, which the engine is tested and trained with.

Tokens of all documents lie one after the other, [tokens, hidden]; there is no batch axis and no padding. All but
attention treats every token by itself, so a rank works on the tokens that its layout gives it, and only the attention
call communicates. Parameters have the names and shapes of Hugging Face's LlamaForCausalLM.

In a TP group, attention and feed-forward communicate too: every rank has all tokens of the group and its own shard of
the heads and of the width, which are those of the weights in hand when a layer runs. See `dist.tensor_parallel`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import silu

from seqloom.attention import attention
from seqloom.dist import all_gather_rows, attention_context, reduce_scatter_rows, run_in_mlp_layout
from seqloom.errors import SeqloomError, unknown_name
from seqloom.models.experts import ExpertRange, divide_experts, grouped_linear, run_experts

if TYPE_CHECKING:
    from seqloom.describe import ModelSpec
    from seqloom.dist.rank_tokens import Context

INITIAL_STD = 0.02
FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
"""Model type of Hugging Face -> the switches of `TransformerOptions` that it turns on."""
_EXPECTED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
}
"""Keys of a config of which the model supports one value only."""
RopeTable = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of every token's angles, see `Rope.table`."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3 for longer contexts: low frequencies are divided by `factor`, high ones stay.

    A frequency is low when it turns less than `low` times in the `context` tokens of the first training, high when it
    turns more than `high` times, and interpolated in between.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def __post_init__(self) -> None:
        if self.factor < 1 or not 0 < self.low < self.high or self.context < 1:
            raise SeqloomError(
                f"{self}: needs factor >= 1, 0 < low < high and context >= 1; Llama 3.1 has Llama3Scaling()"
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding with base `theta`.

    The two halves of a head are the two coordinates of n = dim / 2 points. Point i at position p is turned by
    p * theta ** (-i / n) radians, so the product of a query at p and a key at s depends on p - s only. Positions are
    given per token: a token keeps its own wherever a plan puts it.
    """

    theta: float = 10_000.0
    scaling: Llama3Scaling | None = None

    def frequencies(self, dim: int, device: torch.device | None = None) -> torch.Tensor:
        """Return radians per token of every point, float64[dim / 2]."""
        if dim % 2 or self.theta <= 0:
            raise SeqloomError(
                f"heads of {dim} with rope theta {self.theta}: a head is dim / 2 points and theta is positive; "
                f"choose head_dim {dim + dim % 2} and a theta like 10000"
            )
        frequency = self.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        if self.scaling is None:
            return frequency
        turns = self.scaling.context * frequency / (2 * math.pi)
        high = ((turns - self.scaling.low) / (self.scaling.high - self.scaling.low)).clamp(0, 1)
        return frequency * (high + (1 - high) / self.scaling.factor)

    def table(self, positions: torch.Tensor, dim: int, dtype: torch.dtype) -> RopeTable:
        """Return (cos, sin) of every token's angles, each [tokens, 1, dim / 2].

        Angles are float64: at position 1,000,000 a float32 angle is wrong by up to 0.03 radians. The table is
        float32, or the `dtype` of the tensors that will be rotated where that is wider. Positions count from 0 in
        every document.
        """
        angles = positions.double()[:, None, None] * self.frequencies(dim, positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """Rotate `x` [tokens, heads, dim] by the angles of its tokens; rounded once, at the end."""
    cos, sin = table
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class TransformerOptions:
    """Constants and switches that a `ModelSpec` leaves out, since no time and no memory depends on them.

    Attributes:
        rope: rotary position embedding.
        eps: added to the mean square in every norm.
        qk_norm: queries and keys are normalised per head before rotation (Qwen 3).
        qkv_bias: the query, key and value projections have biases (Qwen 2).
    """

    rope: Rope = field(default_factory=Rope)
    eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TransformerOptions:
        """Read the content of a Hugging Face ``config.json``, beside `ModelSpec.load`, which reads the shapes.

        Raises:
            SeqloomError: a model type or a setting that the reference transformer does not have.
        """
        model_type = str(config.get("model_type"))
        if model_type not in FAMILIES:
            raise unknown_name("model_type of the reference transformer", model_type, FAMILIES)
        for key, expected in _EXPECTED.items():
            value = config.get(key)
            if value is not None and value != expected:
                raise SeqloomError(f"{key} = {value!r}: the reference transformer has {expected!r} only; leave it out")
        return cls(rope=_read_rope(config), eps=float(config.get("rms_norm_eps", 1e-6)), **FAMILIES[model_type])


def _read_rope(config: Mapping[str, Any]) -> Rope:
    """Read both spellings: `rope_parameters` with theta inside, and `rope_scaling` with theta beside it."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    rope_type = given.get("rope_type", given.get("type", "default"))
    if rope_type == "default":
        return Rope(theta)
    if rope_type != "llama3":
        raise SeqloomError(f"rope scaling {rope_type!r}: the reference transformer has 'default' and 'llama3' only")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in given]
    if missing:
        raise SeqloomError(f"rope scaling 'llama3' without {', '.join(missing)}; add it to the config")
    factor, low, high, context = (given[key] for key in keys)
    return Rope(theta, Llama3Scaling(float(factor), float(low), float(high), int(context)))


def check_weight_shard(weight: torch.Tensor, rows: int, context: Context | torch.Tensor) -> None:
    """Refuse a weight that is not this rank's shard: the sum over a TP group would be that of another model.

    Args:
        weight: [rows in hand, ...], sharded by rows.
        rows: of the whole weight.
        context: of the round. A rank that is in no group may not know its TP group, and has no tokens either; an opaque
            handle, as compiled layers have it, has no TP group.
    """
    tp_group = None if isinstance(context, torch.Tensor) else context.tp_group
    degree = 1 if tp_group is None else len(tp_group.ranks)
    if weight.shape[0] * degree != rows and (tp_group is None or degree > 1):
        raise SeqloomError(
            f"{weight.shape[0]} of {rows} rows of a weight in a TP group of {degree}: every rank computes with an "
            "equal share; keep parameters where each plan wants them (sharding 'free'), or plan with tensor = 1"
        )


class RMSNorm(nn.Module):
    """Divide by the root of the mean square over the last axis, in float32 or wider, then scale by `weight`."""

    def __init__(self, width: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, **factory))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise `x` [..., width]; the result has its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """Project to queries, keys and values, rotate them, attend, project back."""

    def __init__(self, spec: ModelSpec, options: TransformerOptions, layer: int, **factory: Any) -> None:
        super().__init__()
        self.layer_idx = layer
        self.heads, self.dim = spec.heads, spec.head_dim
        self.window, self.attention_chunk = spec.masks[layer]
        self.causal = spec.causal
        queries, keys, bias = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, options.qkv_bias
        self.q_proj = nn.Linear(spec.hidden, queries, bias=bias, **factory)
        self.k_proj = nn.Linear(spec.hidden, keys, bias=bias, **factory)
        self.v_proj = nn.Linear(spec.hidden, keys, bias=bias, **factory)
        self.o_proj = nn.Linear(queries, spec.hidden, bias=False, **factory)
        self.q_norm = RMSNorm(spec.head_dim, options.eps, **factory) if options.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, options.eps, **factory) if options.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, table: RopeTable, context: Context) -> torch.Tensor:
        """Attend within documents; `x` and the result are [tokens, hidden], `table` is of the TP group's tokens."""
        check_weight_shard(self.q_proj.weight, self.heads * self.dim, context)
        x = all_gather_rows(x, context)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.dim))
        q, k = rotate(q, table), rotate(k, table)
        inner, mask = attention_context(context), {"window": self.window, "attention_chunk": self.attention_chunk}
        mixed = attention(q, k, v, inner, causal=self.causal, **mask, scale=self.dim**-0.5, layer=self.layer_idx)
        return reduce_scatter_rows(self.o_proj(mixed.flatten(1)), context)


class FeedForward(nn.Module):
    """SwiGLU: one projection gates another, a third brings the product back."""

    def __init__(self, hidden: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.width = width
        self.gate_proj = nn.Linear(hidden, width, bias=False, **factory)
        self.up_proj = nn.Linear(hidden, width, bias=False, **factory)
        self.down_proj = nn.Linear(width, hidden, bias=False, **factory)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Map `x` [tokens, hidden] to the same shape."""
        return reduce_scatter_rows(self.partial(all_gather_rows(x, context), context), context)

    def partial(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return what this rank's part of the width adds to the output of the TP group's tokens."""
        check_weight_shard(self.gate_proj.weight, self.width, context)
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """SwiGLU feed-forwards whose matrices lie in one tensor each, expert by expert."""

    def __init__(self, spec: ModelSpec, **factory: Any) -> None:
        super().__init__()
        self.count, hidden, width = spec.experts, spec.hidden, spec.expert_ffn
        self.expert_range: ExpertRange | None = None
        self.gate_up_proj = nn.Parameter(torch.empty(self.count, 2 * width, hidden, **factory))
        self.down_proj = nn.Parameter(torch.empty(self.count, hidden, width, **factory))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the experts of every token, see `run_experts`; in a TP group, of this rank's."""
        experts = self.expert_range or ExpertRange(self.count, range(self.count))
        gate_up, down = map(experts.in_hand, (self.gate_up_proj, self.down_proj))

        def compute(rows: torch.Tensor, _: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            gate, up = grouped_linear(rows, gate_up, ends).chunk(2, dim=-1)
            return grouped_linear(silu(gate) * up, down, ends)

        return run_experts(x, chosen, weights, experts, compute)


class MixtureOfExperts(nn.Module):
    """A router sends every token to some experts; one more feed-forward, if there is one, serves all tokens."""

    def __init__(self, spec: ModelSpec, **factory: Any) -> None:
        super().__init__()
        self.top_k = spec.active_experts
        self.gate = nn.Linear(spec.hidden, spec.experts, bias=False, **factory)
        self.experts = Experts(spec, **factory)
        self.shared_expert = FeedForward(spec.hidden, spec.shared_ffn, **factory) if spec.shared_ffn else None

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Map `x` [tokens, hidden] to the same shape; the weights of a token's experts add up to 1."""
        x = all_gather_rows(x, context)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights, chosen = self.gate(x).to(wide).softmax(-1).topk(self.top_k)
        out = self.experts(x, chosen, (weights / weights.sum(-1, keepdim=True)).to(x.dtype))
        if self.shared_expert is not None:
            out = out + self.shared_expert.partial(x, context)
        return reduce_scatter_rows(out, context)


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input, each on normalised input."""

    def __init__(self, spec: ModelSpec, options: TransformerOptions, layer: int, **factory: Any) -> None:
        super().__init__()
        self.self_attn = Attention(spec, options, layer, **factory)
        sparse = layer in spec.moe_layers
        self.mlp = MixtureOfExperts(spec, **factory) if sparse else FeedForward(spec.hidden, spec.ffn, **factory)
        self.input_layernorm = RMSNorm(spec.hidden, options.eps, **factory)
        self.post_attention_layernorm = RMSNorm(spec.hidden, options.eps, **factory)

    def forward(self, x: torch.Tensor, table: RopeTable, context: Context) -> torch.Tensor:
        """Map `x` [tokens, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), table, context)
        return x + run_in_mlp_layout(self.post_attention_layernorm(x), context, lambda y: self.mlp(y, context))


class Decoder(nn.Module):
    """All but the output projection: tokens to hidden states."""

    def __init__(self, spec: ModelSpec, options: TransformerOptions, **factory: Any) -> None:
        super().__init__()
        self.rope, self.dim = options.rope, spec.head_dim
        self.embed_tokens = nn.Embedding(spec.vocabulary, spec.hidden, **factory)
        self.layers = nn.ModuleList(Layer(spec, options, layer, **factory) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, options.eps, **factory)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Return hidden states [tokens, hidden] after the final norm.

        Args:
            ids: int64[tokens], the tokens of this rank in the order of its layout; none is fine.
            positions: int64[tokens], position of each in its document, from 0.
            context: of the round, from `bind`: who attends to whom.
        """
        x = self.embed(ids, positions)
        return self.norm(self.body(x, positions, context, 0, len(self.layers)))

    def embed(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer, [tokens, hidden]; arguments as in `forward`."""
        if ids.ndim != 1 or ids.shape != positions.shape:
            raise SeqloomError(
                f"ids {list(ids.shape)} and positions {list(positions.shape)}: both are [tokens], packed, one position "
                "for each token; drop the batch axis, and pass context.positions"
            )
        return self.embed_tokens(ids)

    def body(self, x: torch.Tensor, positions: torch.Tensor, context: Context, first: int, stop: int) -> torch.Tensor:
        """Run layers first .. stop - 1 on `x` [tokens, hidden]; the result has its shape."""
        if context.tp_group is not None:
            positions = attention_context(context).positions
        table = self.rope.table(positions, self.dim, x.dtype)  # once, for all layers
        for layer in islice(self.layers, first, stop):
            x = layer(x, table, context)
        return x


class Transformer(nn.Module):
    """A language model with the shapes of a `ModelSpec`."""

    def __init__(
        self,
        spec: ModelSpec,
        options: TransformerOptions | None = None,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the model and draw its parameters.

        Args:
            spec: shapes, and the mask of every layer.
            options: constants and switches that a spec does not have; those of Llama by default.
            seed: the same seed gives the same parameters, whatever the ranks, the device and the rest of the model.
            dtype: of all parameters and activations; norms, angles and sums inside attention are float32 or wider.
            device: where parameters live. On "meta" nothing is drawn: call `to_empty` and `initialize` later.
        """
        super().__init__()
        options = options or TransformerOptions()
        _check_spec(spec, options.rope)
        self.spec, self.options = spec, options
        self.model = Decoder(spec, options, dtype=dtype, device="meta")  # no time spent on values that are replaced
        self.expert_load = divide_experts(self.model.layers, lambda each: getattr(each, "count", None))
        self.lm_head = nn.Linear(spec.hidden, spec.vocabulary, bias=False, dtype=dtype, device="meta")
        self._tie()
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.initialize(seed)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Return logits [tokens, vocabulary]; `self.model` takes the same arguments and gives the hidden states."""
        return self.lm_head(self.model(ids, positions, context))

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draw all parameters: norms 1, biases 0, matrices normal with standard deviation 0.02.

        Every matrix has a generator of its own, seeded by `seed` and its name, on the CPU and in float32. So its values
        do not depend on what else is drawn, and in another dtype they are the same numbers, rounded.
        """
        self._tie()  # `to_empty` has undone it
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(seed, name))

    def initial_value(self, seed: int, name: str) -> torch.Tensor:
        """Return the first values of one parameter, on the CPU and in float32; see `initialize`."""
        shape = self.get_parameter(name).shape
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return INITIAL_STD * torch.randn(shape, generator=generator, dtype=torch.float32)

    def _tie(self) -> None:
        if self.spec.tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def _check_spec(spec: ModelSpec, rope: Rope) -> None:
    """Refuse what the spec has and this model has not, and heads that cannot be rotated."""
    refused = {
        "learned_positions": (spec.learned_positions, "a table of positions"),
        "gated": (not spec.gated, "a feed-forward without gate"),
        "mixer_layers": (bool(spec.mixer_layers), "layers that scan"),
        "head_shapes": (bool(spec.head_shapes), "layers whose heads differ"),
        "latent": (spec.latent > 0, "latent attention"),
    }
    for name, (has, what) in refused.items():
        if has:
            raise SeqloomError(
                f"model {spec.name}: {name} = {getattr(spec, name)!r} means {what}; the reference transformer is a "
                "decoder of the Llama family: choose llama3-8b or qwen3-0.6b, or a spec that is gated and has neither "
                "mixers, latents, heads of single layers nor learned positions"
            )
    rope.frequencies(spec.head_dim)
