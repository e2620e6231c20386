"""What is looked for before layers are compiled, and what is said where it is missing."""

import pytest

from seqloom.errors import SeqloomError
from seqloom.train import launch as compilers
from seqloom.train.launch import check_compilers

WAY_OUT = "install it, or set model.compile = false"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with some programs, some packages, and the development files of Python, or without."""

    def make(*programs, packages=(), headers=True):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(compilers.sys, "platform", "linux")
        monkeypatch.setattr(compilers.shutil, "which", lambda name: name if name in programs else None)
        monkeypatch.setattr(compilers, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(compilers.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        if headers:
            (tmp_path / "Python.h").touch()

    return make


@pytest.mark.parametrize(
    ("device", "programs", "packages"),
    [("cpu", ["g++"], []), ("cuda", ["gcc"], ["triton"]), ("cuda", ["clang"], ["triton"])],
)
def test_a_machine_that_has_all(machine, device, programs, packages):
    machine(*programs, packages=packages)
    check_compilers(device)


@pytest.mark.parametrize(
    ("device", "programs", "packages", "missing"),
    [
        ("cpu", ["gcc", "clang++"], ["triton"], "is not here: the C++ compiler 'g++'; "),
        ("cuda", ["g++"], ["triton"], "is not here: a C compiler ('gcc' or 'clang'); "),
        ("cuda", ["gcc"], [], "is not here: triton; "),
        ("cuda", [], [], "is not here: triton, a C compiler ('gcc' or 'clang'); "),
    ],
)
def test_what_lacks_is_named(machine, device, programs, packages, missing):
    machine(*programs, packages=packages)
    with pytest.raises(SeqloomError) as error:
        check_compilers(device)
    assert missing + WAY_OUT in str(error.value)


def test_the_variables_that_name_another_compiler_count(machine, monkeypatch):
    machine("icpx", "g++", packages=["triton"])
    monkeypatch.setenv("CXX", "icpx")
    check_compilers("cpu")
    monkeypatch.setenv("CXX", "gone++")
    with pytest.raises(SeqloomError, match=r"the C\+\+ compiler 'gone\+\+'"):
        check_compilers("cpu")
    monkeypatch.setenv("CC", "gone")
    with pytest.raises(SeqloomError, match=r"a C compiler \('gone'\)"):
        check_compilers("cuda")


def test_python_needs_its_development_files(machine):
    machine("g++", headers=False)
    with pytest.raises(SeqloomError, match=r"Python\.h \(the development files"):
        check_compilers("cpu")
