"""A run whose batches are packed ahead."""

from pathlib import Path

import numpy as np
import pytest

from seqloom.errors import SeqloomError
from seqloom.profiling.check import outlook
from seqloom.train.config import Config
from seqloom.train.setup import Setup

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml"


def config(tmp_path, *settings):
    few = [
        "data.source=toy:60",
        "data.sequences=",
        "data.tokens=4096",
        "data.batches=hbp",
        "run.steps=",
        "run.epochs=2",
    ]
    return Config.load(RECIPE, [*few, f"run.output={tmp_path / 'run'}", *settings])


def test_batches_are_those_of_the_packing_every_epoch_anew(tmp_path):
    setup = Setup.of(config(tmp_path), 4)
    epochs = []
    for epoch in range(2):
        batches = []
        while setup.sampler.epoch == epoch:
            batches.append(setup.sampler.next_batch())
        documents = np.concatenate([batch.documents for batch in batches])
        assert np.sort(documents).tolist() == list(range(len(setup.source.lengths)))
        assert max(batch.tokens for batch in batches) <= 4096
        epochs.append([tuple(batch.documents.tolist()) for batch in batches])
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert setup.steps == len(epochs[0]) + len(epochs[1])
    shuffled = Setup.of(config(tmp_path, "data.batches=shuffled"), 4).sampler
    assert {tuple(batch.documents.tolist()) for batch in shuffled.peek(3)}.isdisjoint(epochs[0])


def test_evaluation_is_never_packed_and_check_counts_the_batches_of_the_run(tmp_path):
    given = config(tmp_path, "data.validation=toy:24:1")
    _, batches = Setup.of(given, 4).validation()
    plain = Setup.of(config(tmp_path, "data.validation=toy:24:1", "data.batches=shuffled"), 4)
    assert batches == plain.validation()[1]
    run = outlook(given, 4)
    assert run.steps == Setup.of(given, 4).steps and list(run.sample) == Setup.of(given, 4).sampler.peek(
        len(run.sample)
    )


def test_a_state_of_another_machine_is_refused_and_documents_are_no_limit(tmp_path):
    state = Setup.of(config(tmp_path), 4).sampler.state_dict()
    with pytest.raises(SeqloomError, match="of other batches"):
        Setup.of(config(tmp_path, "data.tokens=2048"), 2).sampler.load_state_dict(state)
    with pytest.raises(SeqloomError, match="give tokens instead of sequences"):
        config(tmp_path, "data.tokens=", "data.sequences=8")
