"""What `models.dropout` and `attention.dropout` have to drop, in numpy's unsigned numbers, and models that do it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

GOLDEN, FIRST, SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def _mixed32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def expected_mask(
    seed: int, documents: np.ndarray, positions: np.ndarray, number: int, features: int, p: float
) -> np.ndarray:
    """Return 0 for what the dropout module of this number drops, else 1 / (1 - p); float64[tokens, features]."""
    return _mask(seed, documents, positions, (number,), np.arange(features), p)


def expected_weights(
    seed: int, document: int, queries: np.ndarray, keys: np.ndarray, layer: int, heads: int, p: float
) -> np.ndarray:
    """Return the same of attention weights in a document, float64[heads, queries, keys], given positions."""
    documents = np.full(len(queries), document)
    return np.stack([_mask(seed, documents, queries, (layer, head), keys, p) for head in range(heads)])


def _mask(
    seed: int, documents: np.ndarray, positions: np.ndarray, numbers: tuple[int, ...], columns: np.ndarray, p: float
) -> np.ndarray:
    keys = _mixed64(np.full(len(documents), seed % 2**63, dtype=np.uint64))
    for each in (documents, positions, *(np.full(len(documents), number) for number in numbers)):
        keys = _mixed64(keys + GOLDEN * (each.astype(np.uint64) + np.uint64(1)))
    low, high = keys.astype(np.uint32)[:, None], (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    drawn = _mixed32(_mixed32(low ^ _mixed32(columns.astype(np.uint32))) + high)
    return (drawn.astype(np.float64) >= p * 2.0**32) * (1 / (1 - p) if p < 1 else 0.0)


def with_expected_dropout(model: Any, seed: int) -> Any:
    """Return a copy that, as plain transformers given one document after the other, drops what it should."""
    plain = copy.deepcopy(model)
    modules = [each for each in plain.modules() if type(each) is torch.nn.Dropout and each.p]
    layers, calls = plain.config.num_hidden_layers, [0] * len(modules)
    assert modules and len(modules) % layers == 0

    def drop(number: int, module: Any, x: torch.Tensor) -> torch.Tensor:
        document, rows, features = calls[number], x.shape[-2], x.shape[-1]
        calls[number] += 1
        mask = expected_mask(seed, np.full(rows, document), np.arange(rows), number, features, module.p)
        return x * torch.from_numpy(mask).to(x)

    for number, module in enumerate(modules):
        module.forward = partial(drop, number, module)
    return plain


@contextmanager
def expected_attention_dropout(model: Any, seed: int) -> Iterator[None]:
    """Have eager attention of plain transformers drop what it should, given one document after the other."""
    calls, layers = count(), model.config.num_hidden_layers

    def drop(weights: torch.Tensor, p: float, training: bool, inplace: bool = False) -> torch.Tensor:
        if not p:  # other dropout of the model
            return weights
        document, layer = divmod(next(calls), layers)
        places = np.arange(weights.shape[-1])
        keep = expected_weights(seed, document, places, places, layer, weights.shape[1], p)
        return weights * torch.from_numpy(keep).to(weights) if training else weights

    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.softmax(dim, None if x.dtype == torch.float64 else dtype)  # theirs is float32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", drop)
        patch.setattr(torch.nn.functional, "softmax", softmax)
        yield
    assert bool(next(calls)) == model.training
