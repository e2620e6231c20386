"""Models of transformers of every kind on a GPU in bfloat16: steps of the engine beside documents one by one without.

The engine, on one rank and on two that share the GPU, may err at most twice as much against float32 as plain
transformers does in one process.
"""

import pytest
import torch

from support.half_precision import KINDS, compared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns of missing kernels
]


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_errs_at_most_twice_as_much_as_plain_transformers(name):
    (loss, norm), engine = compared(name, "cuda")
    for groups, (own_loss, own_norm) in engine.items():
        assert own_norm <= 2 * norm and own_loss <= max(2 * loss, 0.005), (groups, loss, norm, own_loss, own_norm)
