"""A loop with accelerate under plans, on gloo processes, gives what its plain run in one process gives."""

import pytest

from support.scripts import run_function
from support.tiny_models import tiny_model
from support.trainer_runs import accelerate_loop, assert_alike

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_ranks_equal_one_process(sharding, tmp_path, fork_server):
    wanted = run_function(accelerate_loop, 1, tmp_path, tmp_path, False)[0]
    for found in run_function(accelerate_loop, 2, tmp_path, tmp_path, True, sharding):
        assert_alike(found, wanted)


@pytest.mark.slow
def test_a_saved_state_goes_on_in_one_process(tmp_path, fork_server):
    whole = run_function(accelerate_loop, 2, tmp_path, tmp_path, True)[0]
    losses, trained, norms = run_function(accelerate_loop, 1, tmp_path, tmp_path, True, "none", True)[0]
    assert_alike((losses, trained, norms), (whole[0][2:], whole[1], whole[2][2:]))


def test_mixed_precision_is_refused():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from seqloom.errors import SeqloomError
    from seqloom.integrations.transformers.planned_steps import PlannedSteps

    AcceleratorState._reset_state(reset_partial_state=True)
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(tiny_model("llama"), evaluation_mode=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(SeqloomError, match="mixed precision"):
        PlannedSteps(model)
