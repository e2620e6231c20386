"""Model specs: the shapes of a decoder-only transformer that time, memory and legal plans depend on."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from seqloom.describe.presets import Presets
from seqloom.errors import SeqloomError
from seqloom.reader import build, is_file_name, read_mapping

MAX_LAYERS, MAX_SIZE = 1 << 13, 1 << 31
"""Layers, and widths and counts, of the largest model that can be described."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters on linear layers (LoRA), all those of one layer: y = W x + B A dropout(x)."""

    rank: int = 0
    """Width between A and B."""
    linears: int = 0
    """Number of linear layers that have an adapter; 0: none has."""
    inputs: int = 0
    """Their widths before, added up."""
    outputs: int = 0
    """Their widths behind, added up."""
    dropout: bool = False
    """Some of an adapter's inputs are dropped, so it keeps inputs of its own for backward."""

    @property
    def parameters(self) -> int:
        """Values of all A and B."""
        return self.rank * (self.inputs + self.outputs)

    @property
    def saved(self) -> int:
        """Values of a token that backward reads beyond those that it reads without adapters."""
        return self.linears * self.rank + self.dropout * self.inputs

    @property
    def touched(self) -> int:
        """Values of a token that elementwise work reads or writes in a pass, on average over forward and backward.

        Forward scales outputs (2) and adds them (3), backward scales their gradients (2) and adds those of inputs (3);
        a backward counts twice. Dropout reads and writes inputs.
        """
        return 3 * self.outputs + (1 + 2 * self.dropout) * self.inputs


