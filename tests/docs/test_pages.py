"""The pages in docs/ say what the code says."""

from pathlib import Path

from seqloom.plan import RULES, Plan

DOCS = Path(__file__).parents[2] / "docs"


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


def test_every_file_that_a_page_names_exists():
    import re

    root = DOCS.parent / "src" / "seqloom"
    for page in DOCS.glob("*.md"):
        for name in re.findall(r"`((?:describe|plan|cost|planners|simulate|view)/[\w/.]+)`", page.read_text()):
            assert (root / name).exists(), f"{page.name}: {name}"
