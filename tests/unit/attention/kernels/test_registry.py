"""Kernels by name, and the dispatcher of a device."""

import pytest
import torch

from seqloom.attention.kernels import dispatch
from seqloom.attention.kernels.dispatch import KernelTable, KernelTimes, Measurement, TimePoint, device_name
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    """No table of this machine, and no dispatcher of an earlier test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "default_table_path", lambda: tmp_path / "kernels.json")
    dispatch._default_dispatcher.cache_clear()
    yield
    dispatch._default_dispatcher.cache_clear()


def test_kernels_are_called_what_they_call_themselves():
    found = {name: entry.make().capabilities for name, entry in dispatch.KERNELS.items()}
    assert all(one.name == name for name, one in found.items())


def test_an_unknown_kernel_offers_the_nearest():
    with pytest.raises(SeqloomError, match="did you mean varlen"):
        dispatch.make_kernel("varlan")


def test_on_a_cpu_flash_runs_and_the_reference_stands_behind():
    dispatcher = dispatch.default_dispatcher("cpu")
    assert [kernel.capabilities.name for kernel in dispatcher.kernels] == ["cpu_flash", "reference"]
    assert dispatch.unavailable_kernels(CPU) == {}
    shape = AttentionShape(4, 2, 8, torch.bfloat16, CPU, 1.0)
    for row in dispatcher.explain(Segments.packed([5, 3]), shape):
        assert (row["kernel"], row["why"]) == ("cpu_flash", "first that takes it; not measured here")


def test_the_dispatcher_of_a_device_is_made_once():
    assert dispatch.default_dispatcher("cpu") is dispatch.default_dispatcher(CPU)


def test_a_measured_table_is_used_from_its_place_or_from_a_path(tmp_path):
    curve = (TimePoint(1, 1, 1),)
    times = (KernelTimes("reference", 0, 0, curve, curve), KernelTimes("cpu_flash", 10, 0, curve, curve))
    table = KernelTable((Measurement(device_name(CPU), torch.__version__, 4, 2, 8, "bfloat16", times),))
    shape = AttentionShape(4, 2, 8, torch.bfloat16, CPU, 1.0)
    table.save(tmp_path / "other.json")
    dispatcher = dispatch.default_dispatcher("cpu", tmp_path / "other.json")
    assert dispatcher.explain(Segments.packed([5]), shape)[0]["kernel"] == "reference"
    assert dispatch.default_dispatcher("cpu").explain(Segments.packed([5]), shape)[0]["kernel"] == "cpu_flash"
    dispatch._default_dispatcher.cache_clear()
    table.save(tmp_path / "kernels.json")
    assert dispatch.default_dispatcher("cpu").explain(Segments.packed([5]), shape)[0]["kernel"] == "reference"
    with pytest.raises(SeqloomError, match="does not exist"):
        dispatch.default_dispatcher("cpu", tmp_path / "none.json")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_on_a_gpu_what_is_missing_is_named(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    absent = dispatch.unavailable_kernels(torch.device("cuda"))
    assert absent["triton"] == "package triton is not installed"
    assert ("varlen" in absent) == (capability < (8, 0))
    assert absent["fa4"] == "package flash-attn-4 is not installed"
    names = [kernel.capabilities.name for kernel in dispatch.available_kernels(torch.device("cuda"))]
    assert names[-1] == "reference" and not set(names) & set(absent)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_fa4_needs_hopper(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    missing = dispatch.unavailable_kernels(torch.device("cuda")).get("fa4")
    assert missing == (None if capability >= (9, 0) else "compute capability 8.0, not 9.0 or more")
