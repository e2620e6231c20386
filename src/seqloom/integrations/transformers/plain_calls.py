"""Calls of an attached model without a context: evaluation, `generate()`, trainers of other libraries. On one rank.

    documents packed in one row        `cu_seq_lens_q`, or `position_ids` that begin again at 0: a context is derived,
                                       once for the call, and the call is like any other with a context
    whole documents, one per row       padded or not, also the first call of `generate()`: the engine computes the
                                       tokens that are no padding
    tokens after those of a cache, or  torch's attention, under the mask that transformers makes
    of a prompt that sees itself

Transformers alone attends across documents that are packed in a row, if the call has a cache or a mask of ones.
"""

from __future__ import annotations

import inspect
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.masking_utils import or_masks

from seqloom.attention import attention
from seqloom.dist import Context, bind_single_rank
from seqloom.errors import SeqloomError

STATE = "seqloom_call"
"""Attribute of the modules of an attached decoder."""
FLATTEN = "pack documents into one row, input_ids [1, tokens], with position_ids that begin at 0 in each"
SEEDS = 1 << 62
"""Dropout seeds of derived contexts are drawn below it."""


class CallState:
    """What a decoder's call in progress was given; the same object on all its modules."""

    __slots__ = ("has_context",)

    def __init__(self) -> None:
        """Say that no call is in progress."""
        self.has_context = False


class Padding:
    """Which tokens of a padded batch are no padding: one run in every row."""

    __slots__ = ("_context", "kind", "mask", "rows")
    ndim = 4
    """As of a mask that is ready: `generate()` with a static cache makes masks before it calls the model."""

    def __init__(self, mask: torch.Tensor, kind: int | str | None) -> None:
        """Take the mask, bool[batch, tokens], and what there would be without padding (`attach.mask_function`)."""
        self.mask, self.kind, self.rows = mask, kind, mask.flatten().nonzero().squeeze(1)
        self._context: Context | None = None

    def contiguous(self) -> Padding:
        """Return this; `generate()` asks it of all masks."""
        return self

    def context(self) -> Context:
        """Return the context of the rows, each of which is a document."""
        if self._context is None:
            self._context = bind_single_rank(self.mask.sum(1).tolist(), device=self.mask.device)
        return self._context


def derive_contexts(decoder: nn.Module, name: str) -> None:
    """Have a decoder derive contexts for packed documents, while its attention is `name`; again changes nothing."""
    if STATE in decoder.__dict__:
        return
    state = CallState()
    for module in decoder.modules():
        setattr(module, STATE, state)
    decoder.register_forward_pre_hook(_Derive(name), with_kwargs=True)
    decoder.register_forward_hook(_end_call, always_call=True)


def lost_context(module: nn.Module) -> bool:
    """Whether the decoder's call has a context, which did not come to this module."""
    state = getattr(module, STATE, None)
    return state is not None and state.has_context


