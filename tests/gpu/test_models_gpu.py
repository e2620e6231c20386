"""Models of transformers of every kind on a GPU in bfloat16: steps of the engine beside documents one by one without.

The engine, on one rank and on two that share the GPU, may err at most twice as much against float32 as plain
transformers does in one process.
"""

import pytest
import torch

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import check
from support.half_precision import KINDS, compared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # transformers warns of missing kernels
]


def skip_older_mixers(model):
    """Skip where the transformers of this machine is too old for a model's mixers, which is refused."""
    try:
        check(model)
    except SeqloomError as error:
        if "mixers that take no keywords" in str(error):
            pytest.skip(str(error))


@pytest.mark.parametrize("name", KINDS)
def test_half_precision_errs_at_most_twice_as_much_as_plain_transformers(name):
    skip_older_mixers(KINDS[name].build())
    (loss, norm), engine = compared(name, "cuda")
    for groups, (own_loss, own_norm) in engine.items():
        assert own_norm <= 2 * norm and own_loss <= max(2 * loss, 0.005), (groups, loss, norm, own_loss, own_norm)
