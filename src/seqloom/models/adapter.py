"""Along which axes the members of a team cut a model's weights, and how many members a model allows.

A team of t ranks runs the wide parts of a layer together: each member has 1/t of the heads and of the MLP's width.

    q, k, v, gate, up    [out, in]    rows are cut       member k has rows k/t .. (k+1)/t, and of the biases too
    o, down              [out, in]    columns are cut    what members return are parts of one sum

All else (norms, table of tokens, head) is whole on every member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn

from seqloom.attention import AttentionSpec, prepare_attention
from seqloom.dist import Context, attention_context
from seqloom.errors import SeqloomError
from seqloom.models.deferred_init import DeferredParameters
from seqloom.models.loss import CHUNK, HeadGradients, summed_loss
from seqloom.models.split_backward import WeightGradients
from seqloom.models.transformer import Transformer
from seqloom.plan import LayerRange

ROWS, COLUMNS = 0, 1
_AXES = {"q_proj": ROWS, "k_proj": ROWS, "v_proj": ROWS, "gate_proj": ROWS, "up_proj": ROWS} | {
    "o_proj": COLUMNS,
    "down_proj": COLUMNS,
}


def reference_tp_axes(model: Transformer) -> dict[str, int]:
    """Return the axis of every parameter of the reference model that a TP group shards, by name."""
    owners = {name: name.split(".")[-2] for name, _ in model.named_parameters()}
    return {name: _AXES[owner] for name, owner in owners.items() if owner in _AXES}


def reference_tp_divisors(model: Transformer) -> dict[str, int]:
    """Return what a tensor degree must divide in the reference model."""
    spec = model.spec
    return {"heads": spec.heads, "kv heads": spec.kv_heads, "MLP width": spec.ffn}


def check_degree(model: str, degree: int, tp_divisors: Mapping[str, int], no_tp_reason: str) -> None:
    """Refuse a tensor degree that a model does not allow.

    Args:
        model: what to call it.
        degree: ranks of a team; 1 is always fine.
        tp_divisors: what -> how many there are; the degree divides each.
        no_tp_reason: why there is no degree above 1; "" if there may be one.
    """
    if degree == 1:
        return
    if no_tp_reason:
        raise SeqloomError(f"tensor degree {degree}: {model} cannot be cut: {no_tp_reason}; plan with tensor = 1")
    wrong = [f"{what} {count}" for what, count in tp_divisors.items() if degree < 1 or count % degree]
    if wrong:
        common = math.gcd(*tp_divisors.values())
        legal = [each for each in range(1, common + 1) if common % each == 0]
        nearest = min(legal, key=lambda each: (abs(each - degree), each))
        raise SeqloomError(
            f"tensor degree {degree}: {model} has {', '.join(wrong)}, and every member of a team has an equal share; "
            f"nearest: tensor = {nearest} (possible: {', '.join(map(str, legal))})"
        )


# ---- merged: runtime.network
# What the runtime needs to know of a model: how to call it, whole or in parts, where its layers and its head are.


@dataclass(frozen=True, slots=True, eq=False)
class ModelAdapter:
    """A language model, whoever wrote it.

    A model that is cut into stages also says how its parts are called: `hidden` is norm(body(embed(ids))).

    Attributes:
        module: has all parameters, under the names that checkpoints use.
        layers: parts that are gathered, released and recomputed one by one; each is called with the context.
        hidden: hidden(ids int64[tokens], context) -> [tokens, hidden] after the final norm.
        head: has `weight` [vocabulary, hidden]; maybe the table of tokens.
        attention_specs: the attention calls of the layers, each distinct one once, for `prepare`.
        embed: embed(ids int64[tokens], context) -> [tokens, hidden].
        body: body(hidden [tokens, hidden], context, first, stop) -> the same shape, after layers first .. stop - 1.
        norm: the final norm, [tokens, hidden] -> the same shape.
        weight_gradients: returned by `defer_weight_gradients(layers)`; without it a backward is all in I.
        embedding: has the parameters that `embed` needs.
        single_stage_reason: why the model cannot be cut into stages, where that is known.
        tp_axes: canonical name of a parameter -> axis along which a TP group shards it (0 rows, 1 columns); names that
            are not in it are whole on every member. See `runtime.tp_axes`.
        tp_divisors: what a tensor degree must divide (such as "kv heads") -> how many there are.
        no_tp_reason: why no team can cut the model's weights; "" if one can.
        deferred: where those of parameters are that are on "meta"; None: the module has them.
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
    no_tp_reason: str = (
        "nobody has said along which axes, see ModelAdapter(.., tp_axes=, tp_divisors=, no_tp_reason='')"
    )
    deferred: DeferredParameters | None = None

    @classmethod
    def of(cls, model: Transformer) -> ModelAdapter:
        """Describe the reference model."""
        if not isinstance(model, Transformer):
            raise SeqloomError(
                f"{type(model).__name__} is not the reference transformer; for another model say what its layers, "
                "its hidden states and its head are: ModelAdapter(module, layers, hidden, head)"
            )
        decoder, spec = model.model, model.spec
        calls = tuple(
            AttentionSpec(spec.heads, spec.kv_heads, spec.head_dim, each) for each in dict.fromkeys(spec.windows)
        )
        return cls(
            model,
            tuple(decoder.layers),
            lambda ids, c: decoder(ids, c.positions, c),
            model.lm_head,
            calls,
            embed=lambda ids, c: decoder.embed(ids, c.positions),
            body=lambda x, c, first, stop: decoder.body(x, c.positions, c, first, stop),
            norm=decoder.norm,
            embedding=decoder.embed_tokens,
            tp_axes=reference_tp_axes(model),
            tp_divisors=reference_tp_divisors(model),
            no_tp_reason="",
        )

    @property
    def stages_error(self) -> str:
        """What to say where this model shall be cut into stages and cannot."""
        why = self.single_stage_reason or "it is not known how to run some of its layers"
        return (
            f"{type(self.module).__name__} cannot be cut into stages: {why}; plan with one stage "
            "(pipeline.stages = 1), or say how its parts are called: ModelAdapter(.., embed=, body=, norm=, embedding=)"
        )

    def materialize(self, named: Iterable[tuple[str, nn.Parameter]] | None = None) -> None:
        """Give parameters their values where they are on "meta" and `deferred` has them.

        Args:
            named: canonical name and parameter; None: all of the module.
        """
        if self.deferred is not None:
            for name, parameter in self.module.named_parameters() if named is None else named:
                if parameter.is_meta:
                    self.deferred.materialize(name, parameter)

    def check_tp_degree(self, degree: int) -> None:
        """Refuse a tensor degree that heads, kv heads or widths do not allow, with the nearest that they do."""
        check_degree(type(self.module).__name__, degree, self.tp_divisors, self.no_tp_reason)

    def prepare(self, context: Context, dtype: torch.dtype) -> None:
        """Do the index work of a round's attention now, so that no layer does; see `bind_plan`.

        Args:
            context: of the round; it keeps the result.
            dtype: that layers compute in.
        """
        members, inside = 1 if context.tp_group is None else len(context.tp_group.ranks), attention_context(context)
        for heads, kv_heads, dim, window, scale in self.attention_specs:
            prepare_attention(inside, heads // members, kv_heads // members, dim, dtype, window=window, scale=scale)

    def run(self, part: LayerRange, given: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] after a part; those of a part that ends are normalised.

        Args:
            part: of this model.
            given: int64[tokens] for a part that begins, else hidden states [tokens, hidden].
            context: of the round.
        """
        whole = part.begins and part.ends
        if whole and not self._carries_frozen(context):
            return self.hidden(given, context)
        if not whole and (part.of != len(self.layers) or not 0 <= part.first <= part.stop <= part.of):
            raise SeqloomError(
                f"layers {part.first} to {part.stop - 1} of {part.of} asked of a model with {len(self.layers)} layers; "
                "make the plan for this model"
            )
        if self.embed is None or self.body is None or self.norm is None:
            raise SeqloomError(self.stages_error)
        states = self.embed(given, context) if part.begins else given
        if part.begins and self._carries_frozen(context) and not states.requires_grad:
            states.requires_grad_()
        states = self.body(states, context, part.first, len(self.layers) if whole else part.stop)
        return self.norm(states) if part.ends else states

    def _carries_frozen(self, context: Context) -> bool:
        """Whether a document is in pieces and some parameters do not learn.

        Keys are kept until attention goes backward, which it would not below the first parameter that learns.
        """
        if not context.pieces or not torch.is_grad_enabled():
            return False
        return not all(parameter.requires_grad for parameter in self.module.parameters())


class LossOf(nn.Module):
    """A network from token ids to the sum of token losses, as one module: what it needs is gathered for one call."""

    def __init__(self, adapter: ModelAdapter, chunk: int = CHUNK, together: HeadGradients | None = None) -> None:
        """Wrap a network; `chunk` and `together` as in `summed_loss`."""
        super().__init__()
        self.inner = adapter.module
        self._adapter = (adapter,)  # in a tuple: torch sees parameters under `inner` alone
        self._options = {"chunk": chunk, "together": together}

    def forward(
        self, given: torch.Tensor, labels: torch.Tensor | None, context: Context, part: LayerRange | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of this rank's tokens, a scalar in float32 or float64; see `Parameters.run`.

        Args:
            given: token ids int64[tokens], rows as `context.spans` says, or what the part before gave.
            labels: int64[tokens], see `summed_loss`; None for a part that does not end.
            context: of the round.
            part: of the model; None: all of it. One that does not end returns its hidden states [tokens, hidden].
        """
        adapter = self._adapter[0]
        part = part or LayerRange(0, len(adapter.layers), len(adapter.layers))
        states = adapter.run(part, given, context)
        if not part.ends:
            return states
        assert labels is not None  # rows of a part that ends are read with their labels
        return summed_loss(states, cast("torch.Tensor", adapter.head.weight), labels, **self._options)
