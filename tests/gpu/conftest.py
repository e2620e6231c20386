"""Tests of kernels on a GPU. Libraries that compile there warn of each other's deprecated parts, which is not ours."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Let such warnings pass in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
