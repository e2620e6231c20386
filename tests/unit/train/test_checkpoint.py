import errno
import json
import os
import pickle
import resource
import threading
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from seqloom.errors import SeqloomError
from seqloom.train.checkpoint import AtomicWriter, Checkpoints
from seqloom.train.config import Optimiser
from seqloom.train.optim import make_optimiser, state_by_name
from seqloom.train.run_folder import (
    MANIFEST,
    METADATA,
    DamagedCheckpointError,
    complete_checkpoints,
    latest_checkpoint,
)
from support.runs import crash_while_saving


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Trainer:
    """A model and its optimiser, whose gradients depend on the step alone."""

    def __init__(self, seed=0, width=4):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(width, 3), nn.LayerNorm(3))
        self.optimiser = make_optimiser(self.parameters, Optimiser(lr=0.1))
        self.done = 0

    @property
    def parameters(self):
        return dict(self.model.named_parameters())

    def step(self, count=1):
        for _ in range(count):
            self.done += 1
            generator = torch.Generator().manual_seed(self.done)
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            self.optimiser.step()

    def state(self):
        return {"model": self.parameters, "optimiser": state_by_name(self.optimiser)}

    def save(self, checkpoints, **extra):
        checkpoints.save(self.done, **self.state(), extra=extra)

    def equals(self, other):
        return all(torch.equal(a, b) for a, b in zip(self.model.parameters(), other.model.parameters(), strict=True))


def steps_in(folder):
    return [step for step, _ in complete_checkpoints(folder)]


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path):
    first = Trainer()
    first.step(3)
    with Checkpoints(tmp_path) as checkpoints:
        first.save(checkpoints, cursor=[1, 20], note="ü")
        first.step()  # in place, while the checkpoint may still be written
    assert checkpoints.latest == latest_checkpoint(tmp_path) == tmp_path / "step-00000003"

    second = Trainer(seed=1)
    second.step()
    with Checkpoints(tmp_path) as checkpoints:
        manifest = checkpoints.load(latest_checkpoint(tmp_path), **second.state())
    assert (manifest.step, manifest.extra["cursor"], manifest.extra["note"]) == (3, [1, 20], "ü")
    second.done = manifest.step
    second.step()
    assert first.equals(second)


def test_an_optimiser_that_never_stepped_is_loaded_too(tmp_path):
    first, second = Trainer(), Trainer(seed=1)
    first.step(2)
    with Checkpoints(tmp_path) as checkpoints:
        first.save(checkpoints)
        checkpoints.load(checkpoints.latest or _wait(checkpoints), **second.state())
    second.done = 2
    for each in (first, second):
        each.step()
    assert first.equals(second)


def _wait(checkpoints):
    checkpoints.wait()
    return checkpoints.latest


def test_the_last_ones_are_kept_and_no_rest_stays(tmp_path):
    trainer = Trainer()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for _ in range(4):
            trainer.step()
            trainer.save(checkpoints)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    with pytest.raises(SeqloomError, match="keep = 0; the newest checkpoint always stays"):
        Checkpoints(tmp_path, keep=0)


def test_the_best_is_kept_beside_the_last_ones(tmp_path):
    trainer = Trainer()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for best in (None, 2, 2, 2, 5, 5):
            trainer.step()
            checkpoints.save(trainer.done, **trainer.state(), extra={}, best=best)
            checkpoints.wait()
            if trainer.done == 4:
                assert steps_in(tmp_path) == [2, 4]
    assert steps_in(tmp_path) == [5, 6]


def test_latest_ignores_what_is_not_complete_and_a_new_run_removes_it(tmp_path):
    assert latest_checkpoint(tmp_path / "none") is None
    trainer = Trainer()
    trainer.step()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest is None
        trainer.save(checkpoints)
    (tmp_path / ".step-00000007.partial-1").mkdir()
    (tmp_path / "step-00000008").mkdir()  # a copy that was broken off
    (tmp_path / "step-00000008" / "seqloom.json").write_text("{}")
    (tmp_path / "step-x").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest == tmp_path / "step-00000001"
        assert not (tmp_path / ".step-00000007.partial-1").exists()
        trainer.step(7)
        trainer.save(checkpoints)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000008"


