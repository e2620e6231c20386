"""Cut a Hugging Face decoder into parts that pipeline stages call one by one: embedding, some layers, final norm.

The parts and their arguments are found by tracing the decoder's own forward once, on a shallow copy whose children are
stubs, so that nothing is computed and the model stays as it is:

    embedding -> layer -> layer -> .. -> norm         one tensor, handed on untouched
     tables -------^--------^                         made from positions by a child, such as cos and sin of RoPE

What a decoder makes of its embedding before the first layer (a factor, learned positions, a norm) is replayed: its own
forward runs to the first layer, with stubs from there on. A decoder that does anything else (a second stream, inputs of
each layer's own) cannot be cut: `StageSplitError` says why, and nothing is guessed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from seqloom.dist import Context, attention_context, bind_single_rank
from seqloom.errors import SeqloomError

CONSTANTS = (bool, int, float, str, type(None))
"""Arguments of these types are the same in every call."""
SHARED_KEYS = "shared_kv_states"
"""Name of a dictionary that layers of Gemma put keys and values into, for others that have none of their own."""


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

    embedding: nn.Module  # of tokens, or a list of all modules with parameters before the first layer
    tables: tuple[ChildCall, ...]  # made before the first layer; layers are given their results
    layers: tuple[ChildCall, ...]
    norm: nn.Module  # the final one
    replay: EmbeddingReplay | None = None  # None: the first layer is given what the embedding returns

    def embed(self, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the input of the first layer, [tokens, hidden], for token ids int64[tokens]."""
        if self.replay is None:
            hidden = self.embedding(pad_empty(ids)[None])
        else:
            hidden = self.replay(pad_empty(ids)[None], pad_empty(context.positions)[None], context)
        return drop_padding(hidden.squeeze(0), context.tokens)

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
    if any(getattr(module, "is_kv_shared_layer", False) for module in decoder.modules()):  # see `SHARED_KEYS`
        raise StageSplitError("some of its layers have the keys and values of layers before them")
    values = _trace_values(embedding, 2)
    trace = _trace(decoder, layers, embedding, values, 2)
    calls = trace.calls
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
    slot = _check_stream(middle, after[0], trace.result)
    entry = middle[0].argument(slot)
    if entry is embedded[0].result and entry._version:
        raise StageSplitError("what its embedding returned is changed in place before it is used")
    given = {id(value) for call in middle for value in call.arguments} - {id(entry)}
    tables = [call for call in before if call.module is not embedding and id(call.result) in given]
    table_calls = tuple(_child_call(call, values, embedded[0].result, entry) for call in tables)
    values = values._replace(tables=tuple(call.result for call in tables))
    layer_calls = tuple(_child_call(call, values, call.argument(slot)) for call in middle)
    parts = DecoderParts(embedding, table_calls, layer_calls, after[0].module)
    if entry is embedded[0].result:
        return parts
    early = nn.ModuleList(dict.fromkeys(call.module for call in before if any(True for _ in call.module.parameters())))
    return replace(parts, embedding=early, replay=EmbeddingReplay(decoder, layers, parts.norm, slot, trace.as_pair))


class EmbeddingReplay:
    """A decoder's own forward up to its first layer."""

    def __init__(
        self, decoder: nn.Module, layers: Sequence[nn.Module], norm: nn.Module, slot: Slot, as_pair: bool
    ) -> None:
        """Put stubs in the place of layers and final norm; `slot` is where a layer is given hidden states."""
        self._decoder, self._slot = decoder, slot
        self._calls: list[_TracedCall] = []
        stubs = [_Stub(layer, self._hand_on, self._calls, as_pair) for layer in layers]
        self._stubs: dict[str, nn.Module] = {_list_of(decoder, layers): nn.ModuleList(stubs)}
        last = _Stub(norm, lambda x: x if self._calls else norm(x), [])  # it may serve before the first layer, too
        self._stubs |= {name: last for name, child in decoder.named_children() if child is norm}

    def _hand_on(self, *args: Any, **options: Any) -> Any:
        return _TracedCall(self._decoder, args, options, None).argument(self._slot)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
        """Return what the first layer is given, [1, tokens, hidden], for ids and positions int64[1, tokens]."""
        stubbed = copy.copy(self._decoder)
        stubbed._modules = {**self._decoder._modules, **self._stubs}
        stubbed(**_decoder_inputs(ids, positions, context))
        hidden = self._calls[0].argument(self._slot)
        self._calls.clear()
        return hidden


