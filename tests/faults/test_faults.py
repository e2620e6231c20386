"""A short campaign of faults; `make test-faults` meets many more."""

import random
from pathlib import Path

import pytest

from faults.campaign import FAULTS, Campaign, compare, losses

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]
KINDS = ("rank killed", "SIGTERM to a rank", "launcher killed", "planner killed", "bit of a checkpoint flipped")


@pytest.mark.timeout(600)
def test_a_run_that_meets_faults_ends_as_one_that_meets_none(tmp_path):
    campaign = Campaign(tmp_path, random.Random(7), ranks=(2, 3))
    whole = campaign.undisturbed()
    for name in KINDS:
        campaign.start(next(fault for fault in FAULTS if fault.name == name))
    campaign.run([fault for fault in FAULTS if fault.name in KINDS])
    compare(losses(tmp_path / "run"), whole, torn=False)
    assert {*KINDS} <= {*campaign.injected}
