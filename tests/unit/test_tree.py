"""What the tree promises a reader: short folders, no slivers, no scaffolding, a README that is read in one go."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "seqloom"
MOST_MODULES, MOST_README_LINES, SLIVER_LINES = 15, 150, 80


def modules() -> dict[str, Path]:
    """Every module by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(path: Path) -> set[str]:
    """Dotted names of modules, or of things in modules, that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def importers() -> dict[str, set[str]]:
    """Of every module the other modules that import it; a package's `__init__` does not count."""
    known, found = modules(), defaultdict(set)
    for name, path in known.items():
        for imported in imported_names(path) & known.keys() - {name}:
            if path.name != "__init__.py":
                found[imported].add(name)
    return found


def test_a_folder_has_at_most_15_modules():
    folders = [SOURCE, *(path for path in SOURCE.rglob("*") if path.is_dir())]
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_a_short_module_with_one_importer_says_why():
    """It belongs to its importer, unless the first line of its docstring says "because"."""
    users, slivers = importers(), []
    for name, path in modules().items():
        text = path.read_text()
        first = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
        if (
            path.name != "__init__.py"
            and text.count("\n") < SLIVER_LINES
            and len(users[name]) == 1
            and "because" not in first
        ):
            slivers.append(f"{name} ({text.count(chr(10))} lines) is imported by {users[name].pop()} only")
    assert not slivers, "\n".join(slivers)


def test_no_scaffolding_is_left():
    left = [str(path.relative_to(ROOT)) for path in SOURCE.rglob("*.py") if "# ---- merged" in path.read_text()]
    assert not left, "\n".join(left)


def test_the_readme_is_short():
    assert (ROOT / "README.md").read_text().count("\n") < MOST_README_LINES
