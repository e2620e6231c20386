"""Mixers of transformers that scan: short convolutions, gated delta rules (Qwen3-Next), state spaces (Mamba-2).

The forward of a mixer is projections, gates and norms, which treat every token by itself, and calls of a few functions
of its file, which mix tokens: `SCANS`. `attach_mixers` gives each mixer, on the instance, its own forward with these
functions exchanged for ours. Ours get the context among the keywords, as attention does. Before a convolution ranks
fetch the few rows before their own (`attention.halo`), around a scan they exchange tokens for heads (`attention.scan`);
then they call the model's function, of a scan for their heads. So the model's own code computes, with fast kernels
where transformers has found them: flash-linear-attention and mamba-ssm take all whole documents of a rank in one call,
transformers' own functions one document at a time. Only in float64, in which plans are compared, its scans would round
to float32: there `attention.linear_attention` computes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import softplus

from seqloom.attention.context_parallel.state_passing import ScannedRuns, StateShape
from seqloom.attention.halo import convolve_documents
from seqloom.attention.linear_attention import CHUNK, decayed_linear_attention
from seqloom.attention.merge import sum_dtype
from seqloom.attention.scan import PackedDocuments, StateScan, WholeDocuments, scan_documents
from seqloom.dist import Context
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.parts import drop_padding, pad_empty
from seqloom.integrations.transformers.plain_calls import lost_context
from seqloom.models.compile import handle_object

Function = Callable[..., Any]
L2_EPSILON = 1e-6
"""That transformers adds to squared norms of queries and keys."""
CHOICE = "is_new_implementation"
"""How transformers' wrapper of a function says that it calls a package's."""


def is_mixer(module: nn.Module) -> bool:
    """Whether a module mixes tokens, and only by functions that are known here."""
    found = _functions(module)
    return bool(found & {*SCANS}) and found <= KNOWN


def takes_keywords(mixer: nn.Module) -> bool:
    """Whether the forward of a mixer takes keywords of any name, the context among them."""
    kinds = {each.kind for each in inspect.signature(inspect.unwrap(type(mixer).forward)).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


def convolved_values(mixer: nn.Module) -> int:
    """Return how many values of a token go into the convolution of a mixer and come out."""
    return 2 * sum(each.out_channels for each in mixer.modules() if isinstance(each, nn.Conv1d))


def scanned_values(mixer: Any) -> int:
    """Return how many values of a token go into the scan of a mixer and come out; 0: it convolves only.

    A scan reads what the convolution gives, keys once for every value head, and gates for every head; it gives what
    the last projection reads.
    """
    if not _functions(mixer) & {*SCANS} - {"causal_conv1d_fn"}:
        return 0
    heads = getattr(mixer, "num_v_heads", None) or mixer.num_heads
    repeated = 2 * (heads // mixer.num_k_heads - 1) * mixer.key_dim if hasattr(mixer, "key_dim") else 0
    last = [each for each in mixer.modules() if isinstance(each, nn.Linear)][-1]
    return convolved_values(mixer) // 2 + repeated + 2 * heads + last.in_features


class MixerCosts(NamedTuple):
    """What a mixer computes, and what its convolution reads; see the fields of `ModelSpec`."""

    heads: int
    flops: int
    halo: int
    state: int = 0
    run_flops: int = 0
    join_flops: int = 0


def mixer_costs(mixer: Any) -> MixerCosts:
    """Read them off a mixer: of the chunked forms of its scan, in which fast kernels compute too.

    A token has in a chunk of C, for every head of the delta rule with keys of k and values of v, products with C tokens
    of width k thrice and of width v twice, and three with the state; of Mamba-2 one with C tokens of v, and two with
    the state, beside one of width k for every group of heads. Where states are passed, the delta rule has k columns of
    values more, and a token reads the state before its run.
    """
    convolutions = [each for each in mixer.modules() if isinstance(each, nn.Conv1d)]
    flops = sum(2 * each.kernel_size[0] * each.out_channels for each in convolutions)
    halo = sum((each.kernel_size[0] - 1) * each.out_channels for each in convolutions)
    if not _functions(mixer) & {*SCANS} - {"causal_conv1d_fn"}:
        return MixerCosts(0, flops, halo)
    delta_rule = hasattr(mixer, "head_k_dim")
    if delta_rule:
        heads, key, value = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
        scan, wider = (heads * (2 * CHUNK * (3 * key + 2 * width) + 6 * key * width) for width in (value, value + key))
    else:
        heads, key, value, chunk = mixer.num_heads, mixer.ssm_state_size, mixer.head_dim, mixer.chunk_size
        scan = wider = heads * (2 * chunk * value + 4 * key * value) + mixer.n_groups * 2 * chunk * key
    read = 2 * heads * key * value
    state = StateShape(heads, key, value, matrix=delta_rule).message
    join = key * read if delta_rule else read // 2
    return MixerCosts(heads, flops + scan, halo, state, flops + wider + read, join)


def attach_mixers(causal: nn.Module, name: str) -> None:
    """Exchange the scans of a model's mixers; doing it again changes nothing. Its own are back under another `name`."""
    for module in causal.modules():
        if is_mixer(module):
            # A graph is for all layers of a class, and a mixer knows its layer: around it a compiled layer is cut.
            forward = torch.compiler.disable(_with_scans(module, causal.config, name))
            module.forward = MethodType(forward, module)