class _Derive:
    """A forward pre-hook: adds a context to the keywords of a call that has packed documents and none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, decoder: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any] | None:
        derived = None
        if keywords.get("seqloom_context") is None and decoder.config._attn_implementation == self.name:
            derived = _derived_context(decoder, args, keywords)
        getattr(decoder, STATE).has_context = derived is not None or keywords.get("seqloom_context") is not None
        if derived is None:
            return None
        keywords = {**keywords, "seqloom_context": derived, "use_cache": False, "attention_mask": None}
        if keywords.get("position_ids") is None:
            keywords["position_ids"] = derived.positions[None]
        return args, keywords


def _end_call(decoder: Any, _: Any, __: Any) -> None:
    getattr(decoder, STATE).has_context = False


def _derived_context(decoder: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Context | None:
    """Return the context of documents packed in the one row of a call; None: every row is a document."""
    given = inspect.signature(decoder.forward).bind_partial(*args, **keywords).arguments
    given |= given.pop("kwargs", {})
    past, tokens = given.get("past_key_values"), given.get("inputs_embeds")
    tokens = given.get("input_ids") if tokens is None else tokens
    if tokens is None or (past is not None and _seen(past)):
        return None
    shape, mask = tokens.shape[:2], given.get("attention_mask")
    made = mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2)  # it says which sees which
    if made and given.get("cu_seq_lens_q") is None:
        return None
    padded = isinstance(mask, torch.Tensor) and not made and not bool(mask.all())
    lengths = packed_lengths(given, shape, mask if padded else None)
    if lengths is None:
        return None
    if shape[0] != 1 or padded or made or past is not None:
        having = "padding" if padded else f"a batch of {shape[0]}" if shape[0] != 1 else "a cache or a mask"
        raise SeqloomError(
            f"documents packed in a row, in a call with {having}: which token sees which is not clear; {FLATTEN}, and "
            "leave attention_mask and past_key_values out"
        )
    seed = None
    if decoder.training and torch.is_grad_enabled():  # another one for every call, by torch's generator
        seed = int(torch.randint(SEEDS, ()))
    return bind_single_rank(lengths, device=tokens.device, dropout_seed=seed)


def _seen(past: Any) -> bool:
    """Whether a cache has tokens, or may have: a static one does not tell without waiting for its device."""
    seen = past.get_seq_length()
    return not isinstance(seen, int) or seen > 0


def packed_lengths(given: dict[str, Any], shape: torch.Size, mask: torch.Tensor | None) -> list[int] | None:
    """Return the lengths of documents packed in the rows of a call; None: every row is a document."""
    borders, positions = given.get("cu_seq_lens_q"), given.get("position_ids")
    if borders is not None:
        ends = borders.tolist() if isinstance(borders, torch.Tensor) else [*borders]
        if ends[:1] != [0] or ends[-1] != shape.numel() or ends != sorted(ends):
            raise SeqloomError(f"cu_seq_lens_q from {ends[:1]} to {ends[-1:]} for {shape.numel()} tokens: {FLATTEN}")
        return [stop - start for start, stop in pairwise(ends)]
    if positions is None:
        return None
    positions = (positions[0] if positions.ndim == 3 else positions).expand(shape)
    begins = positions[:, 1:] != positions[:, :-1] + 1
    if mask is not None:  # positions of padding are anything
        begins = begins & mask[:, 1:].bool() & mask[:, :-1].bool()
    if not bool(begins.any()):
        return None
    if bool((positions[:, 1:][begins] != 0).any()):
        raise SeqloomError(
            "position_ids that jump to another position than 0 inside a row: the tokens between are elsewhere, as in a "
            f"shard of a longer document, and their keys are not known here; {FLATTEN}, or pass a context"
        )
    begins = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    return [stop - start for start, stop in pairwise([*begins.nonzero().squeeze(1).tolist(), shape.numel()])]


def one_run_each(mask: torch.Tensor) -> bool:
    """Whether the tokens of every row of a padding mask, bool[batch, tokens], are one run."""
    changes = mask[:, 1:].int() - mask[:, :-1].int()
    return bool(((changes == 1).sum(1) + mask[:, 0].int() <= 1).all())


def shows_blocks(mask: Any) -> bool:
    """Whether a mask function of transformers shows more than what comes before: blocks of tokens, such as a prompt.

    It is made of others, which its closure has.
    """
    if getattr(mask, "__qualname__", "").startswith(or_masks.__name__):
        return True
    found = (cell.cell_contents for cell in getattr(mask, "__closure__", None) or ())
    parts = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in found)
    return any(shows_blocks(part) for part in parts if callable(part))


def rows_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: Padding | None, options: dict[str, Any]
) -> torch.Tensor:
    """Return the attention of rows that are a document each, [batch, tokens, heads, dim]; of padding zeros.

    Args:
        query: [batch, heads, tokens, dim].
        key, value: [batch, kv_heads, tokens, dim].
        padding: of the rows; None: there is none.
        options: keywords of `attention`.
    """
    batch, _, tokens, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if padding is None:
        context = bind_single_rank([tokens] * batch, device=query.device)
        return attention(q, k, v, context, **options).unflatten(0, (batch, tokens))
    q, k, v = (x.index_select(0, padding.rows) for x in (q, k, v))
    out = attention(q, k, v, padding.context(), **options)
    rows = out.new_zeros((batch * tokens, *out.shape[1:])).index_copy(0, padding.rows, out)
    return rows.unflatten(0, (batch, tokens))


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Return attention under a mask, [batch, tokens, heads, dim]: of tokens whose documents begin in a cache.

    Args:
        query: [batch, heads, tokens, dim].
        key, value: [batch, kv_heads, keys, dim].
        mask: [batch, 1 or heads, tokens, keys]: True where a token sees a key, or what is added to logits.
        scale, softcap, sinks, dropout: see `attention`.
    """
    if dropout:
        raise SeqloomError(
            f"dropout {dropout} of attention weights in a call with a cache, or with a mask of its own: here none are "
            "dropped; call model.eval(), or set it to 0 in the config"
        )
    mask = mask[..., : key.shape[2]]
    if softcap is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (query @ key.mT).to(wide) * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]].nan_to_num(0.0)  # of padding, which sees nothing
    return (weights.to(value.dtype) @ value).transpose(1, 2)
