"""The dispatcher: whatever the table says the result is right, and the choice is the best the table allows."""

import json
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.cpu import PreparedReference, Reference
from seqloom.attention.kernels.dispatch import (
    Dispatcher,
    KernelTable,
    KernelTimes,
    Measurement,
    PreparedSplit,
    Split,
    TimePoint,
    device_name,
)
from seqloom.attention.kernels.interface import AttentionShape, Capabilities, KernelUse, device_rows
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError
from support.segment_cases import SCALE, kernel_errors, segment_cases

torch.set_num_threads(1)

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 8, torch.float64, CPU, SCALE)
ANY = replace(Reference.capabilities, name="any")
SQUARES = replace(Reference.capabilities, name="squares", offsets=False, windows=False)
PREFIXES = replace(Reference.capabilities, name="prefixes", offsets=False, prefixes=True)


@dataclass
class Plain:
    """The reference with other capabilities, which it holds the dispatcher to."""

    capabilities: Capabilities

    def prepare(self, segments, shape):
        assert self.capabilities.unsupported(segments, shape) is None
        assert segments.window is None or segments.windowed().any()
        return Reference().prepare(segments, shape)


@dataclass
class Writing(Plain):
    """The same, able to write into the buffers of others."""

    def prepare(self, segments, shape):
        return Written(super().prepare(segments, shape))


@dataclass
class Written:
    plain: PreparedReference

    def forward(self, q, k, v):
        return self.plain.forward(q, k, v)

    def backward(self, *tensors):
        return self.plain.backward(*tensors)

    def forward_into(self, q, k, v, out, lse):
        for buffer, result in zip((out, lse.T), self.plain.forward(q, k, v), strict=True):
            rows = device_rows(self.plain.segments.q_start, self.plain.segments.q_stop, CPU)
            buffer[rows] = (result if result.dim() == 3 else result.T)[rows]

    def backward_into(self, dout, saved, gradients):
        results = self.plain.backward(dout, saved)
        segments = self.plain.segments
        keys = device_rows(segments.k_start, segments.k_stop, CPU)
        for buffer, rows, result in zip(
            gradients, (device_rows(segments.q_start, segments.q_stop, CPU), keys, keys), results, strict=True
        ):
            buffer[rows] = result[rows]


def times(kernel: str, call_ns: int, *points: tuple[int, int]) -> KernelTimes:
    """A kernel that takes as long with a mask as without."""
    curve = tuple(TimePoint(length, ns, 0) for length, ns in points)
    return KernelTimes(kernel, call_ns, 0, curve, curve)


def table(*of: KernelTimes, shape: AttentionShape = SHAPE) -> KernelTable:
    sizes = (shape.heads, shape.kv_heads, shape.dim)
    return KernelTable((Measurement(device_name(CPU), torch.__version__, *sizes, "float64", of),))


def chosen(dispatcher: Dispatcher, lengths: list[int]) -> dict[str, list[int]]:
    """Lengths by the kernel that gets them."""
    parts = dispatcher.choose(Segments.packed(lengths), SHAPE)
    return {part.kernel.capabilities.name: part.segments.q_len.tolist() for part in parts}


@st.composite
def tables(draw: st.DrawFn, names: list[str]) -> KernelTable:
    """Any times for some of the kernels."""
    some = draw(st.lists(st.sampled_from(names), unique=True))
    ns = st.integers(0, 10**4)
    lengths = st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True).map(sorted)
    curve = lengths.flatmap(lambda at: st.tuples(*(st.builds(TimePoint, st.just(one), ns, ns) for one in at)))
    return table(*(KernelTimes(name, draw(ns), draw(ns), draw(curve), draw(curve)) for name in some))