class LayerKind(NamedTuple):
    """What one layer may have in another way than others; layers of one kind take as long and as much memory."""

    mask: tuple[int | None, int | None]  # window and attention chunk
    heads: tuple[int, int]
    experts: bool
    mixer: bool
    adapters: Adapters | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. Widths are in elements, windows and chunks of attention in tokens.

    A layer is attention (``heads`` query heads, ``kv_heads`` key/value heads of ``head_dim``) and a
    feed-forward: a dense one of width ``ffn`` or, in ``moe_layers``, a router over ``experts`` of width
    ``expert_ffn``, of which a token takes ``active_experts``, beside one of width ``shared_ffn`` for all. In
    ``mixer_layers`` a mixer scans the tokens (linear attention, state space, short convolution), beside attention or in
    its place.

    With ``adapters`` these alone are trained, and all else is frozen.

    With ``latent`` (latent attention, MLA: DeepSeek) a token has one latent, from which keys and values of all heads
    are made by a product, and one rotated key, which all heads share: ``rotated`` of the ``head_dim`` of a key.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    """Three matrices in a feed-forward (gate, up, down) instead of two."""
    vocabulary: int
    tied: bool
    """Input embedding and output projection are one matrix."""
    windows: tuple[int | None, ...] = ()
    """For each layer, how many tokens a query sees, itself included; None: all before it; 0: the layer does not attend.
    () is all None."""
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    moe_layers: tuple[int, ...] = ()
    """Indices of the layers with experts, ascending. () is all layers when there are experts."""
    learned_positions: bool = False
    """A position table that grows with the context, and biases everywhere: GPT-2 style."""
    attention_chunks: tuple[int | None, ...] = ()
    """For each layer, the tokens of a chunk inside of which tokens see each other; None: no chunks. () is all None."""
    causal: bool = True
    """A token sees the tokens before it; False: its whole document (bidirectional), which is then never in pieces."""
    mixer_layers: tuple[int, ...] = ()
    """Indices of the layers with a mixer, ascending."""
    mixer_parameters: int = 0
    """Weights of a mixer."""
    mixer_values: int = 0
    """Values of a token that go into the convolution and the scan of a mixer and come out."""
    mixer_exchange: int = 0
    """Those of the scan, which a group's ranks exchange for heads; 0: there is a convolution alone."""
    head_shapes: tuple[tuple[int, int], ...] = ()
    """For each layer, how many key/value heads it has and how wide its heads are, where layers differ. () is
    ``kv_heads`` of ``head_dim`` in all of them, by which exchanges of keys and values are priced in any case."""
    counts_routing: bool = False
    """A step runs forward once more before, to count where routers send its tokens: the model has a router loss."""
    other_tables: int = 0
    """Parameters of tables that tokens are looked up in beside the embedding, such as inputs of single layers."""
    mixer_heads: int = 0
    """Heads of the scan; 0: any number of ranks share it evenly."""
    mixer_flops: int = 0
    """Operations of the convolution and the scan on a token, forward."""
    mixer_halo: int = 0
    """Values of the tokens before a run of tokens that its convolution reads."""
    mixer_state: int = 0
    """Values that say what a run of tokens makes of the state before it; 0: states do not go from rank to rank."""
    mixer_run_flops: int = 0
    """Operations of the convolution and the scan on a token, forward, where these values are found too."""
    mixer_join_flops: int = 0
    """Operations of taking the state before a run to the one after it."""
    latent: int = 0
    """Width of the latent of keys and values; 0: they are made from the hidden state."""
    rotated: int = 0
    """Width of the rotated key that stands beside a latent."""
    value_dim: int = 0
    """Width of a value head made from a latent, at most ``head_dim``."""
    query_latent: int = 0
    """Width of the latent of queries; 0: they are made from the hidden state."""
    adapters: tuple[Adapters, ...] = ()
    """For each layer, its adapters, which alone are trained. () is none: all parameters are trained."""

    def __post_init__(self) -> None:
        self._require(self.layers <= MAX_LAYERS, "layers", f"must be at most {MAX_LAYERS}")
        for name in ("hidden", "heads", "head_dim", "ffn", "vocabulary", "experts", "expert_ffn", "shared_ffn"):
            self._require(getattr(self, name) <= MAX_SIZE, name, f"must be at most {MAX_SIZE}")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * max(self.layers, 0))
        if self.experts and not self.moe_layers:
            object.__setattr__(self, "moe_layers", tuple(range(self.layers)))
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocabulary"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        dense = len(self.moe_layers) < self.layers and not self.mixer_layers  # hybrids have layers without feed-forward
        self._require(self.ffn >= (1 if dense else 0), "ffn", "must be at least 1 where a layer is dense")
        self._require(self.heads % self.kv_heads == 0, "kv_heads", f"must divide the {self.heads} query heads")
        self._require(len(self.windows) == self.layers, "windows", f"needs one entry for each of {self.layers} layers")
        self._require(all(w is None or w >= 0 for w in self.windows), "windows", "holds None or 0 tokens or more")
        windowless = self.causal or set(self.windows) <= {None, 0}
        self._require(windowless, "windows", "holds None alone where causal = False: a window counts back")
        chunks = self.attention_chunks
        legal = not chunks or (len(chunks) == self.layers and all(chunk is None or chunk >= 1 for chunk in chunks))
        rule = f"is empty, or holds None or at least 1 token for all {self.layers} layers"
        self._require(legal, "attention_chunks", rule)
        self._check_heads()
        self._check_experts()
        self._check_mixers()
        self._check_latents()
        self._check_adapters()

    def _check_heads(self) -> None:
        complete = len(self.head_shapes) in (0, self.layers)
        self._require(complete, "head_shapes", f"is empty, or needs one entry for each of {self.layers} layers")
        legal = all(kv_heads >= 1 and dim >= 1 and self.heads % kv_heads == 0 for kv_heads, dim in self.head_shapes)
        rule = f"holds kv heads that divide the {self.heads} query heads, and widths of at least 1"
        self._require(legal, "head_shapes", rule)
        self._require(self.other_tables >= 0, "other_tables", "must be 0 or more")

    def _check_experts(self) -> None:
        if not self.experts:
            for name in ("active_experts", "expert_ffn", "shared_ffn", "moe_layers"):
                self._require(not getattr(self, name), name, "needs experts: set `experts`, or leave it out")
            return
        self._require(1 <= self.active_experts <= self.experts, "active_experts", f"must be 1 to {self.experts}")
        self._require(self.expert_ffn >= 1, "expert_ffn", "must be at least 1")
        self._require(self.shared_ffn >= 0, "shared_ffn", "must be 0 or more")
        legal = sorted(set(self.moe_layers)) == list(self.moe_layers) and self.moe_layers[0] >= 0
        self._require(legal and self.moe_layers[-1] < self.layers, "moe_layers", f"rises within 0 to {self.layers - 1}")

    def _check_mixers(self) -> None:
        legal = sorted(set(self.mixer_layers)) == list(self.mixer_layers)
        inside = all(0 <= layer < self.layers for layer in self.mixer_layers)
        self._require(legal and inside, "mixer_layers", f"rises within 0 to {self.layers - 1}")
        for name in ("mixer_parameters", "mixer_values"):
            rule = "must be at least 1 with `mixer_layers`, and is 0 without"
            self._require((getattr(self, name) >= 1) == bool(self.mixer_layers), name, rule)
        within = 0 <= self.mixer_exchange <= self.mixer_values
        self._require(within, "mixer_exchange", f"must be 0 to {self.mixer_values}, as `mixer_values` says")
        for name in ("mixer_heads", "mixer_flops", "mixer_halo", "mixer_state", "mixer_run_flops", "mixer_join_flops"):
            known = getattr(self, name) >= 0 and (bool(self.mixer_layers) or not getattr(self, name))
            self._require(known, name, "must be 0 or more, and is 0 without `mixer_layers`")
        self._require(self.attention_layers >= 1, "windows", "needs a layer with attention")
        self._require(0 not in self.windows or bool(self.mixer_layers), "windows", "holds 0 only beside mixers")

    def _check_latents(self) -> None:
        if not self.latent:
            for name in ("rotated", "value_dim", "query_latent"):
                self._require(not getattr(self, name), name, "needs latent attention: set `latent`, or leave it out")
            return
        self._require(self.latent >= 1, "latent", "must be at least 1, or 0 without latent attention")
        self._require(self.kv_heads == self.heads, "kv_heads", f"must be {self.heads} with `latent`: as many as heads")
        self._require(0 <= self.rotated < self.head_dim, "rotated", f"must be 0 to {self.head_dim - 1}, part of a key")
        self._require(1 <= self.value_dim <= self.head_dim, "value_dim", f"must be 1 to {self.head_dim} with `latent`")
        self._require(self.query_latent >= 0, "query_latent", "must be 0 or more")

    def _check_adapters(self) -> None:
        if not self.adapters:
            return
        complete, sizes = len(self.adapters) == self.layers, ("rank", "linears", "inputs", "outputs")
        self._require(complete, "adapters", f"is empty, or needs one entry for each of {self.layers} layers")
        legal = all(0 <= getattr(each, size) <= MAX_SIZE for each in self.adapters for size in sizes)
        self._require(legal, "adapters", f"holds ranks, counts and widths of 0 to {MAX_SIZE}")
        self._require(self.adapter_parameters >= 1, "adapters", "needs a layer with some, or nothing is trained")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise SeqloomError(f"model {self.name}: {name} = {getattr(self, name)!r}; it {rule}")

    @classmethod
    def load(cls, name: str) -> ModelSpec:
        """Return a model by preset name or from a file.

        A file is a Hugging Face ``config.json`` (or the folder that holds one), or a .json or .toml with the
        fields of this class. Nothing is fetched from a network.
        """
        path = Path(name)
        if path.is_dir() and name not in MODELS:
            path = path / "config.json"
        if not is_file_name(str(path)):
            return MODELS.lookup(name, alternative="give the path of a Hugging Face config.json")
        content = read_mapping(path)
        if "layers" in content and "model_type" not in content:
            return build(cls, {"name": path.stem} | content, str(path))
        from seqloom.describe.huggingface import model_from_config

        default = path.absolute().parent.name if path.name == "config.json" else path.stem
        try:
            return model_from_config(content, name=default)
        except SeqloomError as error:
            raise SeqloomError(f"{path}: {error}") from None

    @property
    def masks(self) -> tuple[tuple[int | None, int | None], ...]:
        """Window and attention chunk of every layer."""
        return tuple(zip(self.windows, self.attention_chunks or (None,) * self.layers, strict=True))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer."""
        sparse, mixers, adapters = set(self.moe_layers), set(self.mixer_layers), self.adapters or (None,) * self.layers
        return tuple(
            LayerKind(mask, self.head_shape(layer), layer in sparse, layer in mixers, adapters[layer])
            for layer, mask in enumerate(self.masks)
        )

    def with_layers(self, layers: Sequence[int]) -> ModelSpec:
        """These of the layers, to be priced by themselves; what a whole model must have is not asked of them."""
        places = {layer: place for place, layer in enumerate(sorted(layers))}
        sparse = tuple(places[layer] for layer in self.moe_layers if layer in places)
        changed: dict[str, Any] = {"layers": len(places), "moe_layers": sparse}
        if not sparse:  # no `moe_layers` beside experts would be all layers
            changed |= dict.fromkeys(("experts", "active_experts", "expert_ffn", "shared_ffn"), 0)
        changed["mixer_layers"] = tuple(places[layer] for layer in self.mixer_layers if layer in places)
        for name in ("windows", "attention_chunks", "head_shapes", "adapters"):
            changed[name] = tuple(each for layer, each in enumerate(getattr(self, name)) if layer in places)
        part = copy.copy(self)
        for name, value in changed.items():
            object.__setattr__(part, name, value)
        return part

    def head_shape(self, layer: int) -> tuple[int, int]:
        """Key/value heads of a layer, and the width of its heads."""
        return self.head_shapes[layer] if self.head_shapes else (self.kv_heads, self.head_dim)

    def attention_parameters(self, layer: int) -> int:
        """Weights of a layer's attention projections; 0: it does not attend."""
        if self.windows[layer] == 0:
            return 0
        if not self.latent:
            kv_heads, dim = self.head_shape(layer)
            return 2 * self.hidden * dim * (self.heads + kv_heads)
        query, made_from = self.heads * self.head_dim, self.query_latent or self.hidden
        down = self.hidden * (self.query_latent + self.latent + self.rotated)
        return down + made_from * query + self.expansion_parameters + self.heads * self.value_dim * self.hidden

    @property
    def expansion_parameters(self) -> int:
        """Weights by which a latent is multiplied to keys and values of all heads; 0 without latents."""
        return self.latent * self.heads * (self.head_dim - self.rotated + self.value_dim)

    @property
    def latent_values(self) -> int:
        """Values of a token that are enough to make its keys and values of all heads: latent and rotated key."""
        return self.latent + self.rotated

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return len(self.windows) - self.windows.count(0)

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Legal tensor-parallel degrees, ascending: they divide heads, widths of feed-forwards, and experts.

        Tensor ranks have whole experts each. Mixers, latents and adapters are not cut: a model that has some knows
        degree 1 only.
        """
        if self._uncut:
            return (1,)
        kv_heads = (self.head_shape(layer)[0] for layer in range(self.layers))
        shared = math.gcd(*kv_heads, *self._feed_forward_widths.values())
        return tuple(t for t in range(1, shared + 1) if shared % t == 0)

    def check_tensor(self, degree: int) -> None:
        """Refuse a tensor degree that heads, widths or experts do not allow."""
        legal = self.tensor_degrees
        if degree in legal:
            return
        nearest = min(legal, key=lambda t: (abs(t - degree), t))
        widths = (f"{what} {width}" for what, width in self._feed_forward_widths.items())
        rule = f"it must divide {self.heads} heads, {self.kv_heads} kv heads and {' and '.join(widths)}"
        why = f"{self._uncut} are not cut" if self._uncut else rule
        raise SeqloomError(f"model {self.name}: tensor degree {degree}; {why}; use {nearest}")

    @property
    def _uncut(self) -> str:
        """What a layer has that tensor ranks do not share."""
        kinds = {"mixers": self.mixer_layers, "latents": self.latent, "adapters": self.adapters}
        return next((name for name, present in kinds.items() if present), "")

    @property
    def _feed_forward_widths(self) -> dict[str, int]:
        """What tensor ranks divide of feed-forwards."""
        dense = self.ffn if len(self.moe_layers) < self.layers else 0
        found = {"a feed-forward of": dense, "experts": self.experts, "a shared expert of": self.shared_ffn}
        return {what: width for what, width in found.items() if width}

    def layer_parameters(self, layer: int, tensor: int = 1, expert: int = 1) -> int:
        """Parameters of layer ``layer``, experts and adapters included; of each rank where ``tensor`` ranks share it.

        Matrices are cut, routers, norms and biases are whole on every rank. Where ``expert`` ranks divide the experts,
        a rank has its own.
        """
        mixing, sparse = self.attention_parameters(layer), layer in self.moe_layers
        mixing += self.mixer_parameters if layer in self.mixer_layers else 0
        router = self.hidden * self.experts if sparse else 0
        whole = router + self._vectors + (self.adapters[layer].parameters if self.adapters else 0)
        return (mixing + self._feed_forward(sparse, self.experts // expert) - router) // tensor + whole

    def trained_parameters(self, layer: int, tensor: int = 1, expert: int = 1) -> int:
        """Those of `layer_parameters` that are trained: all of them, or the adapters."""
        return self.adapters[layer].parameters if self.adapters else self.layer_parameters(layer, tensor, expert)

    @property
    def adapter_parameters(self) -> int:
        """Parameters of the adapters of all layers."""
        return sum(each.parameters for each in self.adapters)

    def expert_parameters(self, experts: int) -> int:
        """Weights of so many experts of a layer."""
        return (3 if self.gated else 2) * self.hidden * experts * self.expert_ffn

    @property
    def mixing_parameters(self) -> int:
        """Weights of attention and mixers, all layers."""
        attention = sum(self.attention_parameters(layer) for layer in range(self.layers))
        return attention + len(self.mixer_layers) * self.mixer_parameters

    def _feed_forward(self, sparse: bool, experts: int) -> int:
        matrices = 3 if self.gated else 2
        if not sparse:
            return matrices * self.hidden * self.ffn
        shared, router = matrices * self.hidden * self.shared_ffn, self.hidden * self.experts
        return self.expert_parameters(experts) + shared + router

    def _all_layers(self, experts: int) -> int:
        sparse = len(self.moe_layers)
        dense = (self.layers - sparse) * self._feed_forward(False, experts)
        feed_forward = sparse * self._feed_forward(True, experts) + dense
        return self.mixing_parameters + feed_forward + self.layers * self._vectors + self.adapter_parameters

    @property
    def _vectors(self) -> int:
        """Norms of a layer, and biases in the GPT-2 style; elsewhere biases are below 0.1 % and left out."""
        if not self.learned_positions:
            return 2 * self.hidden
        qkv = self.head_dim * (self.heads + 2 * self.kv_heads)
        return 4 * self.hidden + qkv + self.hidden + self.ffn + self.hidden

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection, vocabulary x hidden."""
        return self.vocabulary * self.hidden

    def parameters(self, context: int = 0) -> int:
        """All parameters; a learned position table counts for ``context`` tokens."""
        return self._all_layers(self.experts) + self._outside(context)

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token does not take (position table not counted)."""
        return self._all_layers(self.active_experts) + self._outside(0)

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: 2 FLOPs each forward, 4 backward, 2 where they are frozen.

        Layers with their active experts and adapters, and the output projection; no embedding look-up, norms or biases.
        """
        return self._all_layers(self.active_experts) - self.layers * self._vectors + self.head_parameters

    def _outside(self, context: int) -> int:
        """Embedding and other tables, head, final norm and position table."""
        matrices = 1 if self.tied else 2
        final_norm = (2 if self.learned_positions else 1) * self.hidden
        positions = context * self.hidden if self.learned_positions else 0
        return matrices * self.vocabulary * self.hidden + self.other_tables + final_norm + positions


def _built(name: str, entry: dict[str, Any]) -> ModelSpec:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    return ModelSpec(name=name, **fields)


MODELS: Presets[ModelSpec] = Presets("model", "models.json", _built)
"""Every preset model, by name."""
