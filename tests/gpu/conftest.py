"""Tests of kernels on a GPU. Libraries that compile there warn of each other's deprecated parts, which is not ours."""

from pathlib import Path

import pytest

LONG = {
    "test_any_segments",
    "test_values_and_sums_are_there_when_the_stream_has_waited",
    "test_the_engine_is_one_process",
}


def pytest_collection_modifyitems(items):
    """Let such warnings pass in this folder; its tests of minutes come first, the others fill the time beside them."""
    here = {item for item in items if Path(__file__).parent in item.path.parents}
    for item in here:
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
    items.sort(key=lambda item: item not in here or getattr(item, "originalname", "") not in LONG)