def _functions(module: nn.Module) -> set[str]:
    """Return the functions of a module's file that its forward calls by name."""
    forward: Any = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType):
        return set()
    called = ((name, forward.__globals__.get(name)) for name in forward.__code__.co_names)
    return {name for name, each in called if isinstance(each, FunctionType) and each.__module__ == forward.__module__}


def _with_scans(module: nn.Module, config: Any, name: str) -> FunctionType:
    """Return a mixer's forward with our scans in the place of its file's."""
    forward: Any = inspect.unwrap(type(module).forward)
    layer = getattr(module, "layer_idx", None)
    scans = {
        each: partial(_run_scan, scan, forward.__globals__[each], module, layer, config, name)
        for each, scan in SCANS.items()
        if each in forward.__code__.co_names
    }
    code = (forward.__code__, forward.__globals__ | scans, forward.__name__, forward.__defaults__, forward.__closure__)
    found = FunctionType(*code)
    found.__kwdefaults__ = forward.__kwdefaults__
    return found


def _run_scan(
    scan: Function,
    original: Function,
    mixer: nn.Module,
    layer: int | None,
    config: Any,
    name: str,
    *args: Any,
    seqloom_context: Context | torch.Tensor | None = None,
    **keywords: Any,
) -> Any:
    """Run a scan of ours in the place of a model's function, unless every row of the call is a document.

    Or unless the model is back with its own attention.
    """
    if config._attn_implementation != name:
        return original(*args, **keywords)
    if seqloom_context is None:
        if lost_context(mixer):
            raise SeqloomError(
                f"{original.__name__} of layer {layer} was called without the context of the model's call: the model "
                "does not hand keywords on to its mixers and cannot be used"
            )
        return original(*args, **keywords)
    if isinstance(seqloom_context, torch.Tensor):
        seqloom_context = handle_object(seqloom_context).context
    if not takes_kernels(args[0]):
        original = inspect.unwrap(original)  # transformers' own function, which it left for that of a package
    return scan(original, seqloom_context, layer, *args, **keywords)


def takes_kernels(tensor: torch.Tensor) -> bool:
    """Whether functions of packages serve a tensor: all of them are kernels for a GPU."""
    return tensor.is_cuda


def _takes_packs(function: Function) -> bool:
    """Whether a function of a model's file is that of a package, which takes packed documents; its own refuses them.

    Transformers chooses when the file is loaded, and remembers what it chose.
    """

    def chosen(each: Any) -> bool:
        return CHOICE in getattr(getattr(each, "__code__", None), "co_freevars", ())

    found = inspect.unwrap(function, stop=chosen)
    return chosen(found) and bool(inspect.getclosurevars(found).nonlocals[CHOICE])


def _own_rows(x: torch.Tensor, context: Context) -> torch.Tensor:
    """Return [1, tokens, ...] as [tokens, ...], without the row of `pad_empty`."""
    if x.shape[0] != 1 or x.shape[1] != max(context.tokens, 1):
        raise SeqloomError(
            f"{list(x.shape)} in a mixer, where rank {context.rank} holds {context.tokens} tokens in one row: pass the "
            "ids of context.spans, packed into one row"
        )
    return drop_padding(x.squeeze(0), context.tokens)


def _like_call(rows: torch.Tensor, context: Context, *weights: torch.Tensor | None) -> torch.Tensor:
    """Return [1, tokens, ...], with the row of `pad_empty`.

    On a rank that calls no scan, in no group or without tokens where states are passed, the weights of a scan get
    gradients of zero: FSDP2 reduces those that have one, and all ranks must have the same.
    """
    out = pad_empty(rows)[None]
    for each in weights if all(bound.group.states for bound in context.groups) else ():
        if each is not None:
            out = out + 0 * each.sum().to(out.dtype)
    return out


# -- scans ------------------------------------------------------------------------------------------------------------


