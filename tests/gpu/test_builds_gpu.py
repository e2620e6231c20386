"""Kernels that are built before the first step are those that steps need: nothing is built after them."""

import pytest
import torch

from seqloom.attention import AttentionSpec, attention_builds
from seqloom.attention.kernels.dispatch import Dispatcher, default_dispatcher, make_kernel, unavailable_kernels
from support.attention_cases import Case, attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HEADS, KV_HEADS, DIM = 8, 4, 64
LENGTHS = (1000, 300, 70, 33, 20, 5, 1)


def triton_kernels():
    """How many kernels Triton has compiled or loaded in this process."""
    from seqloom.attention.kernels import triton_kernels as module

    kernels = (module.forward_kernel, module.dq_kernel, module.dkdv_kernel, module._merge_kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def fa4_kernels():
    """How many kernels FlashAttention-4 has compiled or loaded in this process."""
    from flash_attn.cute import interface

    functions = (each for each in vars(interface).values() if hasattr(each, "compile_cache"))
    return sum(len(function.compile_cache.cache) for function in functions)


def run(threads, kernel, dtype, ulysses, ring, window=None):
    """Build for one kind of group, then run groups of that kind; return what was built before and after."""
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, window)
    degrees = [(ulysses, ring)]
    for build in attention_builds(spec, dtype, "cuda", longest=1024, degrees=degrees, kernels=kernel):
        build()
    torch.cuda.synchronize()
    case = Case.one_group(LENGTHS, HEADS, KV_HEADS, DIM, ulysses, ring, window=window)
    inputs = case.inputs(dtype, device="cuda")
    return lambda: threads(case.world).run(lambda transport: attend(transport, case, inputs, kernel))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_is_compiled_after_the_builds(threads, dtype, ulysses, ring, window):
    steps = run(threads, Dispatcher((make_kernel("triton"),)), dtype, ulysses, ring, window)
    before = triton_kernels()
    steps()
    assert before and triton_kernels() == before


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (4, 1), (1, 4)])
def test_fa4_compiles_nothing_after_the_builds(threads, ulysses, ring, window):
    missing = unavailable_kernels(torch.device("cuda", 0)).get("fa4")
    if missing or (ring > 1 and window):
        pytest.skip(missing or "fa4 takes no window at an offset")
    steps = run(threads, Dispatcher((make_kernel("fa4"),)), torch.bfloat16, ulysses, ring, window)
    before = fa4_kernels()
    steps()
    assert before and fa4_kernels() == before


def test_a_device_has_one_dispatcher():
    assert default_dispatcher("cuda") is default_dispatcher(torch.device("cuda", torch.cuda.current_device()))
