"""Training: config, setup, launch, the loop itself, optimiser, checkpoints and metrics.

`config` and `setup` need no torch, so that a run is checked before anything heavy is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqloom.errors import SeqloomError, import_extra
from seqloom.train.config import Config
from seqloom.train.logging import Callback, StepRecord

if TYPE_CHECKING:
    from seqloom.train.model import ModelFamily

__all__ = [
    "Callback",
    "Config",
    "StepRecord",
    "train",
]
REFERENCE, HUGGINGFACE = "seqloom.train.model", "seqloom.integrations.transformers.loading"
"""Modules that build models."""
LAUNCHERS = {"RANK", "SLURM_PROCID"}
"""Variables that say a launcher may have started this process."""


def train(
    config: Config | str | Path,
    *,
    overrides: Iterable[str] = (),
    ranks: int | None = None,
    callbacks: Sequence[Callback] = (),
    share_gpu: bool = False,
    show: bool = True,
    ends_process: bool = False,
) -> dict[str, Any]:
    """Train as `seqloom train` does; return the summary, on rank 0 where a launcher has started the ranks, else {}.

    A script that calls it does so below `if __name__ == "__main__":`, since ranks are processes that import it.

    Args:
        config: or the path of its file.
        overrides: `section.key=value`, of a file.
        ranks: processes to start on this machine; None: the config's. Under torchrun or srun there is nothing to start.
        callbacks: are copied to the first rank, which calls them.
        share_gpu: allow more ranks than GPUs.
        show: show progress on stderr.
        ends_process: whether the caller ends this process next, see `launch.train_on_processes`.
    """
    from seqloom.train.fork_server import check_cores, start_fork_server

    check_cores(ranks or 1)
    import_extra("training", "train,data", "torch")
    loaded = config if isinstance(config, Config) else Config.load(config, overrides)
    if not LAUNCHERS & os.environ.keys():  # ranks will be forks: of a server that loads torch while this process does
        start_fork_server("seqloom.train.launch", REFERENCE if loaded.model.huggingface is None else HUGGINGFACE)
    from seqloom.dist import launched_rank
    from seqloom.train.launch import train_as_launched_rank, train_on_processes

    launched = launched_rank() is not None
    if launched and ranks is not None:
        raise SeqloomError(f"{ranks} ranks (--ranks) under torchrun or srun, which has started them; leave one out")

    options: dict[str, Any] = {"model_family": model_family_of(loaded), "share_gpu": share_gpu, "show": show}
    if launched:
        return train_as_launched_rank(loaded, callbacks=callbacks, **options)
    count = ranks or loaded.run.ranks
    return train_on_processes(loaded, count, callbacks=callbacks, ends_process=ends_process, **options)


def model_family_of(config: Config) -> ModelFamily:
    """Return how to build and write the model that a config names: a Hugging Face folder, or the reference model."""
    if config.model.huggingface is None:
        return import_module(REFERENCE).REFERENCE
    return import_module(HUGGINGFACE).HUGGINGFACE
