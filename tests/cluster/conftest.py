"""Two nodes of four ranks with four nics each, and a gloo process for every rank, for all tests of this folder."""

import pytest

from support.hosts import Hosts, why_not

FIGURES = pytest.StashKey()


@pytest.fixture(scope="session")
def hosts():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(nodes=2, ranks=4, nics=4, rate_mbit=50) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def pool(hosts):
    """`pool.run(body, *args)`: the body on all eight ranks."""
    from support.workers import Workers  # imports torch: not where all is skipped

    with Workers(8, enter=hosts.enter_namespace) as pool:
        yield pool


@pytest.fixture(scope="session")
def figures(request):
    """What tests measured, by name: times as fast. Shown at the end."""
    return request.config.stash.setdefault(FIGURES, {})


def pytest_terminal_summary(terminalreporter, config):
    figures = config.stash.get(FIGURES, {})
    if figures:
        terminalreporter.section("times as fast as without routing")
    for name, ratio in figures.items():
        terminalreporter.write_line(f"{ratio:6.2f}  {name}")
