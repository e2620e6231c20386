"""The harness itself: nics are as slow as they should be, messages take the right ones, nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from seqloom.dist import P2PTensor
from support.hosts import Hosts, fastest

pytestmark = pytest.mark.cluster

SIZE = 1_500_000
PAYLOAD = 1448 / 1514  # bytes of a full packet that are not headers


def send(transport, sender, receiver, size):
    """Seconds from the first byte to the last."""
    everyone = tuple(range(transport.ranks))
    content = torch.full((size,), 7 if transport.rank == sender else 0, dtype=torch.uint8)
    transport.all_reduce(torch.ones(1), everyone)
    start = time.perf_counter()
    if transport.rank == sender:
        transport.exchange([P2PTensor(receiver, content)], []).wait()
    if transport.rank == receiver:
        transport.exchange([], [P2PTensor(sender, content)]).wait()
        assert bool((content == 7).all())
    transport.all_reduce(torch.ones(1), everyone)
    return time.perf_counter() - start


def carried(hosts, run):
    """Bytes that each nic of each node sent meanwhile, and what was returned."""
    before = hosts.bytes_sent()
    found = run()
    after = hosts.bytes_sent()
    return [[b - a for a, b in zip(*node, strict=True)] for node in zip(before, after, strict=True)], found


@pytest.mark.parametrize(("sender", "receiver"), [(0, 4), (1, 6), (6, 1), (3, 4)])
def test_a_message_leaves_through_the_card_near_its_sender(hosts, pool, sender, receiver):
    sent, _ = carried(hosts, lambda: pool.run(send, sender, receiver, SIZE))
    node, nic = sender // hosts.ranks, hosts.near(sender)
    assert SIZE <= sent[node][nic] < 1.06 * SIZE
    sent[node][nic] = 0
    assert sum(map(sum, sent)) < 0.03 * SIZE  # acknowledgements


def test_a_card_has_its_rate(hosts, pool):
    """A busy machine may be slower, a nic is never faster."""
    wanted = 8e-6 * SIZE / (PAYLOAD * hosts.rate_mbit)
    assert fastest(lambda: max(pool.run(send, 2, 7, SIZE)), 1.1 * wanted) == pytest.approx(wanted, rel=0.1)


def test_a_message_inside_a_node_takes_no_card(hosts, pool):
    sent, _ = carried(hosts, lambda: pool.run(send, 2, 3, SIZE))
    assert sum(map(sum, sent)) < 0.01 * SIZE


def test_two_cards_carry_twice_as_much(hosts, pool):
    """Two senders near two nics, and two receivers: the nics do not share anything; one nic takes twice as long."""
    once = hosts.seconds(SIZE / PAYLOAD)
    assert fastest(lambda: max(pool.run(send_two, SIZE)), 1.3 * once) < 1.3 * once
    assert max(pool.run(send, 0, 4, 2 * SIZE)) > 1.7 * once


def send_two(transport, size):
    pair = transport.rank % 4 % 2
    everyone = tuple(range(transport.ranks))
    content = torch.zeros(size, dtype=torch.uint8)
    transport.all_reduce(torch.ones(1), everyone)
    start = time.perf_counter()
    if transport.rank in (0, 1):
        transport.exchange([P2PTensor(4 + pair, content)], []).wait()
    if transport.rank in (4, 5):
        transport.exchange([], [P2PTensor(pair, content)]).wait()
    transport.all_reduce(torch.ones(1), everyone)
    return time.perf_counter() - start


KILLED = """
import os, signal, threading, time, torch
from support.hosts import Hosts
from support.workers import Workers

def where(transport):
    return os.readlink("/proc/self/ns/net")

def hang(transport):
    transport.all_reduce(torch.ones(1), (0, 1)) if transport.rank else time.sleep(100)

if __name__ == "__main__":
    pool = Workers(2, enter=Hosts(nodes=2, ranks=1, nics=1).enter_namespace)
    print(*pool.run(where), flush=True)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    pool.run(hang)
"""


def test_nothing_is_left_of_a_killed_process(hosts, tmp_path):
    """Its workers wait for each other inside gloo when it is killed, the worst case."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    spaces = set(done.stdout.split())
    assert len(spaces) == 2 and spaces.isdisjoint(namespaces([os.getpid()]))
    deadline = time.monotonic() + 10
    while spaces & namespaces(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()):
        assert time.monotonic() < deadline, "processes still live in the namespaces"
        time.sleep(0.1)


def namespaces(processes):
    """Network namespaces in which these processes live; one that has just ended lives in none."""
    found = set()
    for process in processes:
        try:
            found.add(os.readlink(f"/proc/{process}/ns/net"))
        except OSError:
            continue
    return found


def test_ranks_share_cards_where_there_are_fewer(hosts):
    with Hosts(nodes=1, ranks=4, nics=2) as fewer:
        assert [fewer.near(rank) for rank in range(4)] == [0, 0, 1, 1]
        assert fewer.bytes_sent() == [[0, 0]]