def check_positions(decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse a decoder in which positions reach anything but tables: a TP group's tables are of other tokens.

    Traces it with three positions for two tokens; StageSplitError also if it cannot be traced.
    """
    trace = _trace(decoder, layers, embedding, _trace_values(embedding, 3), 2)
    inputs = [_like_first_tensor(call.arguments) for call in trace.calls if call.module in layers]
    if any(tensor.shape[-2] != 2 for tensor in (*inputs, trace.result)):
        raise StageSplitError("its hidden states depend on positions before its layers")


def call_layers_on_meta(decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Call every layer of a model without values as its decoder would; raises what attention is refused for.

    Says nothing of a decoder that cannot be traced, and of what a layer does after code that needs values, such as a
    choice of experts: that shows in the first step.
    """
    try:
        trace = _trace(decoder, layers, embedding, _trace_values(embedding, 2), 2)
    except StageSplitError:
        return
    for call in (call for call in trace.calls if call.module in layers):
        try:
            with torch.no_grad():
                call.module(*_on_meta(call.args), **_on_meta(call.options))
        except SeqloomError:
            raise
        except Exception:  # whatever code raises that needs values
            continue


def _on_meta(value: Any) -> Any:
    """Return tensors, also those in tuples and dictionaries, on the meta device, and everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(each) for key, each in value.items()}
    return tuple(map(_on_meta, value)) if type(value) in (tuple, list) else value


Slot = int | str
"""An argument of a call, by place or by name."""


class _TracedCall(NamedTuple):
    """A call of a child that the trace saw."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.args, *self.options.values())

    def argument(self, slot: Slot) -> Any:
        return self.args[slot] if isinstance(slot, int) else self.options[slot]

    def slots(self) -> dict[Slot, Any]:
        return {**dict(enumerate(self.args)), **self.options}


class _Trace(NamedTuple):
    """What a decoder's forward does with its children."""

    calls: list[_TracedCall]  # in order
    result: Any
    as_pair: bool  # whether it takes the first of what a layer returns


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
) -> _Trace:
    """Run the decoder's forward on stubs.

    A forward may take the first of what a layer returns: where stubs that return hidden states alone do not serve,
    they return None beside, in the place of attention weights.
    """
    try:
        return _trace_once(decoder, layers, embedding, values, tokens, as_pair=False)
    except StageSplitError:
        return _trace_once(decoder, layers, embedding, values, tokens, as_pair=True)


def _trace_once(
    decoder: nn.Module,
    layers: Sequence[nn.Module],
    embedding: nn.Module,
    values: CallValues,
    tokens: int,
    *,
    as_pair: bool,
) -> _Trace:
    layer_list = _list_of(decoder, layers)
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

    def stub(child: nn.Module) -> nn.Module:
        if isinstance(child, nn.ModuleList):
            return nn.ModuleList(map(stub, child))
        return _Stub(child, answer(child), calls)

    stubbed = copy.copy(decoder)
    stubbed._modules = {
        name: None if child is None else stub(child) for name, child in decoder._modules.items() if name != layer_list
    }

    def answer_layer(*args: Any, **options: Any) -> Any:
        return _like_first_tensor((*args, *options.values()))

    stubs = [_Stub(layer, answer_layer, calls, as_pair) for layer in layers]
    stubbed._modules[layer_list] = nn.ModuleList(stubs)
    given = _decoder_inputs(values.positions.new_zeros(1, tokens), values.positions, values.context)
    try:
        with torch.no_grad():
            return _Trace(calls, stubbed(**given).last_hidden_state, as_pair)
    except Exception as error:  # whatever the model's own code may raise
        raise StageSplitError(f"its forward cannot be traced ({type(error).__name__}: {error})") from error


