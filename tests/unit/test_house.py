"""The house rules that a linter does not know: files are read in one sitting, functions fit a screen."""

import ast
from pathlib import Path

import pytest

import seqloom

SOURCE = Path(seqloom.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FILE = 400
LONGEST_FUNCTION = 70


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_file_and_its_functions_are_short(file):
    text = file.read_text()
    lines = text.count("\n")
    assert lines <= LONGEST_FILE, f"{file.name} has {lines} lines; split it at {LONGEST_FILE}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines; split it at {LONGEST_FUNCTION}"


def test_no_room_is_called_utils():
    assert not [file for file in FILES if file.stem in {"util", "utils", "helpers", "misc"}]
