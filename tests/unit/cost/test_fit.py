"""Fitting gives back the constants that made the measurements."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import Profile
from seqloom.cost.calibrate import fit_additive, fit_curve, fit_link
from seqloom.errors import SeqloomError


def test_additive_constants_come_back():
    rng = np.random.default_rng(0)
    packs = [rng.integers(10, 20000, size=count).tolist() for count in range(1, 12)]
    times = [sum(5e-6 * s * s + 0.18 * s for s in pack) + 600 for pack in packs]
    fit = fit_additive(packs, times)
    assert fit[:3] == pytest.approx((5e-6, 0.18, 600)) and fit.worst_error < 1e-9


def test_constants_are_never_negative():
    fit = fit_additive([[100], [200], [300], [400]], [1.0, 2.05, 3.1, 4.2])
    assert min(fit) >= 0 and fit.linear_ms == pytest.approx(0.01, rel=0.1)


def test_link_comes_back():
    sizes = [2**power for power in range(10, 30)]
    fit = fit_link(sizes, [15 + size / 330e3 for size in sizes])
    assert fit.latency_us == pytest.approx(15) and fit.gb_s == pytest.approx(330)


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


@pytest.mark.parametrize(("sizes", "times"), [([1], [1.0]), ([1, 2], [0.0, 1.0]), ([1, 2], [1.0, 2.0, 3.0])])
def test_too_little_to_fit(sizes, times):
    with pytest.raises(SeqloomError, match="measurements"):
        fit_link(sizes, times)
