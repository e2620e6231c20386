"""Throughput curves from measured kernel times."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import Profile
from seqloom.cost.calibrate import fit_curve
from seqloom.errors import SeqloomError


def test_curve_from_times():
    curve = fit_curve([1024, 2048, 4096], [100, 90, 400], [250, 500, 1000], heads=32, head_dim=128)
    assert curve.forward[0] == pytest.approx(2 * 1024**2 * 4096 / 100 / 1e6)
    assert curve.forward[1] == pytest.approx(3 * curve.forward[0])  # the faster time was noise: 4/3 of the shorter's
    assert curve.backward[0] == pytest.approx(curve.forward[0])


@pytest.mark.parametrize("seed", range(10))
def test_a_curve_from_noise_is_legal(tmp_path, seed):
    rng = np.random.default_rng(seed)
    times = [rng.uniform(1, 100, size=5).tolist() for _ in range(2)]
    curve = fit_curve([16, 64, 100, 1024, 4096], *times, heads=4, head_dim=32)
    profile = replace(Profile.load("cpu"), attention=curve, tile=curve)
    profile.save(tmp_path / "noise.json")
    assert Profile.load(tmp_path / "noise.json").attention == curve


@pytest.mark.parametrize(("lengths", "times"), [([2, 1], [1.0, 1.0]), ([1, 2], [0.0, 1.0]), ([1, 2], [1.0])])
def test_times_that_make_no_curve(lengths, times):
    with pytest.raises(SeqloomError, match="a curve needs"):
        fit_curve(lengths, times, times, heads=1, head_dim=1)
