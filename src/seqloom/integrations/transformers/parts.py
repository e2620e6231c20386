"""Cut a Hugging Face decoder into parts that pipeline stages call one by one: embedding, some layers, final norm.

The parts and their arguments are found by tracing the decoder's own forward once, on a shallow copy whose children are
stubs, so that nothing is computed and the model stays as it is:

    embedding -> layer -> layer -> .. -> norm         one tensor, handed on untouched
     tables -------^--------^                         made from positions by a child, such as cos and sin of RoPE

A decoder that does anything else in between (a factor on embeddings, a second stream, inputs of each layer's own)
cannot be cut: `StageSplitError` says why, and nothing is guessed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from seqloom.dist import Context, attention_context, bind_single_rank

CONSTANTS = (bool, int, float, str, type(None))
"""Arguments of these types are the same in every call."""


class StageSplitError(Exception):
    """Why a decoder cannot be cut into stages."""


class CallValues(NamedTuple):
    """What arguments of a decoder's children are taken from."""

    hidden: torch.Tensor  # [1, tokens, hidden]
    positions: torch.Tensor  # int64[1, tokens]
    context: Context  # of the round
    tables: tuple[Any, ...]  # results of the children that ran before the first layer


ArgumentSource = Callable[[CallValues], Any]
"""Picks one argument of a call."""


class ChildCall(NamedTuple):
    """A child of the decoder and the sources of its arguments."""

    module: nn.Module
    args: tuple[ArgumentSource, ...]
    options: dict[str, ArgumentSource]

    def __call__(self, values: CallValues) -> Any:
        """Call the child."""
        options = {name: source(values) for name, source in self.options.items()}
        return self.module(*[source(values) for source in self.args], **options)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderParts:
    """A decoder in parts."""

    embedding: nn.Module  # of tokens
    tables: tuple[ChildCall, ...]  # made before the first layer; layers are given their results
    layers: tuple[ChildCall, ...]
    norm: nn.Module  # the final one

    def embed(self, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the input of the first layer, [tokens, hidden], for token ids int64[tokens]."""
        return drop_padding(self.embedding(pad_empty(ids)[None]).squeeze(0), context.tokens)

    def body(self, hidden: torch.Tensor, context: Context, first: int, stop: int) -> torch.Tensor:
        """Run layers first .. stop - 1 on hidden states [tokens, hidden]; the result has their shape."""
        positions = attention_context(context).positions  # of all tokens of the TP group, as in `inputs`
        values = CallValues(pad_empty(hidden)[None], pad_empty(positions)[None], context, ())
        values = values._replace(tables=tuple(call(values) for call in self.tables))
        for layer in self.layers[first:stop]:
            result = layer(values)
            values = values._replace(hidden=result[0] if isinstance(result, tuple) else result)
        return drop_padding(values.hidden.squeeze(0), context.tokens)


def pad_empty(rows: torch.Tensor) -> torch.Tensor:
    """Return rows, or one row of zeros where there are none: models of transformers cannot be called with no tokens."""
    return rows if len(rows) else torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])


def drop_padding(rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the rows of tokens, without that of `pad_empty`.

    All of them are the tensor itself: behind an index, gradients would be copied into zeros.
    """
    return rows if len(rows) == tokens else rows[:tokens]


def split_decoder(decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]) -> DecoderParts:
    """Trace an attached model without its head and return its parts; StageSplitError if it does more than they do."""
    values = _trace_values(embedding, 2)
    try:
        calls, result = _trace(decoder, layers, embedding, values, 2)
    except StageSplitError:  # its forward may take the first of what a layer returns
        calls, result = _trace(decoder, layers, embedding, values, 2, as_pair=True)
    indices = [index for index, call in enumerate(calls) if call.module in layers]
    first = indices[0] if indices else len(calls)
    before, middle, after = calls[:first], calls[first : first + len(layers)], calls[first + len(layers) :]
    if [call.module for call in middle] != list(layers) or len(indices) != len(layers):
        raise StageSplitError("its forward does not call every layer once, one after the other")
    if len(after) != 1:
        raise StageSplitError(f"{len(after)} calls follow its last layer, and not one norm")
    embedded = [call for call in before if call.module is embedding]
    if len(embedded) != 1:
        raise StageSplitError(f"its embedding is called {len(embedded)} times before the first layer")
    _check_stream([*embedded, *middle, *after], result)
    values = values._replace(hidden=embedded[0].result)
    given = {id(value) for call in middle for value in call.arguments}
    tables = [call for call in before if call.module is not embedding and id(call.result) in given]
    table_calls = tuple(_child_call(call, values) for call in tables)
    values = values._replace(tables=tuple(call.result for call in tables))
    layer_calls = []
    for call in middle:
        layer_calls.append(_child_call(call, values))
        values = values._replace(hidden=call.result)
    return DecoderParts(embedding, table_calls, tuple(layer_calls), after[0].module)


def check_positions(decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse a decoder in which positions reach anything but tables: a TP group's tables are of other tokens.

    Traces it with three positions for two tokens; StageSplitError also if it cannot be traced.
    """
    calls, result = _trace(decoder, layers, embedding, _trace_values(embedding, 3), 2)
    inputs = [_like_first_tensor(call.arguments) for call in calls if call.module in layers]
    if any(tensor.shape[-2] != 2 for tensor in (*inputs, result)):
        raise StageSplitError("its hidden states depend on positions before its layers")


class _TracedCall(NamedTuple):
    """A call of a child that the trace saw."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.args, *self.options.values())


class _Stub(nn.Module):
    """Takes the place of a child: answers its calls and records them; `as_pair` adds None to answers."""

    def __init__(
        self, child: nn.Module, answer: Callable[..., Any], calls: list[_TracedCall], as_pair: bool = False
    ) -> None:
        super().__init__()
        self._stub = (child, answer, calls, as_pair)  # in a tuple: the child is no submodule of its stub

    def forward(self, *args: Any, **options: Any) -> Any:
        child, answer, calls, as_pair = self._stub
        result = answer(*args, **options)
        calls.append(_TracedCall(child, args, options, result))
        return (result, None) if as_pair else result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._stub[0], name)


