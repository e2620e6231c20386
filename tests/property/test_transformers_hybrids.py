"""Models with layers that scan, under any groups, rounds and pieces: loss and gradients of plain transformers."""

import copy
import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.plan import Checkpoint, Remap
from support.model_steps import assert_near, run_step, steps, summed
from support.tiny_models import HYBRIDS, documents, gradients, one_by_one, tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of missing kernels
TOLERANCE = {("lfm2", torch.float64): 1e-9, "others": 1e-6, torch.float32: 1e-4}
"""Others than LFM2 compute their norms or decays in float32 also where the model is in float64."""


@pytest.fixture(scope="module")
def plain_scans():
    """Scans token by token, in the place of transformers' own, which round to float32."""
    path = Path(__file__).parents[2] / "docs" / "huggingface_matrix.py"
    spec = importlib.util.spec_from_file_location("huggingface_matrix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.plain_scans


@st.composite
def steps_with_states(draw):
    """Steps in some of whose groups, of whole documents, ranks pass states."""
    lengths, rounds, ranks = draw(steps())
    if len(rounds) > 1:
        return lengths, rounds, ranks
    groups = tuple(replace(group, states=draw(st.booleans())) for group in rounds[0])
    return lengths, [groups], ranks


@pytest.mark.parametrize("name", HYBRIDS)
@settings(max_examples=max(1, settings().max_examples // 8))
@given(
    case=steps_with_states(),
    keep=st.sampled_from([Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL]),
    remap=st.sampled_from([None, *Remap]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_loss_and_gradients_equal_those_of_plain_transformers(plain_scans, name, case, keep, remap, dtype):
    """In float32 the scans are those of transformers, of some heads and with states."""
    lengths, rounds, ranks = case
    model, ids = tiny_model(name, dtype=dtype), documents(lengths)
    plain = copy.deepcopy(model)
    with plain_scans(plain) if dtype == torch.float64 else nullcontext():
        logits = one_by_one(plain, ids)
    wanted = gradients(plain)
    found = run_step(model, ids, rounds, ranks, keep, remap)
    tolerance = TOLERANCE.get((name, dtype)) or TOLERANCE.get(dtype) or TOLERANCE["others"]
    assert_near(found, (summed(logits, ids), wanted), tolerance)
