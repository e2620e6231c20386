"""FLOPs of a model, against its weights and a count of query-key pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.cost.compute import forward_flops
from seqloom.describe import ModelSpec
from seqloom.models import Transformer
from seqloom.train.logging import RankMeasurement, summarize_ranks
from support.steps import tiny_spec


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=3),
    st.booleans(),
)
def test_products_with_the_weights_and_pairs_under_the_mask(lengths, windows, tied):
    """An area has half of the diagonal: s^2 / 2 where s (s + 1) / 2 pairs are."""
    spec = tiny_spec(layers=len(windows), windows=tuple(windows), tied=tied)
    parameters = dict(Transformer(spec).named_parameters())
    weights = sum(p.numel() for name, p in parameters.items() if p.ndim == 2 and "embed" not in name)
    weights += parameters["model.embed_tokens.weight"].numel() if tied else 0
    for length, found in zip(lengths, forward_flops(np.array(lengths), spec), strict=True):
        pairs = sum(min(position + 1, window or length) for window in windows for position in range(length))
        diagonal = sum(min(length, window or length) for window in windows)
        width = spec.heads * spec.head_dim
        assert found == pytest.approx(2 * weights * length + 4 * width * (pairs - diagonal / 2))


def test_the_mfu_of_a_known_model():
    """One document of 8,192 tokens of Llama 3 8B in 1 s on an H200."""
    spec = ModelSpec.load("llama3-8b")
    matrices = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 128256 * 4096
    flops = 6 * matrices * 8192 + 12 * 32 * 4096 * 8192**2 / 2
    step = RankMeasurement(1.0, *[0.1] * 7, allocated=0, reserved=0)
    found = summarize_ranks([step], 3 * float(forward_flops(np.array([8192]), spec).sum()), 989e12)
    assert found["mfu"] == pytest.approx(flops / 989e12)