@given(case=segment_cases(), measured=tables(["any", "squares", "prefixes"]), first=st.permutations([0, 1, 2]))
@settings(max_examples=60)
def test_results_do_not_depend_on_the_table(case, measured, first):
    kernels = [Writing(ANY), Plain(SQUARES), Writing(PREFIXES)]
    dispatcher = Dispatcher(tuple(kernels[index] for index in first), measured, {"squares": 5})
    assert max(kernel_errors(dispatcher, case, SHAPE).values()) < 1e-12


@given(case=segment_cases(longest=30), measured=tables(["any", "squares", "prefixes"]), backward=st.booleans())
@settings(max_examples=60)
def test_the_choice_is_the_best_of_all_assignments(case, measured, backward):
    kernels = (Plain(ANY), Plain(SQUARES), Plain(PREFIXES))
    by_name = {one.kernel: one for one in measured.measurements[0].times}
    assume("any" in by_name)
    timed = [(kernel, by_name[kernel.capabilities.name]) for kernel in kernels if kernel.capabilities.name in by_name]
    segments = case.segments
    costs = [one.predict_ns(segments, backward) for _, one in timed]
    takes = [kernel.capabilities.supports(segments) for kernel, _ in timed]
    totals = [
        sum(timed[index][1].call_ns(backward) for index in set(owner))
        + sum(int(costs[index][at]) for at, index in enumerate(owner))
        for owner in product(range(len(timed)), repeat=len(segments))
        if all(takes[index][at] for at, index in enumerate(owner))
    ]
    parts = Dispatcher(kernels, measured).choose(segments, SHAPE, backward=backward)
    used = {part.kernel.capabilities.name for part in parts}
    found = sum(by_name[name].call_ns(backward) for name in used)
    for part in parts:
        found += int(by_name[part.kernel.capabilities.name].predict_ns(part.segments, backward).sum())
    assert found == min(totals)
    assert sum(len(part.segments) for part in parts) == len(segments)


def test_long_documents_go_where_they_are_faster():
    dense = times("squares", 1_000, (1, 5_000), (64, 5_000), (256, 20_000))
    packed = times("any", 2_000, (1, 10), (64, 2_000), (256, 60_000))
    dispatcher = Dispatcher((Plain(ANY), Plain(SQUARES)), table(packed, dense))
    assert chosen(dispatcher, [10, 300, 20, 256, 30]) == {"any": [10, 20, 30], "squares": [300, 256]}
    assert chosen(dispatcher, [10, 20]) == {"any": [10, 20]}
    assert chosen(dispatcher, [300]) == {"squares": [300]}


def test_a_second_kernel_must_earn_its_call():
    one, two = times("any", 0, (1, 100), (100, 100)), times("squares", 200, (1, 60), (100, 60))
    dispatcher = Dispatcher((Plain(ANY), Plain(SQUARES)), table(one, two))
    assert chosen(dispatcher, [50] * 4) == {"any": [50] * 4}
    assert chosen(dispatcher, [50] * 5) == {"any": [50] * 5}, "a tie goes to the first"
    assert chosen(dispatcher, [50] * 6) == {"squares": [50] * 6}


def test_one_kernel_for_everything_is_used_as_it_is():
    dispatcher = Dispatcher((Reference(), Plain(SQUARES)))
    assert isinstance(dispatcher.prepare(Segments.packed([3, 4]), SHAPE), PreparedReference)
    assert isinstance(dispatcher.prepare(Segments.of([]), SHAPE), PreparedReference)


def test_without_measurements_the_order_and_the_least_length_decide():
    kernels = (Plain(SQUARES), Plain(ANY))
    assert chosen(Dispatcher(kernels, min_lengths={"squares": 8}), [8, 3, 9]) == {"squares": [8, 9], "any": [3]}
    assert chosen(Dispatcher(kernels), [8, 3]) == {"squares": [8, 3]}
    alone = Dispatcher((Plain(SQUARES),), min_lengths={"squares": 8})
    assert chosen(alone, [8, 3]) == {"squares": [8, 3]}, "better than nobody"
    prepared = Dispatcher(kernels, min_lengths={"squares": 8}).prepare(Segments.packed([8, 3, 9]), SHAPE)
    assert isinstance(prepared, PreparedSplit)


