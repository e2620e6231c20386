"""Documents in pieces on a GPU: ranks as threads on one device, every kernel, and the memory of the prefix."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention import attention
from seqloom.attention.context_parallel import KVCache
from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.kernels.dispatch import Dispatcher, available_kernels
from seqloom.dist import SingleRankTransport
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group
from support.attention_cases import Case, assemble, attend, worst
from support.kv_cache_cases import PiecesCase, attend_pieces
from support.oracle import difference
from support.strategies_kv_cache import pieces_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FEWER = settings(max_examples=max(1, settings().max_examples // 12))
KERNELS = ("all", "fa4", "triton", "varlen")
SHAPES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 3))


@pytest.fixture(scope="module")
def kernels():
    """Every kernel of this GPU together, and single ones."""
    found = available_kernels(torch.device("cuda", 0))
    single = {name: [one for one in found if one.capabilities.name == name] for name in KERNELS[1:]}
    return {"all": Dispatcher(found)} | {name: Dispatcher(tuple(some)) for name, some in single.items() if some}


def run(threads, case, inputs, kernel, *, strict=False):
    """What every layer gives, put together from all ranks."""
    parts = threads(case.world).run(lambda transport: attend_pieces(transport, case, inputs, kernel), strict=strict)
    return [assemble(own) for own in zip(*parts, strict=True)]


def one_call(threads, case, inputs, kernel):
    """Whole documents in one kernel call."""
    spans = tuple(Span(k, 0, n) for k, n in enumerate(case.whole.lengths))
    alone = replace(case.whole, world=1, groups=(Group((0,), 1, 1, spans),))
    return assemble(threads(1).run(lambda transport: attend(transport, alone, inputs, kernel)))


def half_precision_case(shape, **options):
    """Pieces of 700, 1 and 899 tokens of one document, of 300 and 333 of another; whole ones on both sides of them."""
    whole = Case((150, 1_600, 40, 633, 77), 8, 2, 64, shape[0] * shape[1], (), window=options.pop("window", None))
    rounds = [
        [Span(1, 0, 700), Span(0, 0, 150)],
        [Span(3, 0, 300), Span(1, 700, 701)],
        [Span(2, 0, 40), Span(1, 701, 1_600), Span(3, 300, 633), Span(4, 0, 77)],
    ]
    return PiecesCase.on_one_group(whole, rounds, *shape, **options)


@FEWER
@given(case=pieces_cases(), strict=st.booleans())
def test_float64_is_the_truth(threads, case, strict):
    inputs = case.inputs(torch.float64, device="cuda")
    for found, own in zip(run(threads, case, inputs, Reference(), strict=strict), inputs, strict=True):
        assert worst(found, case.truth(own)) < 1e-9


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [None, 50, 800], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_errs_at_most_twice_as_much_as_one_kernel_call(threads, kernels, name, shape, window):
    if name not in kernels:
        pytest.skip(f"no {name} on this GPU")
    if window is not None and name in ("varlen", "fa4"):
        pytest.skip(f"{name} alone takes no window at an offset")
    case = half_precision_case(shape, window=window)
    (inputs,) = case.inputs(torch.bfloat16, device="cuda")
    truth = case.truth(inputs)
    single = one_call(threads, case, inputs, kernels[name])
    (found,) = run(threads, case, [inputs], kernels[name])
    for field, one, many, true in zip(truth._fields, single, found, truth, strict=True):
        assert difference(many, true) <= max(1e-6, 2 * difference(one, true)), field


@pytest.mark.parametrize("checkpoint", [Checkpoint.FULL, Checkpoint.SELECTIVE, Checkpoint.STAGE])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_checkpoints_and_layers_on_the_kernels_of_this_gpu(threads, shape, checkpoint):
    case = half_precision_case(shape, checkpoint=checkpoint, layers=2)
    inputs = case.inputs(torch.bfloat16, device="cuda")
    for found, own in zip(run(threads, case, inputs, None), inputs, strict=True):
        assert worst(found, case.truth(own)) < 1e-2


def test_a_piece_copies_nothing_of_its_prefix(kernels):
    """A short piece behind a long prefix: its forward needs less memory than half of the prefix has."""
    long, short, heads, kv_heads, dim = 65_536, 512, 8, 4, 64
    whole = Case((long + short,), heads, kv_heads, dim, 1, ())
    case = PiecesCase.on_one_group(whole, [[Span(0, 0, long)], [Span(0, long, long + short)]])
    kv_cache = KVCache(backward=False)
    with torch.no_grad():
        for context in case.bind(SingleRankTransport(), kv_cache, "cuda"):
            sizes = [(context.tokens, count, dim) for count in (heads, kv_heads, kv_heads)]
            q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attention(q, k, v, context, kernels=kernels["triton"], layer=0)
            added = torch.cuda.max_memory_allocated() - before
    assert added < long * 2 * kv_heads * dim * 2 // 2
    kv_cache.check_empty()