def test_steps_only_grow_and_the_same_step_is_written_once(tmp_path):
    trainer = Trainer()
    trainer.step(2)
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
        before = _wait(checkpoints).stat().st_mtime_ns
        trainer.save(checkpoints)
        assert _wait(checkpoints).stat().st_mtime_ns == before
        with pytest.raises(SeqloomError, match="has a checkpoint of step 2, so step 1 would not be the latest"):
            checkpoints.save(1, **trainer.state(), extra={})
    with Checkpoints(tmp_path) as checkpoints:  # another run that began at 0 in the same folder
        with pytest.raises(SeqloomError, match="has a checkpoint of step 2, so step 2 would not be the latest"):
            trainer.save(checkpoints)
        checkpoints.load(checkpoints.latest, **trainer.state())
        trainer.save(checkpoints)  # what was just loaded


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(tmp_path):
    trainer = Trainer()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, **trainer.state(), extra={})
        path = _wait(checkpoints)
        wide = Trainer(width=5)
        before = wide.model[0].weight.clone()
        with pytest.raises(
            SeqloomError,
            match=r"another model: different: 0.weight is float32\[3, 4\] there and float32\[3, 5\] here\.",
        ):
            checkpoints.load(path, **wide.state())
        assert torch.equal(wide.model[0].weight, before)
        double = {name: parameter.double() for name, parameter in trainer.parameters.items()}
        with pytest.raises(SeqloomError, match=r"0.bias is float32\[3\] there and float64\[3\] here"):
            checkpoints.load(path, model=double, optimiser=trainer.state()["optimiser"])
        renamed = {f"m.{name}": parameter for name, parameter in trainer.parameters.items()}
        with pytest.raises(
            SeqloomError, match=r"only in the checkpoint: 0.weight .*; not in the checkpoint: m.0.weight"
        ):
            checkpoints.load(path, model=renamed, optimiser=trainer.state()["optimiser"])
        with pytest.raises(SeqloomError, match=r"another optimiser: .*0.weight.step float32\[\].* and 8 more"):
            checkpoints.load(path, model=trainer.parameters, optimiser={})


def test_what_is_no_checkpoint_or_a_later_format_is_refused(tmp_path):
    trainer = Trainer()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(SeqloomError, match=r"is not a checkpoint: it has no seqloom.json"):
            checkpoints.load(tmp_path / "gone", **trainer.state())
        checkpoints.save(1, **trainer.state(), extra={})
        file = _wait(checkpoints) / "seqloom.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 9}))
        with pytest.raises(SeqloomError, match="version 9; this release reads 'seqloom checkpoint', version 1"):
            checkpoints.load(checkpoints.latest, **trainer.state())
        with pytest.raises(SeqloomError, match="cannot be written as JSON"):
            checkpoints.save(2, **trainer.state(), extra={"rng": torch.zeros(1)})


def test_a_full_disk_is_an_error_at_the_next_step_and_loses_nothing(tmp_path, monkeypatch):
    trainer = Trainer()
    trainer.step()
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
        checkpoints.wait()
        trainer.step()

        def full(self, plan, planner):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(AtomicWriter, "write_data", full)
        trainer.save(checkpoints)
        while not checkpoints._pending[2].done():
            pass
        with pytest.raises(
            SeqloomError,
            match=r"step 2 was not written \(rank 0: \[Errno 28\] No space.*step 1 is intact\. Make room or choose",
        ):
            checkpoints.poll()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        checkpoints.poll()  # said once
        monkeypatch.undo()
        trainer.save(checkpoints)  # the same step again, now there is room
    assert steps_in(tmp_path) == [1, 2]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(latest_checkpoint(tmp_path), **Trainer(seed=3).state())


