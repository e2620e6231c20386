"""A decoder of transformers in parts: its embedding, some of its layers, its final norm, each to be called alone.

What the parts are and what they are called with is found by watching the decoder's own forward once, on a shallow copy
that has stand-ins for its children, so that nothing is computed and the model is left alone:

    embedding -> layer -> layer -> .. -> norm         one tensor, handed on untouched
     tables -------^--------^                         made from positions by a child, such as cos and sin of RoPE

A decoder that does anything else in between (a factor on embeddings, a second stream, inputs of each layer's own)
cannot be cut: `Whole` says why, and nothing is guessed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from seqloom.dist import Context, attention_context, bind_single_rank
from seqloom.integrations.transformers.attention import only_rows

PLAIN = (bool, int, float, str, type(None))
"""Arguments of these types are the same in every call."""


class Whole(Exception):  # noqa: N818 - a reason
    """Why a decoder cannot be cut."""


class Frame(NamedTuple):
    """What calls of a decoder's children are made of: hidden states [1, tokens, hidden], positions int64[1, tokens]."""

    hidden: torch.Tensor
    positions: torch.Tensor
    context: Context
    tables: tuple[Any, ...]


Pick = Callable[[Frame], Any]
"""Returns one argument of a call."""


class Recipe(NamedTuple):
    """How a child is called."""

    module: nn.Module
    args: tuple[Pick, ...]
    options: dict[str, Pick]

    def __call__(self, frame: Frame) -> Any:
        """Call it."""
        return self.module(*[pick(frame) for pick in self.args], **{k: pick(frame) for k, pick in self.options.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A decoder in parts.

    Attributes:
        embedding: of tokens.
        tables: calls whose results layers are given, made before the first layer.
        layers: the call of every layer.
        norm: the final one.
    """

    embedding: nn.Module
    tables: tuple[Recipe, ...]
    layers: tuple[Recipe, ...]
    norm: nn.Module

    def embed(self, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Return what the first layer is given, [tokens, hidden], for token ids int64[tokens]."""
        rows = ids if context.tokens else ids.new_zeros(1)  # as in `inputs`: a call needs a row
        return only_rows(self.embedding(rows[None]).squeeze(0), context.tokens)

    def body(self, hidden: torch.Tensor, context: Context, first: int, stop: int) -> torch.Tensor:
        """Run layers first .. stop - 1 on hidden states [tokens, hidden]; the result has their shape."""
        positions = attention_context(context).positions  # of the whole team's tokens, as in `inputs`
        if not context.tokens:
            hidden = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])])
        positions = positions if len(positions) else positions.new_zeros(1)
        frame = Frame(hidden[None], positions[None], context, ())
        frame = frame._replace(tables=tuple(make(frame) for make in self.tables))
        for layer in self.layers[first:stop]:
            frame = frame._replace(hidden=layer(frame))
        return only_rows(frame.hidden.squeeze(0), context.tokens)


def parts_of(decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]) -> Parts:
    """Find the parts of a decoder.

    Args:
        decoder: an attached model without its head.
        embedding: of tokens.
        layers: all of them, in order.

    Raises:
        Whole: it does more than its parts do.
    """
    frame = _frame(embedding, 1)
    calls, result = _watched(decoder, layers, embedding, frame)
    numbers = [number for number, call in enumerate(calls) if call.module in layers]
    first = numbers[0] if numbers else len(calls)
    if [call.module for call in calls[first : first + len(layers)]] != list(layers) or len(numbers) != len(layers):
        raise Whole("its forward does not call every layer once, one after the other")
    after = calls[first + len(layers) :]
    if len(after) != 1:
        raise Whole(f"{len(after)} calls follow its last layer, and not one norm")
    return _understood(calls[:first], calls[first : first + len(layers)], after, embedding, frame, result)


def check_positions(decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse a decoder in which positions reach anything but tables, so that these may be of other tokens.

    It is followed with three positions for two tokens. Arguments as in `parts_of`.

    Raises:
        Whole: hidden states depend on positions, or cannot be followed.
    """
    calls, result = _watched(decoder, layers, embedding, _frame(embedding, 3), tokens=2)
    given = [_new((*call.args, *call.options.values())) for call in calls if call.module in layers]
    if any(each.shape[-2] != 2 for each in (*given, result)):
        raise Whole("its hidden states depend on positions before its layers")


class _Call(NamedTuple):
    """A call that was seen."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any


class _StandIn(nn.Module):
    """In the place of a child: answers its calls and notes them."""

    def __init__(self, child: nn.Module, answer: Callable[..., Any], calls: list[_Call]) -> None:
        super().__init__()
        self._known = (child, answer, calls)  # in a tuple: it is no child of this one

    def forward(self, *args: Any, **options: Any) -> Any:
        child, answer, calls = self._known
        result = answer(*args, **options)
        calls.append(_Call(child, args, options, result))
        return result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._known[0], name)


def _frame(embedding: nn.Module, positions: int) -> Frame:
    """Return what a decoder is watched with."""
    weight: Any = embedding.weight
    context = bind_single_rank((positions,), device="cpu" if weight.is_meta else weight.device)
    return Frame(weight, context.positions[None], context, ())


