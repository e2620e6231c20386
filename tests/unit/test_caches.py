"""A long run fills no cache without bound: those that outlive a call have a size, or keys of which there are few."""

import ast
from pathlib import Path

import pytest

import seqloom

SOURCE = Path(seqloom.__file__).parent
FEW_KEYS = {
    "attention/kernels/flash.py": {"of_fa4"},  # no argument
    "dist/streams.py": {"stream_of"},  # devices of a process, and uses that the source names
    "dist/routed.py": {"_stream"},
    "dist/resharding.py": {"_stream"},
    "models/compile.py": {"_compiled_body", "register_operator"},  # classes of layers; no argument
    "models/float8.py": {"allow_in_graphs"},
    "planners/compiled.py": {"_dispatchers"},
}


def lasting_functions(body):
    """Functions of a module and of its classes; those inside of functions end with a call."""
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from lasting_functions(node.body)


def unbounded(text):
    """Names of functions whose results are kept without a limit."""
    for function in lasting_functions(ast.parse(text).body):
        for decorator in function.decorator_list:
            name = ast.unparse(decorator)
            if name in ("cache", "functools.cache") or "maxsize=None" in name.replace(" ", ""):
                yield function.name


def test_caches_that_outlive_a_call_are_bounded():
    found = {path.relative_to(SOURCE).as_posix(): {*unbounded(path.read_text())} for path in SOURCE.rglob("*.py")}
    assert len(found) > 100
    assert {path: names for path, names in found.items() if names} == FEW_KEYS


@pytest.mark.parametrize("decorator", ["cache", "functools.cache", "lru_cache(maxsize=None)"])
def test_the_test_sees_such_caches(decorator):
    assert [*unbounded(f"class A:\n  @{decorator}\n  def f(self): ...")] == ["f"]
