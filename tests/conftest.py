"""Settings for all tests. `make test` repeats exactly; `make test-full` draws more, and new, examples."""

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
