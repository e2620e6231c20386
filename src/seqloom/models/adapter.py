"""The model as the engine sees it: how to call it, whole or in pipeline stages, and how tensor parallelism shards it.

A TP group of t ranks runs the wide parts of a layer together: each rank has 1/t of the heads and of the MLP's width.

    q, k, v, gate, up    [out, in]    rows are sharded       rank k has rows k/t .. (k+1)/t, and of the biases too
    o, down              [out, in]    columns are sharded    the ranks' outputs are partial sums
    experts              [experts, out, in]                  rank k has experts k/t .. (k+1)/t; partial sums

All else (norms, routers, token embedding, head) is replicated on every rank of the group.

Deferred initialisation: a model may be built with its parameters on "meta" and a reader of their values. They are read
one parameter at a time, when parameters are cut into shards, so no rank ever has the whole model:

    a file, or a generator   --read-->   one parameter, or rows of it, on the device   --shard-->   this rank's rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import swap_tensors

from seqloom.attention import AttentionSpec, prepare_attention
from seqloom.dist import Context, all_gather_rows, attention_context, reduce_scatter_rows
from seqloom.dist.tensor_parallel import TPGroup
from seqloom.errors import SeqloomError
from seqloom.models.experts import ExpertLoad
from seqloom.models.loss import CHUNK, PRODUCTS, HeadGradients, Logits, summed_loss
from seqloom.models.router_loss import RouterLoss
from seqloom.models.split_backward import WeightGradients
from seqloom.models.transformer import Experts, Transformer, check_weight_shard
from seqloom.plan import LayerRange
from seqloom.plan.parameter_layout import COLUMNS, ROWS

TP_AXES = {name: ROWS for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "experts")} | {
    name: COLUMNS for name in ("o_proj", "down_proj")
}
"""Axis along which a TP group shards the linear layers of the reference transformer, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelAdapter:
    """A language model, whoever wrote it.

    A model that is cut into pipeline stages also says how its parts are called: `hidden` is norm(body(embed(ids))).

    Attributes:
        module: has all parameters, under the names that checkpoints use.
        layers: modules that are unsharded, resharded and recomputed one by one; each is called with the context.
        hidden: hidden(ids int64[tokens], context) -> [tokens, hidden] after the final norm.
        head: has `weight` [vocabulary, hidden], maybe that of the token embedding, and maybe a `bias` [vocabulary].
        logits: what they are of the products of hidden states and head.
        attention_specs: of the layers, each distinct one once, for `prepare`.
        embed: embed(ids int64[tokens], context) -> [tokens, hidden].
        body: body(hidden [tokens, hidden], context, first, stop) -> the same shape, after layers first .. stop - 1.
        norm: the final norm, [tokens, hidden] -> the same shape.
        weight_gradients: from `defer_weight_gradients(layers)`; without it all of a backward happens in I.
        embedding: has the parameters that `embed` needs.
        single_stage_reason: why the model cannot be cut into stages, where that is known.
        tp_axes: canonical name of a parameter -> axis along which a TP group shards it (0 rows, 1 columns); others are
            replicated.
        tp_divisors: what a tensor degree must divide (such as "kv heads") -> how many there are.
        tables: embedding and head, with a row for every token of the vocabulary, if a TP group may cut them by rows:
            the embedding is called with token ids, the head only has the parameters of the loss. (): both stay whole.
        no_tp_reason: why no TP group can shard the model's weights; "" if one can.
        deferred: values of parameters that are on "meta"; None: the module has them.
        experts: modules of experts, which read `expert_range` (`models.experts`), and how many each has; their
            parameters with so many rows belong to experts.
        expert_load: counts their tokens; None: the model has no experts, or they are not counted.
        expert_biases: for every module of experts, the name of the buffer [experts] in `module` that its router adds to
            scores to choose experts; "": there is none.
        router_loss: of layers with experts, which report to it; None: there is none.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    hidden: Callable[[torch.Tensor, Context], torch.Tensor]
    head: nn.Module
    attention_specs: tuple[AttentionSpec, ...] = ()
    embed: Callable[[torch.Tensor, Context], torch.Tensor] | None = None
    body: Callable[[torch.Tensor, Context, int, int], torch.Tensor] | None = None
    norm: nn.Module | None = None
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    embedding: nn.Module | None = None
    single_stage_reason: str = ""
    tp_axes: Mapping[str, int] = field(default_factory=dict)
    tp_divisors: Mapping[str, int] = field(default_factory=dict)
    tables: tuple[nn.Embedding, nn.Linear] | tuple[()] = ()
    no_tp_reason: str = (
        "nobody has said along which axes, see ModelAdapter(.., tp_axes=, tp_divisors=, no_tp_reason='')"
    )
    deferred: DeferredParameters | None = None
    logits: Logits = PRODUCTS
    router_loss: RouterLoss | None = None
    experts: tuple[tuple[nn.Module, int], ...] = ()
    expert_load: ExpertLoad | None = None
    expert_biases: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Transformer) -> ModelAdapter:
        """Describe the reference transformer."""
        if not isinstance(model, Transformer):
            raise SeqloomError(
                f"{type(model).__name__} is not the reference transformer; for another model say what its layers, "
                "its hidden states and its head are: ModelAdapter(module, layers, hidden, head)"
            )
        decoder, spec = model.model, model.spec
        modules = {name: name.split(".")[-2] for name, _ in model.named_parameters()}
        masks = dict.fromkeys(spec.masks)
        dense = len(spec.moe_layers) < spec.layers
        divisors = {"heads": spec.heads, "kv heads": spec.kv_heads, "MLP width": spec.ffn if dense else 0}
        divisors |= {"experts": spec.experts, "width of the shared expert": spec.shared_ffn}
        return cls(
            model,
            tuple(decoder.layers),
            lambda ids, c: decoder(ids, c.positions, c),
            model.lm_head,
            tuple(
                AttentionSpec(
                    spec.heads, spec.kv_heads, spec.head_dim, window, attention_chunk=chunk, causal=spec.causal
                )
                for window, chunk in masks
            ),
            embed=lambda ids, c: decoder.embed(ids, c.positions),
            body=lambda x, c, first, stop: decoder.body(x, c.positions, c, first, stop),
            norm=decoder.norm,
            embedding=decoder.embed_tokens,
            tp_axes={name: TP_AXES[module] for name, module in modules.items() if module in TP_AXES},
            tp_divisors={name: count for name, count in divisors.items() if count},
            tables=(decoder.embed_tokens, model.lm_head),
            no_tp_reason="",
            experts=tuple((each, each.count) for each in model.modules() if isinstance(each, Experts)),
            expert_load=model.expert_load,
        )

    @property
    def stages_error(self) -> str:
        """Message for a plan with several stages where the model cannot be cut into them."""
        why = self.single_stage_reason or "it is not known how to run some of its layers"
        return (
            f"{type(self.module).__name__} cannot be cut into stages: {why}; plan with one stage "
            "(pipeline.stages = 1), or say how its parts are called: ModelAdapter(.., embed=, body=, norm=, embedding=)"
        )

    def check_tp_degree(self, degree: int) -> None:
        """Refuse a tensor degree that heads, kv heads or widths do not allow, with the nearest that they do."""
        if degree == 1:
            return
        name = type(self.module).__name__
        if self.no_tp_reason:
            raise SeqloomError(
                f"tensor degree {degree}: {name} cannot be sharded: {self.no_tp_reason}; plan with tensor = 1"
            )
        wrong = [f"{what} {count}" for what, count in self.tp_divisors.items() if degree < 1 or count % degree]
        if wrong:
            common = math.gcd(*self.tp_divisors.values())
            legal = [each for each in range(1, common + 1) if common % each == 0]
            nearest = min(legal, key=lambda each: (abs(each - degree), each))
            raise SeqloomError(
                f"tensor degree {degree}: {name} has {', '.join(wrong)}, and every rank of a TP group has an equal "
                f"share; nearest: tensor = {nearest} (possible: {', '.join(map(str, legal))})"
            )

    def cut_tables(self, degree: int) -> tuple[str, ...]:
        """Return the names of parameters that TP groups of a degree cut by rows of the vocabulary: all tables, or none.

        Under free sharding they stay whole, and where the degree does not divide the vocabulary.
        """
        if not self.tables or any(
            rows % degree for rows in (self.tables[0].num_embeddings, self.tables[1].out_features)
        ):
            return ()
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return tuple(dict.fromkeys(names[id(each)] for table in self.tables for each in table.parameters()))

    def head_tp_group(self, context: Context) -> TPGroup | None:
        """Return the TP group that has cut the head; None: this rank has all of it."""
        cut = self.tables and len(self.tables[1].weight) != self.tables[1].out_features
        return context.tp_group if cut else None

    def materialize(self, named: Iterable[tuple[str, nn.Parameter]] | None = None) -> None:
        """Give parameters on "meta" the values that `deferred` has, by canonical name; None: all of the module."""
        if self.deferred is not None:
            for name, parameter in self.module.named_parameters() if named is None else named:
                if parameter.is_meta:
                    self.deferred.materialize(name, parameter)

    def read_rows(self, name: str, parameter: nn.Parameter, rows: slice) -> torch.Tensor:
        """Return rows of a parameter's value in new memory, on its device: those that `deferred` has, if on "meta"."""
        if self.deferred is not None and parameter.is_meta:
            return self.deferred.rows(name, parameter, rows)
        return parameter.detach()[rows].clone()

    @property
    def expert_parameters(self) -> dict[str, int]:
        """Names of the parameters of experts, one row for each expert, and how many there are."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        found = ((each, count) for module, count in self.experts for each in module.parameters())
        return {names[id(each)]: count for each, count in found if each.ndim > 1 and len(each) == count}

    def bias_buffers(self) -> dict[str, torch.Tensor]:
        """Return the correction biases of routers, by name."""
        return {name: self.module.get_buffer(name) for name in self.expert_biases if name}

    def check_expert_degree(self, degree: int) -> None:
        """Refuse an expert degree that does not divide the experts of every layer."""
        name, counts = type(self.module).__name__, sorted({count for _, count in self.experts})
        if degree > 1 and not counts:
            raise SeqloomError(f"expert degree {degree}: {name} has no experts; plan with expert = 1")
        wrong = [count for count in counts if degree < 1 or count % degree]
        if wrong:
            legal = [each for each in range(1, counts[0] + 1) if not any(count % each for count in counts)]
            nearest = min(legal, key=lambda each: (abs(each - degree), each))
            raise SeqloomError(
                f"expert degree {degree}: {name} has {wrong[0]} experts, and every rank of an EP group has equally "
                f"many; nearest: expert = {nearest} (possible: {', '.join(map(str, legal))})"
            )

    def prepare(self, context: Context, dtype: torch.dtype) -> None:
        """Do the index work of a round's attention now, so that no layer does; see `bind_plan`.

        The context keeps the result; layers compute in `dtype`.
        """
        degree, inner = 1 if context.tp_group is None else len(context.tp_group.ranks), attention_context(context)
        for heads, kv_heads, dim, window, scale, softcap, chunk, causal, latent in self.attention_specs:
            mask = {"causal": causal, "window": window, "attention_chunk": chunk}
            sizes = (heads // degree, kv_heads // degree, dim, dtype)
            prepare_attention(inner, *sizes, **mask, scale=scale, softcap=softcap, latent=latent)

    def run(self, part: LayerRange, given: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] after a range of layers; with the last layer also the final norm.

        `given` is int64[tokens] for a part with the first layer, else hidden states [tokens, hidden].
        """
        if part.has_embedding and self.tables:
            with cut_embedding(self.tables[0], context):
                return self._run(part, given, context)
        return self._run(part, given, context)

    def _run(self, part: LayerRange, given: torch.Tensor, context: Context) -> torch.Tensor:
        whole, input_gradient = part.has_embedding and part.has_head, self._needs_input_gradient(context)
        if whole and not input_gradient:
            return self.hidden(given, context)
        if not whole and (
            part.model_layers != len(self.layers) or not 0 <= part.first <= part.stop <= part.model_layers
        ):
            raise SeqloomError(
                f"layers {part.first} to {part.stop - 1} of {part.model_layers} asked of a model with "
                f"{len(self.layers)} layers; make the plan for this model"
            )
        if self.embed is None or self.body is None or self.norm is None:
            raise SeqloomError(self.stages_error)
        states = self.embed(given, context) if part.has_embedding else given
        if part.has_embedding and input_gradient and not states.requires_grad:
            states.requires_grad_()
        if part.first < part.stop:
            states = self.body(states, context, part.first, len(self.layers) if whole else part.stop)
        return self.norm(states) if part.has_head else states

    def _needs_input_gradient(self, context: Context) -> bool:
        """Return whether a document is in pieces and some parameters are frozen.

        Keys are cached until attention goes backward, which it would not below the first parameter that learns.
        """
        if not context.pieces or not torch.is_grad_enabled():
            return False
        return not all(parameter.requires_grad for parameter in self.module.parameters())


