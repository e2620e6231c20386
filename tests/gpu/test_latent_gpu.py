"""Latents that travel, on a GPU: ranks as threads, in float64 and in bfloat16."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from seqloom.attention import LatentShape
from seqloom.attention.kernels.cpu import Reference
from seqloom.plan import Group, Method
from support.attention_cases import Case
from support.latent_cases import LatentInputs, assemble_latents, attend_latents, truth
from support.oracle import difference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = LatentShape(latent=512, rotated=64, unrotated=128, values=128)
"""Of DeepSeek."""
LENGTHS = (700, 33, 129, 1, 260)


def run(threads, case, inputs, kernels=None):
    body = partial(attend_latents, case=case, shape=SHAPE, inputs=inputs, kernels=kernels)
    return assemble_latents(threads(case.world).run(body))


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (1, 4), (2, 2)])
def test_the_engine_is_one_process(threads, ulysses, ring, method):
    if ring == 1 and method == Method.GATHER:
        return
    case = Case.one_group(LENGTHS, 8, 8, 192, ulysses, ring, method=method)
    case = replace(case, groups=(replace(case.groups[0], latent=True),))
    exact = LatentInputs.of(case, SHAPE, torch.float64, "cuda")
    wanted, found = truth(case, SHAPE, exact), run(threads, case, exact, Reference())
    for name, true, many in zip(wanted._fields, wanted, found, strict=True):
        assert difference(many, true) <= 1e-10, name
    half = LatentInputs.of(case, SHAPE, torch.bfloat16, "cuda")
    alone = replace(case, world=1, groups=(Group((0,), 1, 1, case.groups[0].spans),))
    wanted, one, many = truth(case, SHAPE, half), *(run(threads, each, half) for each in (alone, case))
    for name, true, single, spread in zip(wanted._fields, wanted, one, many, strict=True):
        assert difference(spread, true) <= 2 * difference(single, true), name