def _watched(
    decoder: nn.Module, layers: Sequence[nn.Module], embedding: nn.Module, frame: Frame, tokens: int = 1
) -> tuple[list[_Call], Any]:
    """Run the decoder's forward on stand-ins; return the calls of its children in order, and what it returned."""
    lists = [name for name, child in decoder.named_children() if list(child.children()) == list(layers)]
    if len(lists) != 1:
        raise Whole(f"its {len(layers)} layers are not one list of {type(decoder).__name__}")
    calls: list[_Call] = []
    weight: Any = embedding.weight

    def embedded(ids: torch.Tensor) -> torch.Tensor:
        return weight.new_empty((*ids.shape, weight.shape[1]), device=ids.device)

    def answer(child: nn.Module) -> Callable[..., Any]:
        if child is embedding:
            return embedded
        able = _able(child)
        return lambda *args, **options: able(*args, **options) if not _begun(calls, layers) else _new(args)

    ghost = copy.copy(decoder)
    ghost._modules = {
        name: None if child is None else _StandIn(child, answer(child), calls)
        for name, child in decoder._modules.items()
    }
    stands = [_StandIn(layer, lambda *args, **options: _new((*args, *options.values())), calls) for layer in layers]
    ghost._modules[lists[0]] = nn.ModuleList(stands)
    ids = frame.positions.new_zeros(1, tokens)
    given = {"input_ids": ids, "position_ids": frame.positions, "use_cache": False, "seqloom_context": frame.context}
    try:
        with torch.no_grad():
            return calls, ghost(**given).last_hidden_state
    except Exception as error:  # whatever the model's own code may raise
        raise Whole(f"its forward cannot be followed ({type(error).__name__}: {error})") from error


def _able(child: nn.Module) -> nn.Module:
    """Return a child that can be called: a copy with any values if its own are on "meta"."""
    if any(each.is_meta for each in (*child.parameters(), *child.buffers())):
        return copy.deepcopy(child).to_empty(device="cpu")
    return child


def _begun(calls: list[_Call], layers: Sequence[nn.Module]) -> bool:
    return any(call.module in layers for call in calls)


def _new(args: tuple[Any, ...]) -> Any:
    """Return a tensor like the first among the arguments."""
    return next((torch.empty_like(each) for each in args if isinstance(each, torch.Tensor)), None)


def _understood(
    before: list[_Call], layers: list[_Call], after: list[_Call], embedding: nn.Module, frame: Frame, result: Any
) -> Parts:
    """Make recipes of calls: every argument must be known to come from somewhere."""
    embedded = [call for call in before if call.module is embedding]
    if len(embedded) != 1:
        raise Whole(f"its embedding is called {len(embedded)} times before the first layer")
    _check_stream([*embedded, *layers, *after], result)
    frame = frame._replace(hidden=embedded[0].result)
    made = [call for call in before if call.module is not embedding]
    tables = tuple(_recipe(call, frame) for call in made if _used(call, layers))
    frame = frame._replace(tables=tuple(call.result for call in made if _used(call, layers)))
    recipes = []
    for call in layers:
        recipes.append(_recipe(call, frame))
        frame = frame._replace(hidden=call.result)
    return Parts(embedding, tables, tuple(recipes), after[0].module)


def _check_stream(calls: list[_Call], result: Any) -> None:
    """Refuse a decoder that does not hand on what embedding, layers and norm return, as it is, to the next of them."""
    names = ["its embedding", *(f"layer {number}" for number in range(len(calls) - 2)), "its final norm"]
    if len(calls[-1].args) != 1 or calls[-1].options:
        raise Whole("what follows its last layer is not one norm of what that layer returned")
    for number, call in enumerate(calls[1:], 1):
        if not any(each is calls[number - 1].result for each in (*call.args, *call.options.values())):
            raise Whole(f"{names[number]} is not given what {names[number - 1]} returned, but something made of it")
    if result is not calls[-1].result:
        raise Whole("its result is not that of its final norm, but something made of it")
    changed = next((name for name, call in zip(names, calls, strict=True) if call.result._version), None)
    if changed is not None:
        raise Whole(f"what {changed} returned is changed in place before it is used")


def _used(call: _Call, layers: list[_Call]) -> bool:
    return any(each is call.result for layer in layers for each in (*layer.args, *layer.options.values()))


def _recipe(call: _Call, frame: Frame) -> Recipe:
    name = type(call.module).__name__
    args = tuple(_pick(each, frame, f"argument {number} of {name}") for number, each in enumerate(call.args))
    options = {key: _pick(each, frame, f"{key} of {name}") for key, each in call.options.items()}
    return Recipe(call.module, args, options)


def _pick(value: Any, frame: Frame, what: str) -> Pick:
    """Say where an argument comes from."""
    for field in ("hidden", "positions", "context"):
        if value is getattr(frame, field):
            return lambda given: getattr(given, field)
    for number, table in enumerate(frame.tables):
        if value is table:
            return lambda given: given.tables[number]
    if isinstance(value, PLAIN):
        return lambda given: value
    raise Whole(f"{what} is neither hidden states, positions nor a table made of them")
