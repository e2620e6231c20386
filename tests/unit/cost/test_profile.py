"""Profile files: everything shipped loads, everything odd is refused with a reason."""

import json
from dataclasses import replace
from importlib import resources

import pytest

from seqloom.cost import Profile
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
