"""Runs the tests of the plug-ins, each with the real library of its host in an environment of its own.

    python tests/plugins/run.py                                   # all hosts
    python tests/plugins/run.py verl ray                          # some
    python tests/plugins/run.py slime --source slime=../slime     # with a checkout of a host that has no package

An environment is build/plugins/<host>: the packages of requirements/<host>.txt in their exact versions, over the
development environment, from which torch comes. So an environment has tens of megabytes, not gigabytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOSTS: dict[str, tuple[str, ...]] = {
    "megatron": ("megatron",),
    "torchtitan": ("torchtitan",),
    "ray": ("ray",),
    "verl": ("ray", "verl"),
    "skyrl": ("skyrl",),
    "nemo_rl": (),
    "slime": (),
}
"""For every host the requirements that its tests need, one over the other; (): it has no package with its code."""


def packages(python: Path) -> Path:
    """Return the folder of an environment's packages."""
    return python.parents[1] / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def environment(names: tuple[str, ...]) -> Path:
    """Make or reuse the environment of the last of these names, and return its interpreter."""
    if not names:
        return Path(sys.executable)
    below = [environment(names[:-1]), Path(sys.executable)] if names[:-1] else [Path(sys.executable)]
    requirements = HERE / "requirements" / f"{names[-1]}.txt"
    folder = ROOT / "build" / "plugins" / names[-1]
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == requirements.read_text():
        return python
    print(f"plugins: building {folder.relative_to(ROOT)}", flush=True)
    venv.create(folder, clear=True, with_pip=False)
    layers = [Path(sysconfig.get_path("purelib")) if each == Path(sys.executable) else packages(each) for each in below]
    (packages(python) / "layers.pth").write_text(
        "import site; " + "; ".join(f"site.addsitedir({str(each)!r})" for each in layers) + "\n"
    )
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "-r"]
    subprocess.run([*pip, str(requirements)], check=True)
    stamp.write_text(requirements.read_text())
    return python


def run_tests(host: str, source: str | None, extra: list[str]) -> str:
    """Run the tests of a host, and return how that ended."""
    try:
        python = environment(HOSTS[host])
    except subprocess.CalledProcessError:
        return f"not installed: pip cannot have requirements/{HOSTS[host][-1]}.txt here, see above"
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    if source:
        told["PYTHONPATH"] = str(Path(source).resolve())
    options = ["-m", "plugins", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore", "--timeout", "600", *extra]
    done = subprocess.run([str(python), "-m", "pytest", *options, str(HERE / f"test_{host}.py")], cwd=ROOT, env=told)
    return "passed" if done.returncode == 0 else f"FAILED ({done.returncode})"


def main() -> int:
    """Run the tests of the hosts that are named, and print a line for each."""
    parser = argparse.ArgumentParser(description="Test the plug-ins with the real libraries of their hosts.")
    parser.add_argument("hosts", nargs="*", metavar="host", help=f"all of {', '.join(HOSTS)} if none is named")
    parser.add_argument("--source", action="append", default=[], metavar="host=folder", help="a checkout of a host")
    parser.add_argument("--pytest", action="append", default=[], help="an option for pytest")
    given = parser.parse_args()
    sources = dict(each.split("=", 1) for each in given.source)
    if unknown := {*given.hosts, *sources} - {*HOSTS}:
        parser.error(f"{', '.join(sorted(unknown))}: hosts are {', '.join(HOSTS)}")
    ended = {host: run_tests(host, sources.get(host), given.pytest) for host in given.hosts or HOSTS}
    for host, how in ended.items():
        print(f"plugins: {host:<10}  {how}")
    return int(any(how.startswith("FAILED") for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
