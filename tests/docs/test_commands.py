"""Every command of the docs is run as written by some test, or is listed here with the reason why it is not."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent
FENCE = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ANY_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(
    r"^    ((?:seqloom (?!plan 1)[a-z]+ [\w./-]|python |make |pip |torchrun |sbatch ).*)$", re.MULTILINE
)
RUN_HERE = {"report": [], "planning": [pytest.mark.slow, pytest.mark.distributed]}
"""Pages whose blocks the first test runs, and its marks."""
RUN_BY = {
    "README": "test_readme.py",
    "data": "test_data_page.py",
    "fine-tuning": "test_fine_tuning_page.py",
    **dict.fromkeys(("attention", "cost-model", "experts", "huggingface"), "test_{}_page.py"),
    **dict.fromkeys(("hydraulis", "pipelines", "schedules", "tensor-parallelism", "training"), "test_{}_page.py"),
}
"""Pages that have a test of their own; those of tutorials and how-tos are run by test_guides.py."""
NOT_RUN = {
    "seqloom profile --quick": "measures for minutes; tests of the verb measure small sizes",
    "torchrun --nproc-per-node 4 examples/own_loop.py": "test_huggingface_page.py runs the example",
    "torchrun --nproc-per-node 2 examples/": "test_trainer_pages.py runs the examples",
    "seqloom replay runs/own/failed": "needs a step that has failed; tests of replay make one",
    'pip install "seqloom[train,data,hf,gpu]"': "installs",
    "seqloom data prepare corpus.jsonl --out corpus --tokenizer FOLDER": "FOLDER is the reader's",
    "seqloom check recipes/qwen3-8xh200.toml": "needs the reader's corpus and model",
    "seqloom verify recipes/qwen3-8xh200.toml --nccl": "eight GPUs",
    "torchrun --nproc-per-node 8 -m seqloom profile": "eight GPUs",
    "torchrun --nproc-per-node 8 -m seqloom train": "eight GPUs",
}
"""How indented commands begin that nothing runs as written, and why."""


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks) for page, marks in RUN_HERE.items()])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_blocks_of_a_page_run(page, tmp_path, run_block):
    (tmp_path / "lengths.txt").write_text("".join(f"{length}\n" for length in (512, 700, 9_000, 1_300, 33_000, 260)))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for block in FENCE.findall((ROOT / "docs" / f"{page}.md").read_text()):
        assert run_block("sh", block)


def test_every_command_is_run_or_listed():
    listed = set()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text()
        if FENCE.search(text) and path.stem not in RUN_HERE and path.parent.name not in ("tutorials", "how-to"):
            test = TESTS / RUN_BY[path.stem].format(path.stem.replace("-", "_"))
            assert path.name in test.read_text(), f"{path.name} has commands that no test runs"
        for command in INDENTED.findall(ANY_FENCE.sub("", text)):
            reasons = [start for start in NOT_RUN if command.startswith(start)]
            assert reasons, f"{path.name}: {command!r} is run by no test; list it here with the reason"
            listed.update(reasons)
    assert listed == set(NOT_RUN), "every reason is needed"
