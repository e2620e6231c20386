"""Scripts and functions that torchrun starts, here as forks of the session's server, which has loaded transformers."""

import multiprocessing
import os
import runpy
import socket
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run_script(script: Path, ranks: int, folder: Path) -> str:
    """Run a script on some ranks, in a folder, and return what the first one printed; needs `fork_server`."""
    files = [folder / f"{rank}-of-{ranks}.txt" for rank in range(ranks)]
    _run_ranks(ranks, _run_script, [(script, file) for file in files])
    return files[0].read_text()


def run_function(body: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """Call a function at the top of a module on some ranks, and return what each of them returned."""
    import torch

    files = [folder / f"{body.__name__}-{rank}-of-{ranks}.pt" for rank in range(ranks)]
    _run_ranks(ranks, _run_function, [(body, file, *args) for file in files])
    return [torch.load(file, weights_only=False) for file in files]


def _run_ranks(ranks: int, target: Callable[..., None], args: list[tuple[Any, ...]]) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=_as_rank, args=(target, rank, ranks, port, *args[rank])) for rank in range(ranks)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * ranks


def _as_rank(target: Callable[..., None], rank: int, ranks: int, port: int, *args: Any) -> None:
    """Call a function as torchrun would run one of its processes."""
    import torch

    told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    told |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {key: str(value) for key, value in told.items()}
    torch.set_num_threads(1)
    target(*args)


def _run_script(script: Path, output: Path) -> None:
    os.chdir(output.parent)
    with output.open("w") as out, redirect_stdout(out):
        runpy.run_path(str(script))


def _run_function(body: Callable[..., Any], output: Path, *args: Any) -> None:
    import torch

    torch.save(body(*args), output)
