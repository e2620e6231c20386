"""Every kernel of a GPU against the truth, on what it supports, and the dispatcher on everything."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.dispatch import (
    KERNELS as REGISTRY,
)
from seqloom.attention.kernels.dispatch import (
    Dispatcher,
    available_kernels,
    make_kernel,
    unavailable_kernels,
)
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.attention.masks import Segments
from seqloom.profiling.kernels import TimingSettings, time_kernels
from support.segment_cases import SCALE, Case, kernel_errors, segment_cases

pytestmark = pytest.mark.gpu

KERNELS = {name: make_kernel(name) for name in REGISTRY}  # they keep what they build
NAMES = [name for name, kernel in KERNELS.items() if "cuda" in kernel.capabilities.devices]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    case=segment_cases(longest=40),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    dim=st.sampled_from([64, 80, 128]),
)
@settings(max_examples=15)
def test_any_segments(cuda, name, dtype, case, heads, dim):
    why = unavailable_kernels(cuda).get(name)
    kernel = KERNELS[name]
    dim = dim if dim % kernel.capabilities.dim_multiple == 0 else 64
    shape = AttentionShape(*heads, dim, dtype, cuda, SCALE * 0.3)
    why = why or kernel.capabilities.unsupported_shape(shape)
    if why is not None:
        pytest.skip(why)
    segments = case.segments.select(kernel.capabilities.supports(case.segments))
    assume(len(segments))
    # Through the dispatcher, which says in the simplest way what a kernel shall do.
    errors = kernel_errors(Dispatcher((kernel,)), case._replace(segments=segments), shape)
    assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("name", NAMES)
def test_capped_logits(cuda, name, softcap):
    kernel = KERNELS[name]
    shape = AttentionShape(4, 2, 64, kernel.capabilities.dtypes[0], cuda, 0.3, softcap)
    segments = Segments.packed([130, 1, 500, 17])
    why = unavailable_kernels(cuda).get(name) or kernel.capabilities.unsupported(segments, shape)
    if why is not None:
        pytest.skip(why)
    errors = kernel_errors(kernel, Case(segments, 648, 648), shape)
    assert max(errors.values()) < TOLERANCE[shape.dtype], errors


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("name", NAMES)
def test_head_dims(cuda, name, dim):
    kernel = KERNELS[name]
    shape = AttentionShape(4, 2, dim, kernel.capabilities.dtypes[0], cuda, dim**-0.5)
    segments = Segments.packed([130, 1, 500, 17])
    why = unavailable_kernels(cuda).get(name) or kernel.capabilities.unsupported(segments, shape)
    if why is not None:
        pytest.skip(why)
    errors = kernel_errors(kernel, Case(segments, 648, 648), shape)
    assert max(errors.values()) < TOLERANCE[shape.dtype], errors


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 100}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_packs_with_gaps(cuda, name, mask):
    """Documents of every size, some rows between them in no segment."""
    kernel = KERNELS[name]
    shape = AttentionShape(4, 2, 64, kernel.capabilities.dtypes[0], cuda, 0.125)
    rows, start = [], 3
    for length in (1, 130, 17, 500, 64, 2, 257):
        rows.append((start, start + length, start, start + length, 0))
        start += length + length % 2
    segments = Segments.of(rows, **mask)
    why = unavailable_kernels(cuda).get(name) or kernel.capabilities.unsupported(segments, shape)
    if why is not None:
        pytest.skip(why)
    errors = kernel_errors(Dispatcher((kernel,)), Case(segments, start + 5, start + 5), shape)
    assert max(errors.values()) < TOLERANCE[shape.dtype], errors


@given(case=segment_cases(longest=60), floor=st.integers(0, 60))
@settings(max_examples=30)
def test_the_dispatcher_of_this_gpu(cuda, case, floor):
    shape = AttentionShape(4, 2, 64, torch.bfloat16, cuda, 0.125)
    dispatcher = Dispatcher(available_kernels(cuda), min_lengths={"fa4": floor, "triton": floor // 2})
    errors = kernel_errors(dispatcher, case, shape)
    assert max(errors.values()) < TOLERANCE[torch.bfloat16], errors


def test_this_gpu_can_be_measured(cuda):
    shape = AttentionShape(8, 2, 128, torch.bfloat16, cuda, 0.1)
    kernels = [kernel for kernel in available_kernels(cuda) if kernel.capabilities.name != "reference"]
    measurement = time_kernels(kernels, shape, TimingSettings((256, 8_192), tokens=65_536, repeats=5))
    assert [times.kernel for times in measurement.times] == [kernel.capabilities.name for kernel in kernels]
    assert all(times.causal[1].forward_ns > 0 and times.full[1].backward_ns > 0 for times in measurement.times)
