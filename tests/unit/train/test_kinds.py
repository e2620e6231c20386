"""Models of a run, of which a rank builds what it runs."""

from pathlib import Path

import pytest
import torch

from seqloom.integrations.training import build_huggingface
from seqloom.plan import Part
from seqloom.runtime.placement import held_by
from seqloom.testing.tiny_models import tiny_model
from seqloom.train.config import Config
from seqloom.train.kinds import build_reference

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml"
CPU = torch.device("cpu")


@pytest.fixture
def kinds(tmp_path):
    """Both kinds of models, and configs for them."""
    tiny_model("qwen3", num_hidden_layers=4).save_pretrained(tmp_path)
    theirs = tmp_path / "recipe.toml"
    theirs.write_text(RECIPE.read_text().replace('spec = "models/tiny.toml" ', 'huggingface = "."'))
    return [(build_reference, Config.load(RECIPE)), (build_huggingface, Config.load(theirs))]


@pytest.mark.parametrize("first", [0, 1])
def test_only_parts_have_values_and_they_are_those_of_the_whole(kinds, first):
    for build, config in kinds:
        parts = [Part(first, first + 1, 4), Part(3, 4, 4)]
        whole = build(config, CPU, torch.float64)
        found = build(config, CPU, torch.float64, parts=parts)
        wanted, own = held_by(whole, parts), dict(found.module.named_parameters())
        assert list(own) == [name for name, _ in whole.module.named_parameters()]
        assert {name for name, each in own.items() if not each.is_meta} == wanted.keys() < own.keys()
        assert all(torch.equal(own[name], each) for name, each in wanted.items())
        assert all(not each.is_meta for each in found.module.buffers())
