"""Profile files: everything shipped loads, everything odd is refused with a reason."""

import json
from dataclasses import replace
from importlib import resources

import pytest

from seqloom.cost import Profile
from seqloom.describe.cluster import DEVICES, is_device
from seqloom.errors import SeqloomError


def shipped(name):
    return json.loads((resources.files("seqloom.cost") / "profiles" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", Profile.names())
def test_shipped_profiles_load_and_say_where_numbers_come_from(name):
    profile = Profile.load(name)
    assert profile.name == name
    assert profile.sources and all(profile.sources.values())


def test_path_and_name_are_the_same(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(shipped("h200")))
    assert Profile.load(path) == Profile.load(str(path)) == Profile.load("h200")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul_tflop": 1}, "did you mean matmul_tflops"),
        ({"matmul_tflops": 0}, "above 0"),
        ({"matmul_tflops": "fast"}, "finite number"),
        ({"matmul_tflops": float("nan")}, "finite number"),
        ({"kind": "guess"}, "additive, analytic"),
        ({"intra": {}}, "lacks the key 'all_to_all'"),
        ({"intra": 3}, "JSON object"),
        ({"head_chunk": 1.5}, "whole number"),
        ({"overlap": 1.5}, "from 0 to 1"),
        ({"step_us": -1}, "0 or more"),
        ({"attention": {"lengths": [2, 1], "forward": [1, 1], "backward": [1, 1]}}, "ascend"),
        ({"attention": {"lengths": [1, 2], "forward": [1, 9], "backward": [1, 1]}}, "less time"),
        ({"attention": {"lengths": [1], "forward": [1, 9], "backward": [1]}}, "equally long"),
    ],
)
def test_refusals(tmp_path, change, message):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(shipped("h200") | change))
    with pytest.raises(SeqloomError, match=message):
        Profile.load(path)


def test_an_estimate_is_another_profile_times_two_factors(tmp_path):
    base, here = Profile.load("h100"), Profile.load("h20")
    assert here.devices == ("H20",) and here.memory_efficiency == base.memory_efficiency
    assert here.matmul_tflops == pytest.approx(0.22 * base.matmul_tflops) and here.matmul_tflops < 148
    assert here.attention.forward == pytest.approx([0.22 * rate for rate in base.attention.forward])
    assert here.prefix_us == pytest.approx(base.prefix_us / 1.19) and here.float8_speedup == 1.8
    assert here.sources["attention"] == "estimate: 0.22 times that of h100" and "148" in here.sources["matmul_tflops"]
    here.save(tmp_path / "saved.json")
    assert Profile.load(tmp_path / "saved.json") == here


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"like": "h1000"}, "unknown profile 'h1000'; did you mean"),
        ({"like": "flexsp-a100"}, "published constants"),
        ({"compute": 0}, "compute is 0; expected a finite number, above 0"),
        ({"memori": 1}, "unknown key 'memori'; did you mean memory"),
        ({"sources": 3}, "give a JSON object"),
    ],
)
def test_odd_estimates_are_refused(tmp_path, change, message):
    (tmp_path / "odd.json").write_text(json.dumps(shipped("h20") | change))
    with pytest.raises(SeqloomError, match=message):
        Profile.load(tmp_path / "odd.json")


@pytest.mark.parametrize("device", list(DEVICES))
def test_every_device_has_a_profile_whose_kernels_stay_below_its_peak(device):
    preset, profile = DEVICES[device], Profile.for_device(device)
    assert profile.matmul_tflops < preset.device.peak_tflops
    assert max(*profile.attention.forward, *profile.tile.forward) < preset.device.peak_tflops
    assert preset.source


@pytest.mark.parametrize(
    ("device", "profile"),
    [("H20", "h20"), ("H200", "h200"), ("L4", "l4"), ("L40S", "l40s"), ("A10", "a10"), ("A100-80G", "a100")],
)
def test_a_device_is_not_taken_for_one_whose_name_begins_alike(device, profile):
    assert Profile.for_device(device).name == profile


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_what_a_driver_calls_a_device_names_one_of_them(gpu, name):
    assert [known for known in DEVICES if is_device(known, gpu)] == [name]


def test_a_saved_profile_comes_back(tmp_path):
    profile = replace(Profile.load("cpu"), name="mine", document_us=3.5, overlap=0.0)
    profile.save(tmp_path / "mine.json")
    assert Profile.load(tmp_path / "mine.json") == profile


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(SeqloomError, match="does not exist"):
        Profile.load(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(SeqloomError, match="not JSON"):
        Profile.load(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(SeqloomError, match="JSON object"):
        Profile.load(tmp_path / "list.json")
