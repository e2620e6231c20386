import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from seqloom.attention.kernels.dispatch import KernelTable, KernelTimes, Measurement, TimePoint  # noqa: E402
from seqloom.cli.profile import fastest, timing_settings, winner_ranges  # noqa: E402

torch.set_num_threads(1)
SMALL = "profile --device cpu --heads 2 --kv-heads 1 --dim 8 --quick --max-length 100"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_the_table_is_written_and_reported(run, folder):
    report = run(f"{SMALL} --kernels cpu_flash,reference --output times.json --json").json
    [measurement] = KernelTable.load(folder / "times.json").measurements
    assert (measurement.heads, measurement.kv_heads, measurement.dim, measurement.dtype) == (2, 1, 8, "bfloat16")
    assert [one.kernel for one in measurement.times] == ["cpu_flash", "reference"]
    assert [point.length for point in measurement.times[0].causal] == [64, 100]
    assert all(one.forward_call_ns > 0 for one in measurement.times)
    assert (report["device"], report["torch"], report["output"]) == (
        measurement.device,
        torch.__version__,
        "times.json",
    )
    assert report["times"][0]["full"][1]["forward_ns"] == measurement.times[0].full[1].forward_ns
    assert set(report["fastest"]["causal"]) == {"64", "100"}


def test_text_names_the_fastest_and_the_file(run, cache):
    result = run(SMALL)
    assert result.code == 0 and result.err == ""
    assert "2 heads on 1 of 8, bfloat16" in result.out
    assert result.out.count("fastest: cpu_flash up to 100") == 2
    assert "reference" not in result.out
    assert "kernels.json" in result.out
    assert KernelTable.load(cache / "seqloom" / "kernels.json").measurements


def test_other_measurements_of_a_table_are_kept(run, folder):
    for dtype in ("float32", "float64", "float32"):
        assert run(f"{SMALL} --dtype {dtype} --output times.json").code == 0
    assert [one.dtype for one in KernelTable.load(folder / "times.json").measurements] == ["float64", "float32"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype bfloat61", "did you mean bfloat16"),
        ("--heads 3 --kv-heads 2", "kv heads must divide the heads"),
        ("--dim 0", "head dim 0"),
        ("--max-length 0", "longest document of 0 tokens"),
        ("--device tpu0", "unknown device 'tpu0'"),
        ("--device meta", "no kernel runs on device 'meta'"),
        ("--device cuda:77", "use cpu"),
        ("--kernels cpuflash", "did you mean cpu_flash"),
        ("--kernels varlen", "device cpu; it runs on cuda"),
        ("--kernels ,", "name at least one"),
        ("--output times.txt", "a table file ends in .json"),
        ("--output nowhere/times.json", "'nowhere'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(refused, options, message):
    assert message in refused(f"{SMALL} {options}")


def test_a_broken_table_is_not_overwritten(refused, folder):
    (folder / "times.json").write_text(json.dumps({"format": 1}))
    assert "run seqloom profile again" in refused(f"{SMALL} --output times.json")


def test_without_torch_the_extra_is_named(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "pip install 'seqloom[train]'" in refused(SMALL)


def test_lengths_are_octaves_and_the_longest():
    assert timing_settings(1024, False, "cpu").lengths == (64, 128, 256, 512, 1024)
    assert timing_settings(1000, False, "cpu").lengths == (64, 128, 256, 512, 1000)
    assert timing_settings(1024, True, "cpu").lengths == (64, 256, 1024)
    assert timing_settings(5, False, "cuda").lengths == (5,)
    assert timing_settings(None, False, "cuda").lengths[-1] == 131_072
    assert timing_settings(None, False, "cpu").tokens == 1_024


def test_the_fastest_counts_forward_and_backward():
    one = KernelTimes("one", 0, 0, (TimePoint(1, 5, 5), TimePoint(2, 9, 9)), (TimePoint(1, 1, 1),))
    two = KernelTimes("two", 0, 0, (TimePoint(1, 1, 8), TimePoint(2, 20, 1)), (TimePoint(1, 0, 1),))
    measurement = Measurement("here", "2.13", 1, 1, 8, "float32", (one, two))
    assert fastest(measurement, "causal") == [(1, "two"), (2, "one")]
    assert fastest(measurement, "full") == [(1, "two")]
    assert winner_ranges(fastest(measurement, "causal")) == ["two up to 1", "one up to 2"]
