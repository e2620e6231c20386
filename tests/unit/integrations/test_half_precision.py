"""Models of every kind in bfloat16 on the CPU, as tests/gpu/test_models_gpu.py compares them on a GPU."""

import pytest
import torch

from support.half_precision import KINDS, compared

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns of missing kernels
@pytest.mark.parametrize("name", KINDS)
def test_half_precision_errs_at_most_twice_as_much_as_plain_transformers(name):
    (loss, norm), engine = compared(name, "cpu")
    for groups, (own_loss, own_norm) in engine.items():
        assert own_norm <= 2 * norm and own_loss <= max(2 * loss, 0.005), (groups, loss, norm, own_loss, own_norm)
