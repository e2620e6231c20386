"""Seconds from the command to the end of the first step: with empty caches of compiled code, then with full ones.

Ranks share the GPU, so that the time of a machine with a GPU for each is not above these. A model of Hugging Face has
the configuration of Qwen3-1.7B and random values; its layers are compiled.

    python benchmarks/gpu_start.py --ranks 4 --out benchmarks/results/gpu_start.json
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import Check, options, progress, show, show_checks
from record import write

RECIPES = Path(__file__).parents[1] / "recipes"
DONE, TOKENS, LIMIT_S = "first step done", 16_384, 300
FILL = "from seqloom.planners.compiled import compile_loops; compile_loops()"
"""What a run leaves to a process in the background, which ends after its first step."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR")
IMPORT = "import seqloom.train.launch, seqloom.planners.registry, seqloom.integrations.transformers.loading"
"""Leaves the byte code of Python's modules in a folder, as an installation does; not every machine has it."""
MODEL, VOCABULARY = "qwen3-1.7b", 151_936


def make_model(folder: Path) -> dict[str, Any]:
    """Write a model and documents of very unequal length; return the settings that name them."""
    import torch
    from training_inputs import CONFIGS
    from transformers import AutoModelForCausalLM

    from seqloom.data import StoreWriter

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIGS[MODEL](), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=VOCABULARY) as writer:
        for length in np.clip(draw.lognormal(6, 1.5, 2_000).astype(int), 2, TOKENS):
            writer.add(draw.integers(VOCABULARY, size=length))
    return {"model.huggingface": folder / "model", "data.source": folder / "store"}


def environment(caches: Path) -> dict[str, str]:
    """Return this process's environment with caches of its own; the byte code of modules lies beside them."""
    bytecode = {"PYTHONPYCACHEPREFIX": str(caches.parent / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    return os.environ | bytecode | {name: str(caches / name) for name in CACHES}


def start(recipe: str, ranks: int, settings: dict[str, Any], caches: Path) -> tuple[float, str]:
    """Train until the first step is done; return the seconds and what the run says of its phases."""
    from torch.cuda import is_available

    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "seqloom", "train", str(RECIPES / f"{recipe}.toml"), "--ranks", str(ranks), *words]
    command += ["--share-gpu"] if is_available() else []
    begin, said = time.perf_counter(), []
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(caches),
        start_new_session=True,
    ) as launcher:
        assert launcher.stderr is not None
        try:
            for line in launcher.stderr:
                said.append(line)
                if DONE in line or time.perf_counter() - begin > LIMIT_S:
                    break
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)  # what follows, such as a checkpoint, is not measured
    if not said or DONE not in said[-1]:
        raise SystemExit(f"no first step: {''.join(said[-20:])}")
    return time.perf_counter() - begin, said[-1].partition(": ")[2].strip()


def main() -> None:
    """Measure, show and write."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--cases", default=f"tiny,{MODEL}", help="of these, in this order")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"ranks": arguments.ranks}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        usual = {"run.steps": 2, "schedule.warmup": 1, "evaluation.every": 0, "log.every": 1}
        named = arguments.cases.split(",")
        cases: dict[str, tuple[str, dict[str, Any]]] = {"tiny": ("tiny-cpu", {})} if "tiny" in named else {}
        if MODEL in named and not arguments.quick:
            cluster = {
                "plan.cluster": f"1x{arguments.ranks}xH200",
                "data.tokens": 4 * TOKENS,
                "data.max_length": TOKENS,
            }
            cases[MODEL] = "qwen3-8xh200", make_model(folder) | cluster
        subprocess.run([sys.executable, "-c", IMPORT], env=environment(folder / "caches"), check=True)
        for case, (recipe, settings) in cases.items():
            for state in ("cold", "warm"):
                progress(f"{case}, {state}")
                output = {"run.output": folder / f"{case}-{state}"}
                seconds, phases = start(recipe, arguments.ranks, usual | settings | output, folder / f"caches-{case}")
                progress(f"{case}, {state}: {seconds:.1f} s: {phases}")
                figures[f"{case}, {state}"] = {"seconds": seconds, "phases": phases}
                subprocess.run([sys.executable, "-c", FILL], env=environment(folder / f"caches-{case}"), check=True)
    measured = {key: value["seconds"] for key, value in figures.items() if isinstance(value, dict)}
    wanted = {"tiny, cold": 30.0, "tiny, warm": 10.0, f"{MODEL}, cold": 90.0}
    checks = [Check(f"first step of {key}, s", measured[key], most) for key, most in wanted.items() if key in measured]
    show("from the command to the first step", ("run", "s"), [(key, f"{s:.1f}") for key, s in measured.items()])
    show_checks(checks)
    write(arguments.out, __file__, arguments, figures, checks, lengths="made-up documents")


if __name__ == "__main__":
    main()
