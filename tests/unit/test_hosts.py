"""Where there cannot be hosts, the reason is said; where there can, `make test-cluster` tests them."""

import sys

import pytest

from seqloom.errors import SeqloomError
from support import hosts


@pytest.fixture(autouse=True)
def _a_machine_that_has_everything(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0, raising=False)
    monkeypatch.setattr("shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(hosts, "Hosts", lambda **_: _Closed())


class _Closed:
    def close(self):
        pass


def test_a_machine_that_has_everything_can():
    assert hosts.why_not() is None


def test_reasons(monkeypatch):
    def refuse(**_):
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(hosts, "Hosts", refuse)
    assert hosts.why_not() == "no network namespaces here: [Errno 1] unshare: Operation not permitted"
    monkeypatch.setattr("shutil.which", lambda name: None if name == "tc" else name)
    assert hosts.why_not() == "no command tc; install iproute2"
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert hosts.why_not() == "network namespaces need root, try sudo"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hosts.why_not() == "network namespaces are a matter of Linux, this is darwin"


@pytest.mark.parametrize(
    ("given", "message"),
    [({"nodes": 0}, r"0 nodes; take 1 \.\. 200"), ({"ranks": 2, "nics": 3}, r"3 nics; take 1 \.\. 2")],
)
def test_bad_shapes_are_refused_before_anything_is_made(monkeypatch, given, message):
    monkeypatch.undo()
    with pytest.raises(SeqloomError, match=message):
        hosts.Hosts(**given)
