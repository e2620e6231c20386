"""The pages in docs/ say what the code says."""

import re
from pathlib import Path

import pytest

from seqloom.plan import RULES, Plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ROOTS = (ROOT, ROOT / "src" / "seqloom")


def test_every_rule_stands_in_the_page_with_its_own_words():
    page = (DOCS / "plan.md").read_text()
    for name, rule in RULES.items():
        assert f"| `{name}` | {(rule.__doc__ or '').strip().splitlines()[0]} |" in page


def test_the_plan_in_the_page_is_one():
    page = (DOCS / "plan.md").read_text()
    lines = page[page.index("    seqloom plan 1") :].splitlines()
    shown = [line[4:] for line in lines[: next(k for k, line in enumerate(lines) if not line.startswith("    "))]]
    plan = Plan.from_text("\n".join(shown) + "\n")
    plan.validate()
    assert plan.to_text().splitlines() == shown


def test_a_reader_finds_every_page():
    """From the README, or from the index that it links."""
    readme, index = (ROOT / "README.md").read_text(), (DOCS / "index.md").read_text()
    names = [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert [name for name in names if f"(docs/{name})" not in readme and f"]({name})" not in index] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page: Path):
    """Links relative to the page; `folder/file.py` of the package, the tests or the repository."""
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    files = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|toml|svg|sh|sbatch|yaml))`", text)
    missing = {name for name in files if not any((root / name).exists() for root in ROOTS)}
    assert missing == set()
