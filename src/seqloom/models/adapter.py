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

from seqloom.attention import ModelCall, prepare_attention
from seqloom.dist import Context, attention_context
from seqloom.errors import SeqloomError
from seqloom.models.deferred_init import Values
from seqloom.models.loss import CHUNK, HeadGradients, summed_loss
from seqloom.models.split_backward import WeightGradients
from seqloom.models.transformer import Transformer
from seqloom.plan import LayerRange

ROWS, COLUMNS = 0, 1
_AXES = {"q_proj": ROWS, "k_proj": ROWS, "v_proj": ROWS, "gate_proj": ROWS, "up_proj": ROWS} | {
    "o_proj": COLUMNS,
    "down_proj": COLUMNS,
}


def reference_cuts(model: Transformer) -> dict[str, int]:
    """Return the axis of every parameter of the reference model that a team cuts, by name."""
    owners = {name: name.split(".")[-2] for name, _ in model.named_parameters()}
    return {name: _AXES[owner] for name, owner in owners.items() if owner in _AXES}


def reference_divided(model: Transformer) -> dict[str, int]:
    """Return what a tensor degree must divide in the reference model."""
    spec = model.spec
    return {"heads": spec.heads, "kv heads": spec.kv_heads, "MLP width": spec.ffn}


def check_degree(model: str, degree: int, divided: Mapping[str, int], uncuttable: str) -> None:
    """Refuse a tensor degree that a model does not allow.

    Args:
        model: what to call it.
        degree: ranks of a team; 1 is always fine.
        divided: what -> how many there are; the degree divides each.
        uncuttable: why there is no degree above 1; "" if there may be one.
    """
    if degree == 1:
        return
    if uncuttable:
        raise SeqloomError(f"tensor degree {degree}: {model} cannot be cut: {uncuttable}; plan with tensor = 1")
    wrong = [f"{what} {count}" for what, count in divided.items() if degree < 1 or count % degree]
    if wrong:
        common = math.gcd(*divided.values())
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
        calls: the attention calls of the layers, each distinct one once, for `prepare`.
        embed: embed(ids int64[tokens], context) -> [tokens, hidden].
        body: body(hidden [tokens, hidden], context, first, stop) -> the same shape, after layers first .. stop - 1.
        norm: the final norm, [tokens, hidden] -> the same shape.
        weights: what `split_weights(layers)` returned; without that a backward's halves are one, all in I.
        embedding: has the parameters that `embed` needs.
        whole: why the model cannot be cut into stages, where that is known.
        cuts: canonical name of a parameter -> axis along which a team of ranks cuts it (0 rows, 1 columns); names that
            are not in it are whole on every member. See `runtime.cuts`.
        divided: what a tensor degree must divide (such as "kv heads") -> how many there are.
        uncuttable: why no team can cut the model's weights; "" if one can.
        values: where those of parameters are that are on "meta"; None: the module has them.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    hidden: Callable[[torch.Tensor, Context], torch.Tensor]
    head: nn.Module
    calls: tuple[ModelCall, ...] = ()
    embed: Callable[[torch.Tensor, Context], torch.Tensor] | None = None
    body: Callable[[torch.Tensor, Context, int, int], torch.Tensor] | None = None
    norm: nn.Module | None = None
    weights: WeightGradients = field(default_factory=WeightGradients)
    embedding: nn.Module | None = None
    whole: str = ""
    cuts: Mapping[str, int] = field(default_factory=dict)
    divided: Mapping[str, int] = field(default_factory=dict)
    uncuttable: str = "nobody has said along which axes, see Network(.., cuts=, divided=, uncuttable='')"
    values: Values | None = None

    @classmethod
    def of(cls, model: Transformer) -> ModelAdapter:
        """Describe the reference model."""
        if not isinstance(model, Transformer):
            raise SeqloomError(
                f"{type(model).__name__} is not the reference transformer; for another model say what its layers, "
                "its hidden states and its head are: Network(module, layers, hidden, head)"
            )
        decoder, spec = model.model, model.spec
        calls = tuple(ModelCall(spec.heads, spec.kv_heads, spec.head_dim, each) for each in dict.fromkeys(spec.windows))
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
            cuts=reference_cuts(model),
            divided=reference_divided(model),
            uncuttable="",
        )

    @property
    def uncut(self) -> str:
        """What to say where this model shall be cut into stages and cannot."""
        why = self.whole or "it is not known how to run some of its layers"
        return (
            f"{type(self.module).__name__} cannot be cut into stages: {why}; plan with one stage "
            "(pipeline.stages = 1), or say how its parts are called: Network(.., embed=, body=, norm=, embedding=)"
        )

    def fill(self, named: Iterable[tuple[str, nn.Parameter]] | None = None) -> None:
        """Give parameters their values where they are on "meta" and `values` has them.

        Args:
            named: canonical name and parameter; None: all of the module.
        """
        if self.values is not None:
            for name, parameter in self.module.named_parameters() if named is None else named:
                if parameter.is_meta:
                    self.values.fill(name, parameter)

    def check_tensor(self, degree: int) -> None:
        """Refuse a tensor degree that heads, kv heads or widths do not allow, with the nearest that they do."""
        check_degree(type(self.module).__name__, degree, self.divided, self.uncuttable)

    def prepare(self, context: Context, dtype: torch.dtype) -> None:
        """Do the index work of a round's attention now, so that no layer does; see `bind_plan`.

        Args:
            context: of the round; it keeps the result.
            dtype: that layers compute in.
        """
        members, inside = 1 if context.team is None else len(context.team.ranks), attention_context(context)
        for heads, kv_heads, dim, window, scale in self.calls:
            prepare_attention(inside, heads // members, kv_heads // members, dim, dtype, window=window, scale=scale)

    def run(self, part: LayerRange, given: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] after a part; those of a part that ends are normalised.

        Args:
            part: of this model.
            given: int64[tokens] for a part that begins, else hidden states [tokens, hidden].
            context: of the round.
        """
        whole = part.has_embedding and part.has_head
        if whole and not self._carries_frozen(context):
            return self.hidden(given, context)
        if not whole and (
            part.model_layers != len(self.layers) or not 0 <= part.first <= part.stop <= part.model_layers
        ):
            raise SeqloomError(
                f"layers {part.first} to {part.stop - 1} of {part.model_layers} asked of a model with "
                f"{len(self.layers)} layers; make the plan for this model"
            )
        if self.embed is None or self.body is None or self.norm is None:
            raise SeqloomError(self.uncut)
        states = self.embed(given, context) if part.has_embedding else given
        if part.has_embedding and self._carries_frozen(context) and not states.requires_grad:
            states.requires_grad_()
        states = self.body(states, context, part.first, len(self.layers) if whole else part.stop)
        return self.norm(states) if part.has_head else states

    def _carries_frozen(self, context: Context) -> bool:
        """Whether a document is in pieces and some parameters do not learn.

        Keys are kept until attention goes backward, which it would not below the first parameter that learns.
        """
        if not context.pieces or not torch.is_grad_enabled():
            return False
        return not all(parameter.requires_grad for parameter in self.module.parameters())


class LossOf(nn.Module):
    """A network from token ids to the sum of token losses, as one module: what it needs is gathered for one call."""

    def __init__(self, network: ModelAdapter, chunk: int = CHUNK, together: HeadGradients | None = None) -> None:
        """Wrap a network; `chunk` and `together` as in `summed_loss`."""
        super().__init__()
        self.inner = network.module
        self._network = (network,)  # in a tuple: torch sees parameters under `inner` alone
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
        network = self._network[0]
        part = part or LayerRange(0, len(network.layers), len(network.layers))
        states = network.run(part, given, context)
        if not part.has_head:
            return states
        assert labels is not None  # rows of a part that ends are read with their labels
        return summed_loss(states, cast("torch.Tensor", network.head.weight), labels, **self._options)
