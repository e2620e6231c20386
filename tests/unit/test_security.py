"""What SECURITY.md promises of the source: nothing in it runs what a file holds, and ranks of a machine stay in it."""

import ast
import stat
from pathlib import Path

import psutil
import pytest

from seqloom.train import launch

SOURCE = Path(launch.__file__).parents[1]
FORBIDDEN = {
    "pickle.load": "unpickles",
    "pickle.loads": "unpickles",
    "eval": "runs text",
    "exec": "runs text",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "yaml.load": "makes any object",
    "marshal.loads": "makes code",
}
NEEDED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
REFUSED = {("trust_remote_code", True), ("shell", True), ("allow_pickle", True), ("weights_only", False)}


def name_of(call):
    parts, node = [], call.func
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def faults_of(text):
    """Calls that would run what a file holds."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node)
        options = {(each.arg, each.value.value) for each in node.keywords if isinstance(each.value, ast.Constant)}
        if name in FORBIDDEN:
            yield f"{name} {FORBIDDEN[name]}"
        if name in NEEDED and NEEDED[name] not in options:
            yield f"{name} without {NEEDED[name]}"
        yield from (f"{name} with {option}" for option in options & REFUSED)


def test_no_call_in_the_source_runs_what_a_file_holds():
    found = {str(path): [*faults_of(path.read_text())] for path in SOURCE.rglob("*.py")}
    assert len(found) > 100
    assert {path: faults for path, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    "text",
    ["pickle.loads(x)", "torch.load(x)", "np.load(x, allow_pickle=True)", "f(trust_remote_code=True)", "eval(x)"],
)
def test_the_test_sees_such_calls(text):
    assert [*faults_of(text)]


def addresses_of_rank(process, folder):
    """Where this rank listens, and who may read the folder that ranks meet in."""
    listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    return sorted(listening), [stat.S_IMODE(path.stat().st_mode) for path in Path(folder).glob("seqloom-*")]


@pytest.mark.distributed
def test_ranks_of_a_machine_listen_on_loopback_and_meet_in_a_private_folder(fork_server, tmp_path, monkeypatch):
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    addresses, modes = launch.run_on_processes(addresses_of_rank, 2, str(tmp_path))
    assert addresses and all(each.startswith(("127.", "::1")) for each in addresses)
    assert modes == [0o700]
