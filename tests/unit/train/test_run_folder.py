"""The folder of a run: files that others may read, and folders that cannot be."""

import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from seqloom.errors import SeqloomError
from seqloom.train.run_folder import RunLock, atomic_folder


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SeqloomError, match=r"cannot be written .*; choose another folder"):
        RunLock(tmp_path / "file" / "run").acquire()
    with pytest.raises(SeqloomError, match=r"cannot be written .*file is a file.*; choose another folder"):
        RunLock(tmp_path / "file" / "run").check()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_exported_files_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        with atomic_folder(tmp_path / "model") as folder:
            save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert modes == {0o666 & ~mask}