class ModelWithLoss(nn.Module):
    """A model from token ids to the sum of token losses, as one module: FSDP unshards what it needs for one call."""

    def __init__(self, adapter: ModelAdapter, chunk: int = CHUNK, head_gradients: HeadGradients | None = None) -> None:
        """Wrap a model; `chunk` and `head_gradients` as in `summed_loss`."""
        super().__init__()
        self.inner = adapter.module
        self._adapter = (adapter,)  # in a tuple: torch sees parameters under `inner` alone
        self._options = {"chunk": chunk, "head_gradients": head_gradients}

    def forward(
        self, given: torch.Tensor, labels: torch.Tensor | None, context: Context, part: LayerRange | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of this rank's tokens, a scalar in float32 or float64; see `Parameters.run`.

        Args:
            given: token ids int64[tokens], rows as in `context.spans`, or the output of the stage before.
            labels: int64[tokens], see `summed_loss`; None for a part without the last layer.
            context: of the round.
            part: layers of the model; None: all. Without the last one, the hidden states [tokens, hidden] are returned.
        """
        adapter = self._adapter[0]
        part = part or LayerRange(0, len(adapter.layers), len(adapter.layers))
        states = adapter.run(part, given, context)
        if not part.has_head:
            return states
        assert labels is not None  # rows of a part that ends are read with their labels
        weight = cast("torch.Tensor", adapter.head.weight)
        bias = cast("torch.Tensor | None", getattr(adapter.head, "bias", None))
        tp_group = adapter.head_tp_group(context)  # whose ranks wait for each other in the loss
        times = context.times if tp_group is None else None
        with nullcontext() if times is None else times.loss(context.tokens):
            options = {**self._options, "logits": adapter.logits, "tp_group": tp_group}
            return summed_loss(states, weight, labels, bias=bias, **options)


@contextmanager
def cut_embedding(embedding: nn.Embedding, context: Context) -> Iterator[None]:
    """Make an embedding of which this rank has a part look the tokens of its TP group up, in calls of one context.

        token ids of a rank -> all-gather -> rows of its part, zero for other ids -> sum, own tokens

    Of the summands of a token one is not zero, so the sum is exact. The embedding is called with this rank's ids, of
    any shape; an id more than the context has tokens is for a model that cannot be called with none. A whole embedding
    is left as it is. `models.loss` does the same for the head.
    """
    rows, group = len(embedding.weight), context.tp_group
    if rows != embedding.num_embeddings:
        check_weight_shard(embedding.weight, embedding.num_embeddings, context)
    if group is None or rows == embedding.num_embeddings:
        yield
        return
    first, padding, calls = group.index * rows, embedding.padding_idx, list[tuple[torch.Size, torch.Tensor]]()

    def ask(_: nn.Module, args: tuple[Any, ...]) -> tuple[torch.Tensor]:
        ids = all_gather_rows(args[0].flatten()[: context.tokens], context) - first
        elsewhere = (ids < 0) | (ids >= rows)
        calls.append((args[0].shape, elsewhere))
        return (ids.masked_fill(elsewhere, 0),)

    def answer(_: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        shape, elsewhere = calls.pop()
        own = reduce_scatter_rows(output.masked_fill(elsewhere[:, None], 0), context)
        more = own.new_zeros((shape.numel() - context.tokens, own.shape[1]))
        return (torch.cat((own, more)) if len(more) else own).view(*shape, own.shape[1])

    hooks = embedding.register_forward_pre_hook(ask), embedding.register_forward_hook(answer)
    embedding.padding_idx = None if padding is None or not first <= padding < first + rows else padding - first
    try:
        yield
    finally:
        embedding.padding_idx = padding
        for hook in hooks:
            hook.remove()


@dataclass(slots=True, eq=False)
class DeferredParameters:
    """Values of a model's parameters that are on "meta", read one by one.

    Attributes:
        read: (canonical name, rows) -> these rows of the parameter, on any device and in any dtype; called at most once
            for each.
        device: where parameters shall be.
    """

    read: Callable[[str, slice], torch.Tensor] | None
    device: torch.device

    def rows(self, name: str, parameter: nn.Parameter, rows: slice) -> torch.Tensor:
        """Return rows of a parameter on "meta", in its dtype, where it shall be."""
        assert self.read is not None, "deferred parameters were closed"
        values = self.read(name, rows)
        return torch.empty_like(values, device=self.device, dtype=parameter.dtype).copy_(values)

    def materialize(self, name: str, parameter: nn.Parameter) -> None:
        """Give a parameter on "meta" its values, in its dtype. It stays the same object: tied ones stay tied."""
        values = self.rows(name, parameter, slice(None))
        swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))

    def close(self) -> None:
        """Close files, and drop values that nobody has read."""
        self.read = None


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Build modules with their parameters on "meta" and their buffers where they say."""

    def register(module: nn.Module, name: str, given: nn.Parameter | None) -> nn.Parameter | None:
        return None if given is None else to_meta(given)

    hook = register_module_parameter_registration_hook(cast("Callable[..., None]", register))  # what it returns counts
    try:
        yield
    finally:
        hook.remove()


def to_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter's shape on "meta", without its values."""
    if parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.device("meta")), parameter.requires_grad)
