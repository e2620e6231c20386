"""Time on the GPU: matrix products, elementwise work, attention kernels by document length, the optimiser.

`layer_values` counts what a token leaves in a layer: values that backward reads (memory) and values that elementwise
work touches (time).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.shapes import GroupShape
from seqloom.describe.model import Adapters
from seqloom.plan import Checkpoint
from seqloom.plan.round import even_ranges

if TYPE_CHECKING:
    from seqloom.cost.profile import AnalyticProfile, Curve
    from seqloom.describe import Cluster, ModelSpec

BACKWARD_FLOPS = 2.5  # attention backward over forward: five products of the same size instead of two
OPTIMISER_TRAFFIC = 30  # bytes per parameter: read gradient, master, two moments; write the last three, bf16
LOGIT_BYTES = 16  # per vocabulary entry and token: logits out, float32 softmax, gradient back
SCAN_EFFICIENCY = 0.08
"""Of the rate of large matrix products, what the small ones of a scan reach. No profile has a figure of its own: the
gated delta rule of flash-linear-attention is published with 3.7 ns for a token and head of 128 on H100, forward, which
is 49 TFLOP/s."""


class LayerValues(NamedTuple):
    """Elements of one token in one layer."""

    saved: int  # for backward, when nothing is recomputed
    touched: int  # that elementwise work reads or writes in a forward


class ExpertTimes(NamedTuple):
    """What the experts of all layers take that routers choose, forward and backward.

    Their weights are read from memory beside the products; with few tokens for each, that takes longer.
    """

    token_ns: float  # per token of a rank, times the imbalance
    products: float  # share of that which is matrix products
    reading: float  # time to read an expert's weights for every choice of a token, over `token_ns`
    weights_ns: float  # per round, to read the weights of every expert that a rank has once
    imbalance: float  # tokens at the busiest rank of an EP group over the mean


@lru_cache(maxsize=64)
def layer_values(model: ModelSpec, tensor: int = 1, imbalance: float = 1.0) -> tuple[LayerValues, ...]:
    """One entry per layer: attention or mixer, and feed-forward, with their norms and residuals.

    Saved: both halves' input and its norm; q, k, v; and the attention output twice, since with Ulysses the backward of
    attention reads it as the kernel left it, and the projection after it as it came back. Touched: a norm reads and
    writes, a residual reads two and writes one, rotary reads and writes q and k. What goes into the convolution
    and the scan of a mixer and comes out is saved, and touched twice.

    Tensor ranks save the norms as they gathered them, of all tokens of the tensor parallel group; of their own heads
    and their own part of the feed-forward they save all these tokens, which is as much as all of it for their own.

    Args:
        imbalance: tokens that the experts of a rank get, over the tokens that it has.
    """
    latents = 2 * (model.query_latent + model.latent_values)  # before their norm and after
    mixers, values = frozenset(model.mixer_layers), []
    for layer, (ffn, window) in enumerate(zip(feed_forward_values(model, imbalance), model.windows, strict=True)):
        kv_heads, dim = model.head_shape(layer)
        query, kv = model.heads * dim, kv_heads * dim
        attends, mixed = window != 0, model.mixer_values if layer in mixers else 0
        saved = (2 + 2 * tensor) * model.hidden + attends * (3 * query + 2 * kv + latents) + mixed
        touched = 10 * model.hidden + attends * 2 * (query + kv) + 2 * mixed
        own = model.adapters[layer] if model.adapters else Adapters()
        values.append(LayerValues(saved + ffn.saved + own.saved, touched + ffn.touched + own.touched))
    return tuple(values)


def feed_forward_values(model: ModelSpec, imbalance: float = 1.0) -> tuple[LayerValues, ...]:
    """One entry per layer, of its feed-forward half without norm and residual.

    In a mixture of experts a token passes its active experts and the shared one, through a copy in the experts' order
    and back.
    """
    matrices, experts = 3 if model.gated else 2, frozenset(model.moe_layers)
    dense = LayerValues(matrices * model.ffn, matrices * model.ffn)
    routed, shared = routed_values(model, imbalance), matrices * model.shared_ffn
    sparse = LayerValues(routed.saved + shared, routed.touched + shared)
    return tuple(sparse if layer in experts else dense for layer in range(model.layers))


def routed_values(model: ModelSpec, imbalance: float = 1.0) -> LayerValues:
    """The experts that a router chooses for a token, in one layer, with the copies before and after them."""
    width = (3 if model.gated else 2) * math.ceil(imbalance * model.active_experts * model.expert_ffn)
    copies = math.ceil(imbalance * 2 * model.active_experts * model.hidden)
    return LayerValues(width + copies, width + 2 * copies)


def attention_widths(model: ModelSpec) -> tuple[int, int]:
    """Values per token of all query heads together, and of all key heads; the value heads have as many.

    Of layers that differ (`ModelSpec.head_shapes`), those of most.
    """
    return model.heads * model.head_dim, model.kv_heads * model.head_dim


def layers_by_mask(model: ModelSpec) -> dict[tuple[int | None, int | None], float]:
    """Window and attention chunk -> layers that have them.

    A layer with heads of another width counts for as many layers as its width is of `head_dim`.
    """
    counts = Counter((mask, model.head_shape(layer)[1]) for layer, mask in enumerate(model.masks))
    found: dict[tuple[int | None, int | None], float] = dict.fromkeys(model.masks, 0)
    for (mask, dim), layers in counts.items():
        found[mask] += layers if dim == model.head_dim else layers * dim / model.head_dim
    return found


def attending_layers(model: ModelSpec) -> tuple[tuple[tuple[int | None, int | None], float], ...]:
    """`layers_by_mask` of the layers that attend, in one order."""
    found = ((mask, layers) for mask, layers in layers_by_mask(model).items() if mask[0] != 0)
    return tuple(sorted(found, key=lambda item: [each or 0 for each in item[0]]))


def kv_heads_per_rank(heads: int, kv_heads: int, ulysses: int) -> int:
    """Key/value heads of the Ulysses rank whose query heads read most of them."""
    shared = heads // kv_heads
    return max(-(-high // shared) - low // shared for low, high in even_ranges(heads, ulysses))


@dataclass(frozen=True, slots=True, eq=False)
class LengthCurve:
    """Attention time per token by length: ``L * (forwards / E_f(L) + 2.5 / E_b(L))`` with E in TFLOP/s.

    Linear between the knots. That is exact where throughput is flat, and needs no logarithm, whose last bit differs
    between machines. Below the first knot the time per token stays (a kernel tile is not smaller), above the last the
    throughput stays.
    """

    start: np.ndarray  # float64[K + 1] where each segment begins, first at 0
    base: np.ndarray  # float64[K + 1] value there
    slope: np.ndarray  # float64[K + 1]

    @classmethod
    def of(cls, curve: Curve, forwards: int) -> LengthCurve:
        """Join forward and backward; ``forwards`` is 2 where attention is recomputed."""
        knots = np.array(curve.lengths, dtype=np.float64)
        value = knots * (forwards / np.array(curve.forward) + BACKWARD_FLOPS / np.array(curve.backward))
        inner = (value[1:] - value[:-1]) / (knots[1:] - knots[:-1])
        return cls(
            start=np.concatenate([[0.0], knots]),
            base=np.concatenate([value[:1], value]),
            slope=np.concatenate([[0.0], inner, value[-1:] / knots[-1:]]),
        )

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """float64[n] at float64[n] lengths."""
        segment = np.searchsorted(self.start, lengths, side="right") - 1
        return self.base[segment] + self.slope[segment] * (lengths - self.start[segment])


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Compute times of one model on one kind of GPU, in ns."""

    model: ModelSpec
    matmul_tflops: float
    memory_gb_s: float  # achieved, not spec
    masks: tuple[tuple[tuple[int | None, int | None], float], ...]  # of layers that attend: see `layers_by_mask`
    causal: dict[int, LengthCurve]  # by number of forwards
    tile: dict[int, LengthCurve]
    float8_speedup: float  # of the products that run in float8: all but those of weight gradients; 1: none do
    imbalance: float  # tokens that the experts of the busiest rank get, over the tokens that a rank has

    @classmethod
    def build(
        cls, profile: AnalyticProfile, cluster: Cluster, model: ModelSpec, *, float8: bool, parts: int = 1
    ) -> Compute:
        """Take the device's spec memory bandwidth and the profile's efficiencies; so many ranks divide experts."""
        return cls(
            model,
            profile.matmul_tflops,
            cluster.device.hbm_gb_s * profile.memory_efficiency,
            attending_layers(model),
            {forwards: LengthCurve.of(profile.attention, forwards) for forwards in (1, 2)},
            {forwards: LengthCurve.of(profile.tile, forwards) for forwards in (1, 2)},
            profile.float8_speedup if float8 else 1.0,
            profile.expert_imbalance if parts > 1 else 1.0,
        )

    def of_layers(self, model: ModelSpec) -> Compute:
        """The same for a part of the model's layers."""
        return replace(self, model=model, masks=attending_layers(model))

    def scan(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """ns per token of a group of what mixers scan: on the rank with most heads, or of its tokens and states."""
        model = self.model
        operations = model.mixer_flops / shape.degree
        if shape.states:
            operations = model.mixer_run_flops / shape.degree
        elif model.mixer_heads:
            operations = model.mixer_flops * (-(-model.mixer_heads // shape.degree) / model.mixer_heads)
        return self._scan_ns(operations, checkpoint)

    def joined_states(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """ns per document of a group of joining the states of all its runs, which every rank does."""
        runs = shape.degree * shape.runs_per_rank
        return self._scan_ns(runs * self.model.mixer_join_flops, checkpoint) if shape.states else 0.0

    def _scan_ns(self, operations: float, checkpoint: Checkpoint) -> float:
        """ns of so many operations of each mixer's forward; a backward is twice as much."""
        passes = 4 if checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 3
        every = passes * len(self.model.mixer_layers) * operations
        return every / (SCAN_EFFICIENCY * self.matmul_tflops * 1e3)

    def linear(self, checkpoint: Checkpoint) -> float:
        """ns per token on one rank for all layers, forward and backward, with recomputation."""
        return self._layers_ns(self._matmul_parameters, self._values, checkpoint, self.model.adapter_parameters)

    def feed_forward(self, checkpoint: Checkpoint) -> float:
        """ns per token of what ``linear`` spends in feed-forward layers, without adapters."""
        parameters = self._matmul_parameters - self.model.mixing_parameters
        return self._layers_ns(parameters, feed_forward_values(self.model, self.imbalance), checkpoint)

    def experts(self, checkpoint: Checkpoint, parts: int) -> ExpertTimes:
        """What of `linear` routed experts take, and reading the weights of one of so many parts of all experts."""
        model, layers = self.model, len(self.model.moe_layers)
        if not layers:
            return ExpertTimes(0.0, 0.0, 0.0, 0.0, 1.0)
        passes = (4 if checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 3) - self._frozen
        met, values = self._routed_parameters, (routed_values(model, self.imbalance),) * layers
        token_ns, products = self._layers_ns(met, values, checkpoint), self._layers_ns(met, (), checkpoint)
        read_ns = passes * 2 / self.memory_gb_s  # of a weight, or to write its gradient
        every = layers * model.expert_parameters(model.experts) / parts
        return ExpertTimes(token_ns, products / token_ns, read_ns * met / token_ns, read_ns * every, self.imbalance)

    def _layers_ns(
        self, parameters: int, values: tuple[LayerValues, ...], checkpoint: Checkpoint, adapters: int = 0
    ) -> float:
        """ns per token: a forward is 2 FLOPs per parameter met and moves bf16 values at memory speed, backward twice.

        Recomputing adds a forward. Of frozen parameters a backward has the input's gradient alone; `adapters` are so
        many parameters that are trained beside them.
        """
        passes = 4 if checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 3
        touched = sum(layer.touched for layer in values)
        products = self._product_time_ratio(passes) * (2 * parameters / (self.matmul_tflops * 1e3))
        if self._frozen:
            products = (passes - 1) / passes * products + 2 * adapters / (self.matmul_tflops * 1e3)
        return passes * (products + 2 * touched / self.memory_gb_s)

    @property
    def _frozen(self) -> bool:
        """Whether the model's own weights have no gradients."""
        return bool(self.model.adapters)

    def forward_shares(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Share of forward in the parts that products of frozen weights are in; {} where all weights are trained."""
        if not self._frozen:
            return {}
        passes, single = (4 if checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 3), GroupShape(1, 1)
        routed, scans = self.experts(checkpoint, 1), self.scan(single, checkpoint)
        linear = self.linear(checkpoint) - routed.token_ns
        met = 2 * (self._matmul_parameters - self._routed_parameters) / (self.matmul_tflops * 1e3)
        chosen, head = 2 * self._routed_parameters / (self.matmul_tflops * 1e3), self._head_products
        return {
            "linear": ((linear + met) / passes + scans / passes) / (linear + scans),  # a product less than passes
            "routed": (routed.token_ns + chosen) / passes / routed.token_ns if routed.token_ns else 0.0,
            "head": (head / 2 + (self.head() - head) / 3) / self.head(),
        }

    def _product_time_ratio(self, passes: int) -> float:
        """Time of so many products over their time in bfloat16: all but one, the weights' gradients, are in float8."""
        return (1 + (passes - 1) / self.float8_speedup) / passes

    @property
    def _values(self) -> tuple[LayerValues, ...]:
        return layer_values(self.model, imbalance=self.imbalance)

    @property
    def _matmul_parameters(self) -> int:
        """Weights of layers that a token is multiplied with, without adapters; of experts, as on the busiest rank."""
        model = self.model
        own = len(model.moe_layers) * model.expert_parameters(model.active_experts) + model.adapter_parameters
        return model.matmul_parameters - model.head_parameters - own + self._routed_parameters

    @property
    def _routed_parameters(self) -> int:
        """Weights of experts that a token is multiplied with, as often as on the busiest rank."""
        own = len(self.model.moe_layers) * self.model.expert_parameters(self.model.active_experts)
        return own + round((self.imbalance - 1) * own)

    @property
    def matmul_share(self) -> float:
        """The products of weight gradients over the forward of ``linear``, without recomputation.

        That is the share of ``linear`` that is matrix products, unless others than these are in float8; with adapters,
        theirs alone.
        """
        touched = sum(layer.touched for layer in self._values)
        products, moves = self._matmul_parameters / (self.matmul_tflops * 1e3), touched / self.memory_gb_s
        scans = self.scan(GroupShape(1, 1), Checkpoint.NONE) / 6  # half of a forward, like the others
        if self._frozen:
            adapters = self.model.adapter_parameters / (self.matmul_tflops * 1e3)
            return adapters / (products + adapters + moves + scans)
        return products / (self._product_time_ratio(3) * products + moves + scans)

    def head(self) -> float:
        """ns per token of the vocabulary projection and the loss, whose chunks are never recomputed."""
        return self._head_products + LOGIT_BYTES * self.model.vocabulary / self.memory_gb_s

    @property
    def _head_products(self) -> float:
        """ns per token of the products of the vocabulary projection, of which a frozen one has two."""
        return (4 if self._frozen else 6) * self.model.head_parameters / (self.matmul_tflops * 1e3)

    def attention(self, lengths: np.ndarray, ring: int, checkpoint: Checkpoint) -> np.ndarray:
        """float64[n] ns of all heads of each document on one of ``ring`` ranks, forward and backward.

        A rank of a zigzag ring computes 1/ring of the area. Of that, 1/ring is its own causal square of s/ring
        tokens; the rest are full tiles of s/(2 ring) keys, which run at the tile throughput of that length. Without a
        causal mask the area is twice as large, and all of it are tiles of s/ring keys.
        """
        forwards = 2 if checkpoint == Checkpoint.FULL else 1
        causal, tile = self.causal[forwards], self.tile[forwards]
        total = np.zeros(len(lengths))
        for mask, layers in self.masks:
            area, width = causal_area(lengths, *mask)
            if not self.model.causal:
                total = total + layers * (2.0 * area * (tile(width / ring) / (width / ring)))
                continue
            per_area = causal(width / ring) / width  # = (1/ring) * causal(L) / L at L = width/ring
            if ring > 1:
                half = width / (2 * ring)
                per_area = per_area + (1.0 - 1.0 / ring) * (tile(half) / half)
            total = total + layers * (area * per_area)
        return total * (4.0 * attention_widths(self.model)[0] * 1e-3 / ring)

    def expansion(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """ns per token of a group and layer of making keys and values from latents, on each of its ranks.

        A rank makes those of its heads for all tokens of the group, by products with a matrix that also copies the
        rotated key (`attention.latent`): in forward, again in backward, and two more for the gradients, one if it is
        frozen; and once more where attention is recomputed.
        """
        if not shape.latent:
            return 0.0
        products = (5 if checkpoint == Checkpoint.FULL else 4) - self._frozen
        return products * 2 * self._expansion_values(shape) / (self.matmul_tflops * 1e3)

    def unexpanded(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """ns per token of a group and layer of what `linear` counts for the same: the rank that has a token does it."""
        if not shape.latent:
            return 0.0
        products = (3 if checkpoint == Checkpoint.NONE else 4) - self._frozen
        return products * 2 * self.model.expansion_parameters / (shape.degree * self.matmul_tflops * 1e3)

    def expansion_matrix(self, shape: GroupShape) -> float:
        """ns per round and layer of writing the matrix of `expansion`, in forward and in backward."""
        return 2 * 2 * self._expansion_values(shape) / self.memory_gb_s if shape.latent else 0.0

    def _expansion_values(self, shape: GroupShape) -> float:
        """Values of the matrix that a latent is multiplied with, for the heads of the fullest Ulysses rank."""
        _, kv = attention_widths(self.model)
        return self.model.latent_values * 2 * kv * (-(-self.model.heads // shape.ulysses) / self.model.heads)

    def tensor_sums(self, tensor: int, sums: float) -> float:
        """ns per token of a rank of so many sums: each reads a row of every rank, writes one."""
        touched = sums * (tensor + 1) * self.model.hidden if tensor > 1 else 0
        return touched * 2 / self.memory_gb_s

    def optimiser(self, parameters: float) -> float:
        """ns of the Adam step on this many parameters of a rank."""
        return OPTIMISER_TRAFFIC * parameters / self.memory_gb_s


def forward_flops(lengths: np.ndarray, model: ModelSpec) -> np.ndarray:
    """float64[n] FLOPs of a forward of documents: products with the weights, and attention under its mask.

    The model's own arithmetic: a backward is twice as much (see `training_flops`), and what checkpointing or an
    attention kernel recomputes is not counted. A layer's mask counts; of several experts those that a token takes; the
    head for every token.
    """
    tokens = lengths.astype(np.float64)
    pairs = sum(layers * causal_area(tokens, *mask)[0] for mask, layers in layers_by_mask(model).items())
    seen = 1.0 if model.causal else 2.0
    values = model.value_dim / model.head_dim if model.latent else 1.0
    return 2.0 * model.matmul_parameters * tokens + 2.0 * (1.0 + values) * attention_widths(model)[0] * seen * pairs


def training_flops(lengths: np.ndarray, model: ModelSpec) -> float:
    """FLOPs of forward and backward of documents, by `forward_flops`; frozen weights have no gradients."""
    frozen = model.matmul_parameters - model.adapter_parameters if model.adapters else 0
    return 3 * float(forward_flops(lengths, model).sum()) - 2.0 * frozen * float(lengths.sum())


def causal_area(
    lengths: np.ndarray, window: int | None, attention_chunk: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(area, width) of each document: query-key pairs, and the length whose kernel throughput applies.

    Without a window the area is s^2/2. With a window w, shorter documents are the same and longer ones fill a band of
    s*w - w^2/2. A band's rows are w wide where a triangle's are s/2 on average, so it runs like a document of 2w.
    A document in attention chunks is so many documents.
    """
    if attention_chunk is not None:
        whole, rest = np.divmod(lengths, float(attention_chunk))
        area, width = causal_area(np.minimum(lengths, float(attention_chunk)), window)
        return whole * area + causal_area(rest, window)[0], width
    width = np.maximum(lengths, 1.0)  # an empty piece has no area; its width must still divide
    if window is None:
        return lengths * lengths * 0.5, width
    inside = np.minimum(lengths, float(window))
    return inside * (lengths - inside * 0.5), np.minimum(width, 2.0 * window)
