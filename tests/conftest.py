"""Settings for all tests. `make test` repeats exactly; `make test-full` draws more, and new, examples."""

import pytest
from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "test",
    derandomize=True,
    max_examples=50,
    deadline=None,
    database=None,
    suppress_health_check=_SLOW_MACHINE,
)
settings.register_profile("full", max_examples=500, deadline=None, print_blob=True, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("test")  # the option --hypothesis-profile comes later and wins


@pytest.fixture(scope="session")
def gloo_pool():
    """Eight gloo processes that stay for the session: `gloo_pool.run(body, *args, ranks=4)`.

    Under xdist every worker that needs a pool has one. With --dist worksteal that is usually the first alone, since
    tests/distributed is collected first.
    """
    from seqloom.testing.workers import Workers  # imports torch, which other tests do not pay for

    with Workers(8) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that use the pool, before `-m` is read."""
    for item in items:
        if "gloo_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.distributed)