def test_what_no_measured_kernel_takes_goes_to_another():
    dispatcher = Dispatcher((Plain(ANY), Plain(SQUARES)), table(times("squares", 0, (1, 1))))
    segments = Segments.of([(0, 4, 0, 4, 0), (4, 6, 4, 9, 2)])
    rows = dispatcher.explain(segments, SHAPE)
    assert [(row["pass"], row["kernel"], row["segments"]) for row in rows] == [
        (name, kernel, 1) for name in ("forward", "backward") for kernel in ("squares", "any")
    ]
    assert rows[1]["why"] == "no measured kernel takes it"


def test_a_table_of_another_device_or_dtype_is_not_used():
    measured = table(times("squares", 0, (1, 1)))
    dispatcher = Dispatcher((Plain(ANY), Plain(SQUARES)), measured)
    other = replace(SHAPE, dtype=torch.float32)
    assert dispatcher.explain(Segments.packed([4]), SHAPE)[0]["kernel"] == "squares"
    assert dispatcher.explain(Segments.packed([4]), other)[0]["kernel"] == "any"


def test_forward_and_backward_are_chosen_apart():
    quick_there = KernelTimes("any", 0, 0, (TimePoint(1, 10, 99),), (TimePoint(1, 10, 99),))
    quick_back = KernelTimes("squares", 0, 0, (TimePoint(1, 99, 10),), (TimePoint(1, 99, 10),))
    dispatcher = Dispatcher((Plain(ANY), Plain(SQUARES)), table(quick_there, quick_back))
    rows = dispatcher.explain(Segments.packed([4, 5]), SHAPE)
    assert [(row["pass"], row["kernel"]) for row in rows] == [("forward", "any"), ("backward", "squares")]
    assert isinstance(dispatcher.prepare(Segments.packed([4, 5]), SHAPE), PreparedSplit)


def test_copies_of_a_split_are_paid_for():
    """Short documents between long ones: the kernel of the long ones would gather their rows, if they are not first."""
    long, short = times("squares", 0, (1, 800), (64, 1_000)), times("any", 0, (1, 0), (64, 2_000))
    row = 2 * SHAPE.dim * SHAPE.dtype.itemsize * (2 * SHAPE.heads + 2 * SHAPE.kv_heads)  # q, k, v; out
    for copies, gb_s, alone in ((False, 1.0, False), (True, 1.0, True), (True, 2 * 128 * row / 1_600, False)):
        measured = replace(table(long, short).measurements[0], copy_gb_s=gb_s)
        kernels = (Plain(replace(SQUARES, copies=copies)), Plain(ANY))
        dispatcher = Dispatcher(kernels, KernelTable((measured,)))
        split = {"squares": [64, 64], "any": [1, 1]}
        assert chosen(dispatcher, [64, 1, 64, 1]) == ({"squares": [64, 1, 64, 1]} if alone else split)
        [first, *_] = dispatcher.choose(Segments.packed([64, 1, 64, 1]), SHAPE)
        copied = 128 * row / gb_s if copies and not alone else 0
        assert first.predicted_ns == (3_600 if alone else round(2_000 + copied))


def test_rows_in_one_run_are_not_gathered():
    kernel, point = replace(SQUARES, copies=True), (TimePoint(64, 0, 0),)
    split = Split(
        ((Plain(kernel), KernelTimes("squares", 0, 0, point, point)),), Segments.packed([8, 3, 5]), SHAPE, 1.0, False
    )
    q, kv = SHAPE.heads * SHAPE.dim * 8, 2 * SHAPE.kv_heads * SHAPE.dim * 8
    for backward, inputs, results in ((False, q + kv, q), (True, 3 * q + kv, q + kv)):
        found = [
            replace(split, backward=backward)._copied_bytes(np.array(chosen))
            for chosen in ([True, True, True], [True, True, False], [False, True, True], [True, False, True])
        ]
        assert found == [0, 2 * 11 * results, 2 * 8 * results, 2 * 13 * (inputs + results)]