def test_a_write_that_the_system_breaks_off(tmp_path):
    """The kernel itself refuses the bytes, half way through a file."""
    big = nn.Linear(300, 300)
    optimiser = make_optimiser(dict(big.named_parameters()), Optimiser())
    state = {"model": dict(big.named_parameters()), "optimiser": state_by_name(optimiser)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, **state, extra={})
        checkpoints.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        try:
            checkpoints.save(2, **state, extra={})
            with pytest.raises(SeqloomError, match=r"step 2 was not written .*; the one of step 1 is intact"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        checkpoints.load(latest_checkpoint(tmp_path), **state)


@pytest.mark.parametrize(
    ("where", "left"), [("writing", 1), pytest.param("renaming", 1, marks=pytest.mark.slow), ("deleting", 2)]
)
def test_a_crash_half_way_leaves_a_complete_checkpoint(fork_server, tmp_path, where, left):
    process = get_context("forkserver").Process(target=crash_while_saving, args=(tmp_path, where))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert latest_checkpoint(tmp_path) == tmp_path / f"step-0000000{left}"
    tensors = {"w": torch.zeros(1000)}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(checkpoints.latest, model=tensors, optimiser={}).step == left
    assert tensors["w"].sum() == 1000
    assert len(list(tmp_path.iterdir())) == 1


def test_one_is_in_flight_at_most_and_training_goes_on_meanwhile(tmp_path, monkeypatch):
    go, events = threading.Event(), []
    write = AtomicWriter.write_data

    def slow(self, plan, planner):
        events.append("begin")
        assert go.wait(30)
        result = write(self, plan, planner)
        events.append("end")
        return result

    monkeypatch.setattr(AtomicWriter, "write_data", slow)
    trainer = Trainer()
    trainer.step()
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
        checkpoints.poll()
        assert checkpoints.latest is None
        trainer.step()
        threading.Timer(0.2, go.set).start()
        trainer.save(checkpoints)  # waits for the first
        assert checkpoints.latest == tmp_path / "step-00000001"
    assert events == ["begin", "end", "begin", "end"]


def test_an_error_in_the_body_of_a_with_is_the_one_that_is_seen(tmp_path):
    with pytest.raises(KeyError, match="a reason"), Checkpoints(tmp_path):
        raise KeyError("a reason")


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["a bit of a tensor", "a bit of the metadata", "cut", "missing"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path, damage):
    trainer, other = Trainer(), Trainer(seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        for _ in range(2):
            trainer.step()
            trainer.save(checkpoints)
        checkpoints.wait()
        folder = checkpoints.latest
        tensors = next(folder.glob("*.distcp"))
        if damage == "a bit of a tensor":
            flip(tensors, 1000)
        elif damage == "a bit of the metadata":
            flip(folder / METADATA, 100)
        elif damage == "cut":
            tensors.write_bytes(tensors.read_bytes()[:-1])
        else:
            tensors.unlink()
        state = {name: tensor.clone() for name, tensor in other.parameters.items()}
        with pytest.raises(DamagedCheckpointError, match=r"is damaged \(.*\); take another: step-00000001"):
            checkpoints.load(folder, **other.state())
        assert all(torch.equal(state[name], tensor) for name, tensor in other.parameters.items())
        aside = checkpoints.set_aside()
        assert aside.name == "damaged-step-00000002" and aside.is_dir()
        assert checkpoints.latest == tmp_path / "step-00000001"
        assert checkpoints.load(checkpoints.latest, **other.state()).step == 1


class Opens:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def rewrite_metadata(folder, change):
    file, manifest = folder / METADATA, json.loads((folder / MANIFEST).read_text())
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": {}}))  # as if nobody had to be deceived


@pytest.mark.parametrize("hidden", ["in the metadata", "in place of a tensor", "outside of the folder"])
def test_a_checkpoint_runs_no_code_and_reads_no_other_file(tmp_path, hidden):
    trainer, mark = Trainer(), tmp_path / "mark"
    trainer.step()
    with Checkpoints(tmp_path / "run") as checkpoints:
        trainer.save(checkpoints)
        checkpoints.wait()
        folder = checkpoints.latest
        if hidden == "in the metadata":
            rewrite_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Opens(mark)))
        elif hidden == "in place of a tensor":
            rewrite_metadata(folder, partial(replace_by_bytes, folder, mark))
        else:
            rewrite_metadata(folder, name_files_elsewhere)
        mark.unlink(missing_ok=True)
        said = {"in the metadata": "open", "in place of a tensor": "Bytes", "outside of the folder": "elsewhere"}
        with pytest.raises(SeqloomError, match=f"cannot be read .*names .*{said[hidden]}"):
            checkpoints.load(folder, **Trainer(seed=1).state())
    assert not mark.exists()


def name_files_elsewhere(metadata):
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere"


def replace_by_bytes(folder, mark, metadata):
    """Say of a tensor that it is an object, which torch would unpickle."""
    name = "model.0.weight"
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    index = next(index for index in metadata.storage_data if index.fqn == name)
    info = metadata.storage_data.pop(index)
    torch.save(Opens(mark), folder / "object")
    info.relative_path, info.offset, info.length = "object", 0, (folder / "object").stat().st_size
    metadata.storage_data[MetadataIndex(name)] = info
