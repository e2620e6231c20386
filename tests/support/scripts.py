"""Scripts that torchrun starts, here as forks of the session's server, which has loaded torch and transformers."""

import multiprocessing
import os
import runpy
import socket
from contextlib import redirect_stdout
from pathlib import Path


def run_script(script: Path, ranks: int, folder: Path) -> str:
    """Run a script on some ranks and return what the first one printed; needs the fixture `fork_server`."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    files = [folder / f"{rank}-of-{ranks}.txt" for rank in range(ranks)]
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=_run, args=(script, rank, ranks, port, file)) for rank, file in enumerate(files)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0] * ranks
    return files[0].read_text()


def _run(script: Path, rank: int, ranks: int, port: int, output: Path) -> None:
    """Run the script as torchrun would run one of its processes."""
    import torch

    told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in told.items()}
    torch.set_num_threads(1)
    with output.open("w") as out, redirect_stdout(out):
        runpy.run_path(str(script))
