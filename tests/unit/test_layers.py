"""The upper half installs with the base dependencies alone: no module of it needs an extra to be imported."""

import subprocess
import sys

WALK = """
import importlib, importlib.abc, pkgutil, sys

ABSENT = {"torch", "numba", "highspy", "pyarrow", "transformers", "tokenizers", "scipy"}
BELOW_THE_LINE = "dist attention models params engine data train profiling integrations compat".split()


class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
import seqloom

failures = []
names = ["seqloom"]
for found in pkgutil.walk_packages(seqloom.__path__, "seqloom.", onerror=lambda name: None):
    if found.name.split(".")[1] not in BELOW_THE_LINE:
        names.append(found.name)
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {error}")
print(len(names))
sys.exit("\\n".join(failures) or 0)
"""


def test_every_module_of_the_upper_half_imports_without_extras():
    result = subprocess.run([sys.executable, "-c", WALK], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 5