def _causal_conv(
    original: Function,
    context: Context,
    layer: int | None,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Convolve channels [1, channels, tokens] with `weight` [channels, kernel], over the tokens of each document."""

    def convolve(rows: torch.Tensor) -> torch.Tensor:
        return original(pad_empty(rows).T[None], weight, bias, activation=activation)[0].T

    rows, before = _own_rows(hidden_states.transpose(1, 2), context), weight.shape[1] - 1
    out = convolve_documents(convolve, rows, before, context, layer=layer, name="conv")
    return _like_call(out, context, weight, bias).transpose(1, 2)


def _gated_delta_rule(
    original: Function,
    context: Context,
    layer: int | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Run the gated delta rule on query, key, value [1, tokens, heads, dim] and g, beta [1, tokens, heads]."""
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}

    def scan_one(document: list[torch.Tensor], state: torch.Tensor | None) -> Any:
        v, q, k, *gates = document
        if v.dtype == torch.float64:
            if use_qk_l2norm_in_kernel:
                q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPSILON).rsqrt() for x in (q, k))
            return _in_float64(q * q.shape[-1] ** -0.5, k, v, *gates, state=state)
        own = options | {"initial_state": None if state is None else state[None], "output_final_state": True}
        out, after = original(q, k, v, g=gates[0], beta=gates[1], **own)
        return out, after.squeeze(0)

    def scan_pack(documents: list[torch.Tensor], whole: WholeDocuments) -> torch.Tensor:
        v, q, k, *gates = documents
        return original(q, k, v, g=gates[0], beta=gates[1], cu_seqlens=whole.cu_seqlens, **options)[0]

    tensors = [_own_rows(x, context) for x in (value, query, key, g, beta)]
    pack = scan_pack if _takes_packs(original) and value.dtype != torch.float64 else None
    scan = partial(_scan_all, lambda _: (scan_one, pack))
    shape = StateShape(value.shape[2], key.shape[3], value.shape[3], matrix=True)
    by_states = StateScan(shape, partial(_runs_with_identity, scan_one, shape))
    out = scan_documents(scan, tensors, context, layer=layer, name="delta rule", by_states=by_states)
    return _like_call(out, context, g), None


def _runs_with_identity(
    scan_one: Function, shape: StateShape, tensors: tuple[torch.Tensor, ...], lengths: tuple[int, ...]
) -> ScannedRuns:
    """Scan runs of tokens, with their transition: columns of values do not meet, so columns of zeros are added.

    From a state whose columns there are those of an identity, their outputs are what tokens read of any state, and the
    state after them is the transition.
    """
    value, *others = tensors
    begin = value.new_zeros((shape.heads, shape.keys, shape.values + shape.keys), dtype=sum_dtype(value.dtype))
    begin[..., shape.values :] = torch.eye(shape.keys, dtype=begin.dtype, device=begin.device)
    wider = torch.nn.functional.pad(value, (0, shape.keys))
    outs, states = [], []
    for run in zip(*(each.split(lengths) for each in (wider, *others)), strict=True):
        out, after = scan_one([each[None] for each in run], begin)
        outs.append(out.squeeze(0))
        states.append(after.split([shape.values, shape.keys], dim=-1))
    out, reads = torch.cat(outs).split([shape.values, shape.keys], dim=-1)
    after, transitions = zip(*states, strict=True)
    return ScannedRuns(out, reads, after, transitions)