def _list_of(decoder: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Return the name of the decoder's list of layers."""
    lists = [name for name, child in decoder.named_children() if list(child.children()) == list(layers)]
    if len(lists) != 1:
        raise StageSplitError(f"its {len(layers)} layers are not one list of {type(decoder).__name__}")
    return lists[0]


def _decoder_inputs(ids: torch.Tensor, positions: torch.Tensor, context: Context) -> dict[str, Any]:
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, "seqloom_context": context}


def _runnable(child: nn.Module) -> nn.Module:
    """Return the child, or a copy with arbitrary values on the CPU where its own are on "meta"."""
    if any(tensor.is_meta for tensor in (*child.parameters(), *child.buffers())):
        return copy.deepcopy(child).to_empty(device="cpu")
    return child


def _like_first_tensor(arguments: tuple[Any, ...]) -> Any:
    return next((torch.empty_like(value) for value in arguments if isinstance(value, torch.Tensor)), None)


def _check_stream(layers: list[_TracedCall], norm: _TracedCall, result: Any) -> Slot:
    """Return where layers are given hidden states: the first tensor of a layer that follows no other.

    Refuse a decoder that does not hand on the results of layers and norm as they are.
    """
    if len(norm.args) != 1 or norm.options:
        raise StageSplitError("what follows its last layer is not one norm of what that layer returned")
    slots = [slot for slot, value in layers[0].slots().items() if isinstance(value, torch.Tensor)]
    for index, (before, call) in enumerate(zip(layers, [*layers[1:], norm], strict=True)):
        name = "its final norm" if call is norm else f"layer {index + 1}"
        handed_on = [slot for slot, value in call.slots().items() if value is before.result]
        if not handed_on:
            raise StageSplitError(f"{name} is not given what layer {index} returned, but something made of it")
        if before.result._version:
            raise StageSplitError(f"what layer {index} returned is changed in place before it is used")
        slots = slots if call is norm else [slot for slot in slots if slot in handed_on]
    if not slots:
        raise StageSplitError("its layers are not given hidden states in one place")
    same = result.data_ptr() == norm.result.data_ptr() and result.shape == norm.result.shape  # or a view of all of it
    if not same or norm.result._version:
        raise StageSplitError("its result is not that of its final norm, but something made of it")
    return slots[0]


def _child_call(call: _TracedCall, values: CallValues, *hidden: torch.Tensor) -> ChildCall:
    """Find the source of every argument of a traced call; `hidden` are hidden states in it."""
    name = type(call.module).__name__
    args = tuple(_source(value, values, hidden, f"argument {index} of {name}") for index, value in enumerate(call.args))
    options = {key: _source(value, values, hidden, f"{key} of {name}") for key, value in call.options.items()}
    return ChildCall(call.module, args, options)


def _is_expanded(value: torch.Tensor, positions: torch.Tensor) -> bool:
    """Whether a tensor is the positions themselves, or an expanded view of them."""
    same = value.data_ptr() == positions.data_ptr() and value.dtype == positions.dtype
    copies = all(stride == 0 or size == 1 for size, stride in zip(value.shape[:-2], value.stride(), strict=False))
    return same and value.shape[-2:] == positions.shape and copies


def _source(value: Any, values: CallValues, hidden: tuple[torch.Tensor, ...], what: str) -> ArgumentSource:
    if any(value is each for each in hidden):
        return lambda now: now.hidden
    for field in ("positions", "context"):
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
    if what.startswith(SHARED_KEYS):  # which layers fill for layers that `split_decoder` refuses
        return lambda now: type(value)()
    raise StageSplitError(f"{what} is neither hidden states, positions nor a table made of them")
