"""Tests over NCCL: 2, 4 and 8 ranks that share one GPU. `make test-gpu` runs them.

Without a GPU they skip; with `--on-cpu` they run on gloo processes instead, which shows that the tests are right.
"""

import pytest
import torch


@pytest.fixture(scope="session")
def device(request):
    """Where models and tensors of these tests are."""
    if request.config.getoption("--on-cpu"):
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return "cuda"


@pytest.fixture(scope="session")
def nccl_pool(device, fork_server):
    """Eight processes on one GPU: `nccl_pool.run(body, *args, ranks=4)`."""
    from support.workers import Workers

    with Workers(8, timeout_s=120, on_gpu=device == "cuda") as pool:
        yield pool


LONG = ("test_train_nccl.py", "test_verify_nccl.py")


def pytest_collection_modifyitems(items):
    """Mark all tests of this folder; whole runs come first, so that the others fill the time beside them."""
    for item in items:
        if "nccl" in item.path.parts:
            item.add_marker(pytest.mark.nccl)
    items.sort(key=lambda item: item.path.name not in LONG)