def _state_space(
    original: Function,
    context: Context,
    layer: int | None,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    /,
    **keywords: Any,
) -> torch.Tensor:
    """Run Mamba-2's scan on hidden states [1, tokens, heads, dim], dt [1, tokens, heads], b, c [1, tokens, groups, n].

    `a`, and `D` and `dt_bias` among the keywords, are [heads].
    """
    shared = hidden_states.shape[2] // b.shape[2]
    packs = _takes_packs(original) and hidden_states.dtype != torch.float64

    def scan_heads(heads: slice) -> tuple[Function, Function | None]:
        numbers = range(heads.start, heads.stop)
        groups = torch.tensor([each // shared - heads.start // shared for each in numbers], device=b.device)
        own: dict[str, Any] = {name: _slice(keywords.get(name), heads) for name in ("D", "dt_bias")}

        def scan_one(document: list[torch.Tensor], state: torch.Tensor | None) -> Any:
            x, steps, *rest = document
            b, c = (each.index_select(2, groups) for each in rest)  # this rank's heads may begin inside a group
            if x.dtype == torch.float64:
                return _state_space_in_float64(x, steps, a[heads], b, c, state, **keywords | own)
            first = None if state is None else state.mT[None]  # its states are [dim, n]
            options = keywords | own | {"initial_states": first, "return_final_states": True}
            out, after = original(x, steps, a[heads], b, c, **options)
            return out.to(x.dtype), after.squeeze(0).mT  # as fast kernels return it: transformers' own has float32

        def scan_pack(documents: list[torch.Tensor], whole: WholeDocuments) -> torch.Tensor:
            x, steps, *rest = documents
            b, c = (each.index_select(2, groups) for each in rest)
            options = keywords | own | {"seq_idx": whole.seq_idx, "initial_states": None, "return_final_states": False}
            return original(x, steps, a[heads], b, c, **options).to(x.dtype)

        return scan_one, scan_pack if packs else None

    def scan_runs(tensors: tuple[torch.Tensor, ...], lengths: tuple[int, ...]) -> ScannedRuns:
        (scan_one, _), (_, dt, _, c) = scan_heads(slice(0, shape.heads)), tensors
        runs = zip(*(each.split(lengths) for each in tensors), strict=True)
        outs, after = zip(*(scan_one([each[None] for each in run], None) for run in runs), strict=True)
        logs = _steps(dt.to(sum_dtype(dt.dtype)), **keywords) * a
        decays = [each.cumsum(0).exp() for each in logs.split(lengths)]
        last = [each[-1][:, None, None] for each in decays]
        return ScannedRuns(torch.cat(outs, dim=1).squeeze(0), c, after, last, torch.cat(decays))

    tensors = [_own_rows(x, context) for x in (hidden_states, dt, b, c)]
    shape = StateShape(hidden_states.shape[2], b.shape[3], hidden_states.shape[3], matrix=False)
    scan, by_states = partial(_scan_all, scan_heads), StateScan(shape, scan_runs)
    out = scan_documents(scan, tensors, context, layer=layer, name="state space", by_states=by_states)
    return _like_call(out, context, a, keywords.get("D"), keywords.get("dt_bias"))


def _slice(weight: torch.Tensor | None, heads: slice) -> torch.Tensor | None:
    return None if weight is None else weight[heads]


def _in_float64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None = None,
    *,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call `decayed_linear_attention` with tensors [1, tokens, heads, ...]."""
    tensors = [None if x is None else x.squeeze(0).transpose(0, 1).double() for x in (q, k, v, g, beta)]
    out, after = decayed_linear_attention(*tensors, state=state)  # pyrefly: ignore[bad-argument-type]
    return out.transpose(0, 1)[None], after


def _state_space_in_float64(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    state: torch.Tensor | None,
    D: torch.Tensor | None,  # noqa: N803 - as the model's function calls it
    **keywords: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Mamba-2's scan: b are keys, c queries, and steps dt scale what is written and how far it decays."""
    dt = _steps(dt, **keywords)
    out, after = _in_float64(c, b, x * dt[..., None], dt * a.to(dt.dtype), state=state)
    return out if D is None else out + D[:, None] * x, after


def _steps(
    dt: torch.Tensor,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> torch.Tensor:
    """Return how far tokens step, from what the model projects."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    return torch.clamp(softplus(dt) if dt_softplus else dt, *dt_limit)


def _scan_all(
    scan_heads: Callable[[slice], tuple[Function, Function | None]], given: PackedDocuments
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Scan one document after the other, each as a batch of one; whole ones in one call where a function packs them."""
    scan_one, scan_pack = scan_heads(given.heads)
    numbers = given.whole.numbers if scan_pack is not None else ()
    if scan_pack is not None and len(numbers) == len(given.lengths) > 0:
        return scan_pack([each[None] for each in given.tensors], given.whole).squeeze(0), [None] * len(numbers)
    parts = [x.split(given.lengths) for x in given.tensors]
    outs: list[torch.Tensor] = [given.tensors[0]] * len(given.lengths)
    states: list[torch.Tensor | None] = [None] * len(given.lengths)
    if scan_pack is not None and numbers:
        packed = [torch.cat([each[number] for number in numbers])[None] for each in parts]
        split = scan_pack(packed, given.whole).squeeze(0).split([given.lengths[number] for number in numbers])
        for number, out in zip(numbers, split, strict=True):
            outs[number] = out
    for number in sorted({*range(len(given.lengths))} - {*numbers}):
        out, states[number] = scan_one([each[number][None] for each in parts], given.states[number])
        outs[number] = out.squeeze(0)
    return torch.cat(outs) if outs else given.tensors[0], states


def _no_fused_call(original: Function, context: Context, layer: int | None, *_: Any, **__: Any) -> None:
    """Say that nothing is computed at once: convolution and scan are then called one by one."""


SCANS: Mapping[str, Function] = {
    "causal_conv1d_fn": _causal_conv,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba2_split_conv1d_scan_combined": _no_fused_call,
}
"""Functions of transformers' files that mix tokens -> ours, which are given the model's, context and layer before."""
KNOWN = {
    *SCANS,
    *("apply_mask_to_padding_states", "causal_conv1d_update", "mamba2_selective_state_update"),
    "torch_recurrent_gated_delta_rule",
}
"""Functions that a mixer may call: without a cache and a mask, what is not in `SCANS` does nothing."""
