"""Measured times: read off, scaled, found, written and read again."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.attention.kernels import dispatch
from seqloom.attention.kernels.dispatch import (
    KernelTable,
    KernelTimes,
    Measurement,
    TimePoint,
    built_in_table,
    default_table_path,
    device_name,
)
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError

CPU = torch.device("cpu")
CURVE = (TimePoint(64, 1_000, 3_000), TimePoint(256, 10_000, 30_000))
TIMES = KernelTimes("one", 500, 900, CURVE, (TimePoint(64, 2_000, 6_000), TimePoint(256, 20_000, 60_000)))


def both(segments: Segments) -> np.ndarray:
    """Forward and backward together."""
    return TIMES.predict_ns(segments, False) + TIMES.predict_ns(segments, True)


MEASUREMENT = Measurement(device_name(CPU), torch.__version__, 8, 2, 64, "bfloat16", (TIMES,))


def shape(heads: int = 8, kv_heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, dtype, CPU, 1.0)


def predicted(lengths: list[int], **mask) -> list[int]:
    return both(Segments.packed(lengths, **mask)).tolist()


def test_measured_lengths_are_read_off_as_measured():
    assert predicted([64, 256]) == [4_000, 40_000]
    assert predicted([64, 256], causal=False) == [8_000, 80_000]


def test_shorter_costs_as_the_shortest_and_longer_in_proportion():
    assert predicted([1, 10]) == [4_000, 4_000]
    assert predicted([1024], causal=False) == [16 * 80_000]


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=9).map(sorted))
def test_longer_never_costs_less(lengths):
    assert predicted(lengths) == sorted(predicted(lengths))


def test_tiles_and_windows_cost_what_they_compute():
    square = Segments.packed([128], causal=False)
    tile = Segments.of([(0, 64, 0, 256, 0)], causal=False)
    assert both(square).tolist() == both(tile).tolist()
    windowed = both(Segments.packed([4096], window=64)).item()
    assert windowed < both(Segments.packed([1024])).item()


def test_other_heads_are_scaled():
    [scaled] = MEASUREMENT.scaled(16)
    assert scaled.causal[0] == TimePoint(64, 2_000, 6_000)
    assert scaled.call_ns(True) == TIMES.call_ns(True)


def test_the_nearest_head_counts_are_found():
    of_heads = {
        (heads, kv): replace(MEASUREMENT, heads=heads, kv_heads=kv) for heads, kv in ((8, 2), (32, 32), (64, 8))
    }
    table = KernelTable(tuple(of_heads.values()))
    assert table.find(shape(16, 4)) == of_heads[8, 2]
    assert table.find(shape(4, 4)) == of_heads[32, 32]
    assert table.find(shape(64, 8)) == of_heads[64, 8]


@pytest.mark.parametrize(
    "other",
    [
        replace(MEASUREMENT, device="another"),
        replace(MEASUREMENT, dim=128),
        replace(MEASUREMENT, dtype="float16"),
    ],
)
def test_measurements_of_something_else_are_not(other):
    assert KernelTable((other,)).find(shape()) is None


def test_this_release_of_torch_is_preferred_to_nearer_heads():
    release = ".".join(torch.__version__.split(".")[:2])
    old, here = replace(MEASUREMENT, torch="1.0.0"), replace(MEASUREMENT, torch=f"{release}.99+other", heads=64)
    assert KernelTable((old, here)).find(shape()) == here
    assert KernelTable((old,)).find(shape()) == old, "better than none"


def test_merging_keeps_the_own_measurement():
    other, newer = replace(MEASUREMENT, heads=4), replace(MEASUREMENT, times=())
    assert KernelTable((newer,)).merged(KernelTable((MEASUREMENT, other))).measurements == (newer, other)


def test_the_tables_of_the_package_are_whole():
    measured = built_in_table().measurements
    assert ("NVIDIA H200", 32, 32, 128) in {(one.device, one.heads, one.kv_heads, one.dim) for one in measured}
    for one in measured:
        by_length = {times.kernel: {point.length: point for point in times.causal} for times in one.times}
        assert by_length["fa4"][4096].forward_ns < by_length["triton"][4096].forward_ns
        assert by_length["triton"][64].backward_ns < by_length["fa4"][64].backward_ns


def test_a_new_measurement_takes_the_place_of_the_old():
    other, newer = replace(MEASUREMENT, heads=4), replace(MEASUREMENT, times=())
    table = KernelTable((MEASUREMENT, other)).adding(newer)
    assert table.measurements == (other, newer)


def test_a_table_is_written_and_read_again(tmp_path):
    table = KernelTable((MEASUREMENT, replace(MEASUREMENT, heads=4)))
    path = tmp_path / "new" / "kernels.json"
    table.save(path)
    assert KernelTable.load(path) == table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format=9), "format 9, not 1"),
        (lambda content: content.pop("measurements"), "'measurements'"),
        (lambda content: content["measurements"][0].pop("heads"), "'heads'"),
        (lambda content: content["measurements"][0].update(heads=0), "0 heads"),
        (lambda content: content["measurements"][0].update(times=7), "not iterable"),
        (lambda content: content["measurements"][0]["times"][0].update(causal=[]), "causal lengths []"),
        (lambda content: content["measurements"][0]["times"][0].update(causal=[[64, 1]]), "backward_ns"),
        (lambda content: content["measurements"][0]["times"][0].update(full=[[9, 1, 1], [3, 1, 1]]), "[9, 3]"),
        (lambda content: content["measurements"][0]["times"][0].update(backward_call_ns=-1), "below 0 ns"),
    ],
)
def test_a_broken_table_is_refused_with_its_path(tmp_path, change, message):
    path = tmp_path / "kernels.json"
    KernelTable((MEASUREMENT,)).save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(SeqloomError) as error:
        KernelTable.load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value) and "run seqloom profile again" in str(error.value)


@pytest.mark.parametrize(
    ("system", "folder"),
    [("linux", ".cache"), ("darwin", "Library/Caches"), ("win32", "AppData/Local")],
)
def test_the_table_lives_in_the_cache_of_the_user(monkeypatch, tmp_path, system, folder):
    monkeypatch.setattr(dispatch.sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    assert default_table_path() == tmp_path / folder / "seqloom" / "kernels.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert (default_table_path().parent.parent == tmp_path / "mine") == (system == "linux")
