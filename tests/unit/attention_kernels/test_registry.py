"""Kernels by name, the dispatcher of a device, the support matrix."""

from pathlib import Path

import pytest
import torch

import seqloom
from seqloom.attention.kernels import dispatch as registry
from seqloom.attention.kernels import support
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.attention.kernels.tables import KernelTable, Measurement, Point, Times, device_name
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError

CPU = torch.device("cpu")
DOCS = Path(seqloom.__file__).parents[2] / "docs" / "attention.md"


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    """No table of this machine, and no dispatcher of an earlier test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "default_path", lambda: tmp_path / "kernels.json")
    registry._default.cache_clear()
    yield
    registry._default.cache_clear()


def test_kernels_are_called_what_they_call_themselves():
    abilities = registry.all_abilities()
    assert {name: ability.name for name, ability in abilities.items()} == dict(zip(abilities, abilities, strict=True))
    assert {name for name, ability in abilities.items() if not ability.tested} == {"flash_attn_2", "flash_attn_3"}


def test_an_unknown_kernel_offers_the_nearest():
    with pytest.raises(SeqloomError, match="did you mean varlen"):
        registry.make_kernel("varlan")


def test_on_a_cpu_flash_runs_and_the_reference_stands_behind():
    dispatcher = registry.default("cpu")
    assert [kernel.ability.name for kernel in dispatcher.kernels] == ["cpu_flash", "reference"]
    assert registry.missing(CPU) == {}
    shape = AttentionShape(4, 2, 8, torch.bfloat16, CPU, 1.0)
    for row in dispatcher.explain(Segments.packed([5, 3]), shape):
        assert (row["kernel"], row["why"]) == ("cpu_flash", "first that takes it; not measured here")


def test_the_dispatcher_of_a_device_is_made_once():
    assert registry.default("cpu") is registry.default(CPU)


def test_a_measured_table_is_used_from_its_place_or_from_a_path(tmp_path):
    curve = (Point(1, 1, 1),)
    times = (Times("reference", 0, 0, curve, curve), Times("cpu_flash", 10, 0, curve, curve))
    table = KernelTable((Measurement(device_name(CPU), torch.__version__, 4, 2, 8, "bfloat16", times),))
    shape = AttentionShape(4, 2, 8, torch.bfloat16, CPU, 1.0)
    table.save(tmp_path / "other.json")
    dispatcher = registry.default("cpu", tmp_path / "other.json")
    assert dispatcher.explain(Segments.packed([5]), shape)[0]["kernel"] == "reference"
    assert registry.default("cpu").explain(Segments.packed([5]), shape)[0]["kernel"] == "cpu_flash"
    registry._default.cache_clear()
    table.save(tmp_path / "kernels.json")
    assert registry.default("cpu").explain(Segments.packed([5]), shape)[0]["kernel"] == "reference"
    with pytest.raises(SeqloomError, match="does not exist"):
        registry.default("cpu", tmp_path / "none.json")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_on_a_gpu_what_is_missing_is_named(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    monkeypatch.setattr(registry, "installed", lambda name: True)
    absent = registry.missing(torch.device("cuda"))
    assert absent["triton"] == "package triton is not installed"
    assert ("varlen" in absent) == ("flash_attn_2" in absent) == (capability < (8, 0))
    assert ("flash_attn_3" in absent) == (capability[0] != 9)
    names = [kernel.ability.name for kernel in registry.available(torch.device("cuda"))]
    assert names[-1] == "reference" and not set(names) & set(absent)
    monkeypatch.setattr(registry, "installed", lambda name: False)
    assert registry.missing(torch.device("cuda"))["flash_attn_3"] == "package flash_attn_interface is not installed"


def cells() -> dict[str, dict[str, str]]:
    head, _, *lines = support.support_matrix().splitlines()
    names = [cell.strip() for cell in head.split("|")[2:-1]]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in rows}


def test_the_matrix_says_what_abilities_say():
    matrix = cells()
    assert list(matrix["CPU"]) == [*registry.ENTRIES, "engine"]
    assert {name for name, cell in matrix["CPU"].items() if cell == "supported"} == {"cpu_flash", "reference", "engine"}
    assert matrix["sliding window"]["cudnn"] == "refused"
    assert matrix["causal, packed documents"]["flash_attn_2"] == "untested"
    assert matrix["float64"]["varlen"] == "refused"
    assert set(matrix["dropout"].values()) == {"refused"}
    assert {cell for row in matrix.values() for cell in row.values()} == {"supported", "refused", "untested"}


@pytest.mark.skipif(not DOCS.is_file(), reason="the page is not in this installation")
def test_the_page_shows_the_matrix_as_it_is():
    assert support.support_matrix() in DOCS.read_text(encoding="utf-8")
