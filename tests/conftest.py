"""Settings for all tests. `make test` repeats exactly; `make test-full` draws more, and new, examples."""

import gc
import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings

from seqloom.train.fork_server import start_fork_server

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "test",
    derandomize=True,
    max_examples=40,
    deadline=None,
    database=None,
    suppress_health_check=_SLOW_MACHINE,
)
settings.register_profile("full", max_examples=500, deadline=None, print_blob=True, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("test")  # the option --hypothesis-profile comes later and wins


@pytest.fixture(scope="session")
def fork_server():
    """Start the process that forks workers and ranks, so that torch and transformers are loaded once."""
    start_fork_server(
        "seqloom.dist.torch_transport", "seqloom.train.launch", "seqloom.integrations.transformers.loading"
    )


@pytest.fixture(scope="session")
def seqloom_here(fork_server):
    """The command, run by this process: `seqloom_here("train", "config.toml", folder=...)`.

    Its ranks are forks of the session's server, so a run costs no start of Python and torch. What ranks themselves
    write to stderr is not seen; a test of that starts the command as a process.
    """
    from seqloom.cli import main

    def run(*words: str, folder: str | Path | None = None) -> subprocess.CompletedProcess[str]:
        out, err, code = io.StringIO(), io.StringIO(), 0
        called = patch.object(sys, "argv", ["seqloom", *map(str, words)])
        with chdir(folder or os.getcwd()), redirect_stdout(out), redirect_stderr(err), called:
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def gloo_processes(fork_server):
    """Eight gloo processes: see `gloo_pool`.

    Under xdist every worker that needs a pool has one. With --dist worksteal that is usually the first alone, since
    tests/distributed is collected first.
    """
    from support.workers import Workers  # imports torch, which other tests do not pay for

    with Workers(8) as pool:
        yield pool


@pytest.fixture(scope="module")
def gloo_pool(gloo_processes):
    """Eight gloo processes that stay for many modules: `gloo_pool.run(body, *args, ranks=4)`.

    Every process group of a test has threads that live as long as its process, and hundreds of them make all messages
    slow. So a module that leaves many behind is the last one of its processes.
    """
    yield gloo_processes
    if gloo_processes.groups > 64:
        gloo_processes.close()


@pytest.fixture
def live_handles():
    """Opaque handles that are alive. What earlier tests have left to the garbage collector is not among them."""
    from seqloom.models import compile as handles

    gc.collect()
    assert not handles._handles
    return handles._handles


@pytest.fixture(scope="module")
def threads():
    """Ranks that are threads of this process, kept for a module: `threads(4).run(body)`."""
    from seqloom.dist import Ranks

    made = {}

    def of(world):
        if world not in made:
            made[world] = Ranks(world)
        return made[world]

    yield of
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def copied_offloads():
    """Activations of any size are offloaded, and overwritten where a GPU would use their memory again."""
    from support.offloads import copy_on_cpu

    with pytest.MonkeyPatch.context() as patch:
        copy_on_cpu(patch)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_addoption(parser):
    """Let tests of tests/nccl run without a GPU."""
    parser.addoption("--on-cpu", action="store_true", help="run tests/nccl on gloo processes")


def pytest_collection_modifyitems(items):
    """Mark the tests that use the pool, before `-m` is read."""
    for item in items:
        if "gloo_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
