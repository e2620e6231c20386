"""Dropout that no plan changes: whether an element is dropped follows from what it is, not from where it is computed.

A counter-based generator has no state. The random number of an element is a hash of

    seed of the step, document, position of the token in it      `token_keys`, once for a context
    number of the dropout module in the model                    `module_keys`, once for a call of a layer
    feature                                                      `keep_mask`

so that a token has the same mask on any rank, in any round or piece, and when its layer runs again for its backward.
Layers get the context, their dropout modules do not: `LayerWrapper` gives them the keys of the call's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from seqloom.dist import Context
from seqloom.dist.rank_tokens import rows_of_spans
from seqloom.errors import SeqloomError
from seqloom.models.layer_wrapper import DROPOUT, LayerWrapper
from seqloom.plan import Remap

BITS = 32
LOW = (1 << BITS) - 1
BLOCK = 1 << 22
"""Elements whose random numbers exist at once, outside of compiled layers."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerDropout:
    """The dropout modules of a layer.

    Attributes:
        modules: (number in the model, whether it is part of the MLP, module).
    """

    modules: tuple[tuple[int, bool, nn.Dropout], ...]

    @contextmanager
    def keyed(self, context: Context) -> Iterator[None]:
        """Give the modules the keys of a call's tokens."""
        for number, in_mlp, module in self.modules:
            module.token_keys = _module_keys(context, number, in_mlp)  # pyrefly: ignore[bad-argument-type]
            module.has_context = True  # pyrefly: ignore[bad-argument-type]
        try:
            yield
        finally:
            for _, _, module in self.modules:
                module.token_keys = module.keys_handle = None  # pyrefly: ignore[bad-argument-type]
                module.has_context = False  # pyrefly: ignore[bad-argument-type]


def plan_dropout(layers: Sequence[nn.Module], mlp_names: Iterable[str] = ()) -> int:
    """Have the dropout modules inside layers drop the same elements under every plan; return how many there are.

    Every nn.Dropout above 0 gets another `forward`, on the instance. The context with which a layer is called has a
    seed for the step (`bind(dropout_seed=)`); without one nothing is dropped, and a call that will be followed by a
    backward is refused. A layer called without a context drops as torch does. Doing it again changes nothing.

    Args:
        layers: of the model, in order.
        mlp_names: what layers call the part that a round may run on other tokens (`Remap.MLP`).
    """
    names, count = set(mlp_names), 0
    for layer in layers:
        found: list[tuple[int, bool, nn.Dropout]] = []
        for name, module in layer.named_modules():
            if is_planned(module):
                assert isinstance(module, nn.Dropout)
                module.token_keys = module.keys_handle = None  # pyrefly: ignore[bad-argument-type]
                module.has_context = False  # pyrefly: ignore[bad-argument-type]
                module.forward = MethodType(_planned_forward, module)
                found.append((count, name.split(".")[0] in names, module))
                count += 1
        if found:
            LayerWrapper.of(layer).scopes[DROPOUT] = LayerDropout(tuple(found)).keyed
    return count


def is_planned(module: nn.Module) -> bool:
    """Whether `plan_dropout` serves a module of a layer."""
    return type(module) is nn.Dropout and module.p > 0


def _planned_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not module.training:
        return x
    if module.keys_handle is not None:
        keys = torch.ops.seqloom.token_keys(x, module.keys_handle)
    elif module.token_keys is not None:
        keys = module.token_keys
        check_rows(x, keys)
    elif not module.has_context:
        return type(module).forward(module, x)  # of torch, by its own generator
    elif torch.is_grad_enabled():
        raise SeqloomError(
            f"dropout of {module.p} in a context without a seed: every step drops other elements; bind the step's "
            "rounds with a number of its own, bind_plan(..., dropout_seed=step), or call model.eval()"
        )
    else:
        return x
    return x * keep_mask(keys, x.shape[-1], module.p, x.dtype).view(x.shape)


def hide_keys(layer: nn.Module, opaque_handle: Callable[[object], torch.Tensor]) -> None:
    """Give dropout modules handles for their keys: a graph would take the shape of a module's own tensor for fixed."""
    for module in layer.modules():
        keys = getattr(module, "token_keys", None)
        if keys is not None:
            module.token_keys, module.keys_handle = None, opaque_handle(keys)  # pyrefly: ignore[bad-argument-type]


def check_rows(x: torch.Tensor, keys: torch.Tensor) -> None:
    """Refuse an input of dropout that has other rows than the tokens with these keys."""
    if x.shape[:-1].numel() != len(keys):
        raise SeqloomError(
            f"dropout on {list(x.shape)}, where {len(keys)} tokens are: which tokens these are is not known here; set "
            "this dropout to 0"
        )


def _module_keys(context: Context, number: int, in_mlp: bool) -> torch.Tensor | None:
    """Return the keys of the tokens that a module will see, int64[rows]; None: the context has no seed."""
    seed = context.dropout_seed
    if seed is None:
        return None
    moved = in_mlp and context.mlp_redistribute is not None

    def build() -> torch.Tensor:
        documents, positions = context.documents, context.positions
        if moved:
            assert context.work.linear is not None and context.work.remap == Remap.MLP
            documents, positions = rows_of_spans(context.work.linear.spans(context.rank), context.device)
        if not len(positions):  # the padding row of a rank without tokens
            documents, positions = (torch.zeros(1, dtype=torch.int64, device=context.device) for _ in range(2))
        return token_keys(seed, documents, positions)

    return module_keys(context.cached(("dropout", moved), build), number)


# -- random numbers ---------------------------------------------------------------------------------------------------
# Products wrap around at 64 bits, as unsigned ones do: torch has no shift of unsigned numbers.

GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of SplitMix64, as signed numbers."""
SEEDS = (1 << 63) - 1
"""Bits of a seed that count."""


def token_keys(seed: int, documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a random number for every token of a step, int64[tokens]."""
    keys = _mixed64(torch.full_like(documents, seed & SEEDS))
    for each in (documents, positions):
        keys = _mixed64(keys + GOLDEN * (each + 1))
    return keys


def module_keys(keys: torch.Tensor, number: int) -> torch.Tensor:
    """Return the keys of one dropout module for the tokens with these keys, int64[tokens]."""
    return _mixed64(keys + GOLDEN * torch.full((), number + 1, dtype=torch.int64, device=keys.device))


def keep_mask(keys: torch.Tensor, features: int, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 for what is dropped, with probability `p`, and 1 / (1 - p) for what is kept, [tokens, features]."""
    scale = 1 / (1 - p) if p < 1 else 0.0
    numbers = _mixed32(torch.arange(features, device=keys.device))
    if torch.compiler.is_compiling():
        return _kept(keys, numbers, p).to(dtype) * scale
    with torch.no_grad():
        blocks = keys.split(max(1, BLOCK // max(features, 1)))
        return torch.cat([_kept(each, numbers, p) for each in blocks]).to(dtype) * scale


def _kept(keys: torch.Tensor, numbers: torch.Tensor, p: float) -> torch.Tensor:
    low, high = (keys & LOW)[:, None], ((keys >> BITS) & LOW)[:, None]
    drawn = _mixed32((_mixed32(low ^ numbers) + high) & LOW)
    return drawn >= round(p * (1 << BITS))


def _mixed64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's last step."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mixed32(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits, which int64 holds, so that each depends on all."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)