def _trace_values(embedding: nn.Module, positions: int) -> CallValues:
    """Return the values that a trace runs with."""
    weight: Any = embedding.weight
    context = bind_single_rank((positions,), device="cpu" if weight.is_meta else weight.device)
    return CallValues(weight, context.positions[None], context, ())


def _trace(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    embedding: nn.Module,
    values: CallValues,
    tokens: int,
    *,
    as_pair: bool = False,
) -> tuple[list[_TracedCall], Any]:
    """Run the decoder's forward on stubs; return the calls of its children in order, and its result.

    `as_pair`: stubs of layers return hidden states and, in the place of attention weights, None.
    """
    lists = [name for name, child in decoder.named_children() if list(child.children()) == list(layers)]
    if len(lists) != 1:
        raise StageSplitError(f"its {len(layers)} layers are not one list of {type(decoder).__name__}")
    calls: list[_TracedCall] = []
    weight: Any = embedding.weight

    def embed(ids: torch.Tensor) -> torch.Tensor:  # some models move ids to the weight, which may be on "meta"
        return weight.new_empty((*ids.shape, weight.shape[1]), device=values.positions.device)

    def answer(child: nn.Module) -> Callable[..., Any]:
        if child is embedding:
            return embed
        runnable = _runnable(child)  # makes tables before the first layer, stands for the norm after it
        return lambda *args, **options: (
            _like_first_tensor(args) if any(call.module in layers for call in calls) else runnable(*args, **options)
        )

    stubbed = copy.copy(decoder)
    stubbed._modules = {
        name: None if child is None else _Stub(child, answer(child), calls) for name, child in decoder._modules.items()
    }

    def answer_layer(*args: Any, **options: Any) -> Any:
        return _like_first_tensor((*args, *options.values()))

    stubs = [_Stub(layer, answer_layer, calls, as_pair) for layer in layers]
    stubbed._modules[lists[0]] = nn.ModuleList(stubs)
    ids = values.positions.new_zeros(1, tokens)
    given = {"input_ids": ids, "position_ids": values.positions, "use_cache": False, "seqloom_context": values.context}
    try:
        with torch.no_grad():
            return calls, stubbed(**given).last_hidden_state
    except Exception as error:  # whatever the model's own code may raise
        raise StageSplitError(f"its forward cannot be traced ({type(error).__name__}: {error})") from error


def _runnable(child: nn.Module) -> nn.Module:
    """Return the child, or a copy with arbitrary values on the CPU where its own are on "meta"."""
    if any(tensor.is_meta for tensor in (*child.parameters(), *child.buffers())):
        return copy.deepcopy(child).to_empty(device="cpu")
    return child


def _like_first_tensor(arguments: tuple[Any, ...]) -> Any:
    return next((torch.empty_like(value) for value in arguments if isinstance(value, torch.Tensor)), None)


def _check_stream(calls: list[_TracedCall], result: Any) -> None:
    """Refuse a decoder that does not hand on the results of embedding, layers and norm as they are."""
    names = ["its embedding", *(f"layer {index}" for index in range(len(calls) - 2)), "its final norm"]
    if len(calls[-1].args) != 1 or calls[-1].options:
        raise StageSplitError("what follows its last layer is not one norm of what that layer returned")
    for index, call in enumerate(calls[1:], 1):
        if not any(value is calls[index - 1].result for value in call.arguments):
            raise StageSplitError(
                f"{names[index]} is not given what {names[index - 1]} returned, but something made of it"
            )
    if result is not calls[-1].result:
        raise StageSplitError("its result is not that of its final norm, but something made of it")
    changed = next((name for name, call in zip(names, calls, strict=True) if call.result._version), None)
    if changed is not None:
        raise StageSplitError(f"what {changed} returned is changed in place before it is used")


def _child_call(call: _TracedCall, values: CallValues) -> ChildCall:
    """Find the source of every argument of a traced call."""
    name = type(call.module).__name__
    args = tuple(_source(value, values, f"argument {index} of {name}") for index, value in enumerate(call.args))
    options = {key: _source(value, values, f"{key} of {name}") for key, value in call.options.items()}
    return ChildCall(call.module, args, options)


def _is_expanded(value: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether a tensor is the positions themselves, or an expanded view of them."""
    same = value.data_ptr() == positions.data_ptr() and value.dtype == positions.dtype
    copies = all(stride == 0 or size == 1 for size, stride in zip(value.shape[:-2], value.stride(), strict=False))
    return same and value.shape[-2:] == positions.shape and copies


def _source(value: Any, values: CallValues, what: str) -> ArgumentSource:
    for field in ("hidden", "positions", "context"):
        if value is getattr(values, field):
            return lambda now: getattr(now, field)
    if isinstance(value, torch.Tensor) and _is_expanded(value, values.positions):
        axes = value.shape[:-2]  # as many copies of the positions, for RoPE of several axes
        return lambda now: now.positions.expand(*axes, *now.positions.shape)
    for index, table in enumerate(values.tables):
        if value is table:
            return lambda now: now.tables[index]
    if isinstance(value, CONSTANTS):
        return lambda now: value
    raise StageSplitError(f"{what} is neither hidden states, positions nor a table made of them")