def test_a_window_that_hides_nothing_is_dropped():
    parts = Dispatcher((Plain(SQUARES),)).choose(Segments.packed([3, 1], window=20), SHAPE)
    assert [(part.segments.q_len.tolist(), part.segments.window) for part in parts] == [([3, 1], None)]


def test_all_refusals_are_listed():
    dispatcher = Dispatcher((Plain(SQUARES), Plain(replace(ANY, dtypes=(torch.float32,)))))
    with pytest.raises(SeqloomError) as error:
        dispatcher.prepare(Segments.packed([9, 20], window=10), SHAPE)
    first, *reasons = str(error.value).splitlines()
    assert first == "no kernel can run this attention:"
    assert reasons == [
        "  squares: window 10 over 20 keys; it takes no window",
        "  any: dtype float64; it takes float32",
    ]
    assert dispatcher.capabilities.unsupported(Segments.packed([9, 20], window=10), SHAPE) == str(error.value)
    assert dispatcher.capabilities.unsupported(Segments.packed([9, 20]), SHAPE) is None


def test_nobody_for_the_shape_is_refused_even_with_nothing_to_do():
    with pytest.raises(SeqloomError, match="head dim 200"):
        Dispatcher((Plain(replace(ANY, max_dim=128)),)).prepare(Segments.of([]), replace(SHAPE, dim=200))


def test_an_explanation_is_rows_for_people_and_json():
    packed, dense = times("any", 2_000, (1, 1_000)), times("squares", 500, (1, 9_000))
    dispatcher = Dispatcher((Plain(ANY), Plain(SQUARES)), table(packed, dense))
    row, back = json.loads(json.dumps(dispatcher.explain(Segments.packed([1, 1]), SHAPE)))
    assert back["pass"] == "backward"
    assert row == {
        "pass": "forward",
        "kernel": "any",
        "segments": 2,
        "tokens": 2,
        "shortest": 1,
        "longest": 1,
        "predicted_us": 4.0,
        "why": "least predicted total, 4 us; alone: any 4 us, squares 18 us",
    }
    nothing, _ = dispatcher.explain(Segments.of([]), SHAPE)
    assert (nothing["segments"], nothing["longest"], nothing["why"]) == (0, 0, "nothing to do")


def test_the_same_choice_every_time():
    draws = np.random.default_rng(3).integers(1, 400, 200).tolist()
    measured = table(times("any", 5, (1, 10), (400, 999)), times("squares", 7, (1, 90), (400, 600)))
    choices = [chosen(Dispatcher((Plain(ANY), Plain(SQUARES)), measured), draws) for _ in range(2)]
    assert choices[0] == choices[1] and len(choices[0]) == 2


@dataclass
class Building(Plain):
    """The same, with a build that says whose it is."""

    def builds(self, shape, use):
        return [lambda: self.capabilities.name]


@pytest.mark.parametrize(
    ("measured", "built"),
    [
        ([], ["squares", "any"]),  # by preference: nothing is left for those after the one that takes all
        (["any"], ["any"]),
        (["late"], ["late"]),
        (["squares"], ["squares", "any"]),
        (["prefixes"], ["squares", "any", "prefixes"]),
    ],
)
def test_only_what_may_be_chosen_is_built(measured, built):
    late = replace(ANY, name="late")
    kernels = tuple(Building(capabilities) for capabilities in (SQUARES, ANY, PREFIXES, late))
    point = (TimePoint(1, 1, 1),)
    times = tuple(KernelTimes(name, 0, 0, point, point) for name in measured)
    table = KernelTable((Measurement(device_name(CPU), torch.__version__, 4, 2, 8, "float64", times),) if times else ())
    builds = Dispatcher(kernels, table).builds(SHAPE, KernelUse(100))
    assert [build() for build in builds] == built
