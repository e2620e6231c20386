"""A short set of the cases of `make fuzz`, with seeds of its own."""

import warnings

import pytest

from fuzz.readers import readers
from fuzz.run import run_case

CASES = 60


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves without other ranks
        return {reader.name: reader for reader in readers(tmp_path_factory.mktemp("valid"))}


NAMES = (
    *("lengths", "configs", "plans", "profiles", "clusters", "models", "schedules", "strategies", "stores", "megatron"),
    *("safetensors", "checkpoints", "dumps", "metrics", "kernel tables", "records"),
)


def test_all_readers_are_here(made):
    assert {*made} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_valid_files_are_read(made, tmp_path, name):
    reader = made[name]
    for number, files in enumerate(reader.seeds):
        for path in tmp_path.iterdir():
            if path.is_file():
                path.unlink()
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        reader.read(tmp_path, number)


@pytest.mark.parametrize("name", NAMES)
def test_changed_files_are_read_or_refused_in_words(made, tmp_path, name):
    failures = [(seed, why) for seed in range(10**6, 10**6 + CASES) if (why := run_case(made[name], seed, tmp_path))]
    assert not failures, failures[0]
