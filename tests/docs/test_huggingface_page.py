"""docs/huggingface.md: the table is that of the code, the example is the file, and the file trains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqloom.integrations import transformers as integrations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text()
EXAMPLE = ROOT / "examples" / "own_loop.py"


def test_the_table_is_made_from_the_code():
    shown = PAGE.split("<!-- support -->\n")[1].split("<!-- /support -->")[0]
    assert shown == integrations.support_table(), (
        "put the text of seqloom.integrations.transformers.checks.support_table() there"
    )


def test_every_function_is_explained():
    explained = re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE)
    public = [name for name in integrations.__all__ if name[0].islower() and name != "support_table"]
    assert sorted(explained) == sorted(public)


def test_the_example_is_the_file():
    assert re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) == [EXAMPLE.read_text()]


def test_it_takes_under_15_lines():
    lines = EXAMPLE.read_text().split("ranks = dist.get_world_size()\n")[1].splitlines()
    everybody = re.compile(r"for documents|backward|optimizer|print|get_rank|destroy|total \+=|^$")  # what any loop has
    assert len([line for line in lines if not everybody.search(line)]) < 15


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
"""What torchrun would tell a single process."""


def losses(*launch: str, **told: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **told}
    result = subprocess.run([*launch, EXAMPLE], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return [float(value) for value in re.findall(r"^loss (\S+)", result.stdout, re.MULTILINE)]


def test_the_example_trains_and_the_number_of_processes_does_not_matter():
    alone, together = losses(sys.executable, **ALONE), losses(*TORCHRUN)
    assert alone == sorted(alone, reverse=True) and alone[-1] < 0.7 * alone[0]
    assert together == pytest.approx(alone, abs=5e-5)
