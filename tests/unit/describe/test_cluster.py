"""Clusters by spelling, by name and from files."""

from __future__ import annotations

import json

import pytest

from seqloom.describe import CLUSTERS, DEVICES, Cluster, Device, Link
from seqloom.errors import SeqloomError

SHORT = {"nodes": 2, "gpus_per_node": 4, "device": "H100"}
LINK = {"name": "wire", "gb_s": 10, "latency_us": 5}
LONG = {
    "name": "own",
    "nodes": 2,
    "gpus_per_node": 4,
    "device": {"name": "X1", "memory_gib": 24, "peak_tflops": 100, "hbm_gb_s": 900},
    "intra": LINK,
    "nic": LINK,
    "nics_per_node": 2,
    "nic_of_gpu": [1, 1, 0, 0],
}


@pytest.fixture
def parse(tmp_path):
    def parse(content, name="c.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return Cluster.parse(str(path))

    return parse


def test_spelling():
    cluster = Cluster.parse("8x8xH100")
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node, cluster.ranks) == ("8x8xH100", 8, 8, 64)
    assert cluster.device.name == "H100" and cluster.intra.gb_s == 450
    assert cluster.nics_per_node == 8 and cluster.nic_of_gpu == tuple(range(8))
    assert cluster.nic.gb_s * cluster.nics_per_node == 400 and cluster.gpus_per_nic == 1
    assert cluster.nic_of(13) == 5
    assert Cluster.parse("8xH100") == Cluster.parse("1x8xh100") == Cluster.parse(" 8xh100 ")
    assert Cluster.parse("8xH100").name == Cluster.parse("8xH100").spelling == "8xH100"
    with pytest.raises(SeqloomError, match="rank 64 is not in cluster 8x8xH100; ranks are 0 to 63"):
        cluster.nic_of(64)


def test_nodes_of_several_devices():
    cluster = Cluster.parse("4x8xH200+4x8xH100")
    assert (cluster.name, cluster.nodes, cluster.ranks) == ("4x8xH200+4x8xH100", 8, 64)
    assert [device.name for device in cluster.node_devices] == ["H200"] * 4 + ["H100"] * 4
    assert cluster.device.name == "H100"  # the least memory
    assert Cluster.parse(cluster.spelling) == cluster
    assert Cluster.parse("8xH100+8xH100") == Cluster.parse("2x8xH100")
    slower = Cluster.parse("8xH100+8xA100-40G")
    assert slower.nic.gb_s == 25 and slower.nics_per_node == 2  # the slowest links, the fewest NICs
    assert cluster.subcluster(8).node_devices == ()


def test_nodes_of_several_devices_in_a_file(parse):
    cluster = parse({"gpus_per_node": 8, "node_devices": ["H200", "H100"], "speeds": [1, 0.9]})
    assert cluster.spelling == "8xH200+8xH100" and cluster.nodes == 2 and cluster.speeds == (1, 0.9)


def test_nodes_of_unequal_size_are_refused_with_the_way_out():
    with pytest.raises(SeqloomError, match=r"nodes of 8 and 4 GPUs; .* cut them into nodes of 4, 4x4xH200.2x4xH100"):
        Cluster.parse("2x8xH200+2x4xH100")
    with pytest.raises(SeqloomError, match="unknown device"):
        Cluster.parse("8xH100+8xH99")


@pytest.mark.parametrize("key", ["speeds", "node_devices"])
def test_so_many_speeds_and_devices_as_nodes(parse, key):
    one = {"speeds": 1.0, "node_devices": "H100"}[key]
    with pytest.raises(SeqloomError, match=f"{key} has 3 entries; give one for each of the 2 nodes"):
        parse(SHORT | {key: [one] * 3})


def test_papers():
    flexsp = Cluster.parse("8x8xA100-40G")
    assert flexsp.device.memory_gib == 40
    assert flexsp.nic.gb_s * flexsp.nics_per_node == 50  # 400 Gb/s
    assert flexsp.nic_of_gpu == (0, 0, 0, 0, 1, 1, 1, 1) and flexsp.gpus_per_nic == 4
    zeppelin = Cluster.parse("zeppelin-a800")
    assert zeppelin.nics_per_node == 4 and zeppelin.intra.gb_s == 200
    assert Cluster.parse("8x8xH200").device.memory_gib == 140


def test_presets():
    names = {"flexsp-a100", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "pcie-box", "laptop", "h200-and-h100"}
    assert names <= set(CLUSTERS)
    for name, cluster in CLUSTERS.items():
        assert Cluster.parse(name) is cluster and cluster.name == name
    assert {"A100-40G", "A100-80G", "A800", "H100", "H200", "B200", "L40S", "CPU"} <= set(DEVICES)


def test_odd_sizes_have_a_nic_for_every_gpu():
    for gpus in range(1, 12):
        for device in DEVICES:
            cluster = Cluster.parse(f"3x{gpus}x{device}")
            assert set(cluster.nic_of_gpu) == set(range(cluster.nics_per_node))
            assert cluster.gpus_per_nic <= DEVICES[device].gpus_per_nic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8x8xH1000", "unknown device 'H1000'; did you mean H100"),
        ("8x8xA100", "did you mean A100-40G, A100-80G"),
        (
            "dgx-h10",
            "unknown cluster 'dgx-h10'; did you mean .*dgx-h100.*or spell it as nodes x GPUs x device",
        ),
        ("8x0xH100", "gpus_per_node = 0; it must be positive"),
        ("0x8xH100", "nodes = 0"),
        ("100000000000x8xH100", "100,000,000,000 nodes with 8 GPUs each; plans are made for 32,768 GPUs at most"),
        ("1000000x8xH100", "1,000,000 nodes with 8 GPUs each; plans are made for 32,768 GPUs at most"),
        ("8x100000000000xH100", "8 nodes with 100,000,000,000 GPUs each"),
        ("H100", "unknown cluster 'H100'"),
        ("nowhere.toml", "does not exist"),
    ],
)
def test_bad_spellings_are_refused(text, message):
    with pytest.raises(SeqloomError, match=message):
        Cluster.parse(text)


@pytest.mark.parametrize("sizes", [(-1, 10**12), (10**12, -1), (0, 10**12)])
def test_a_size_that_is_not_positive_hides_no_other(parse, sizes):
    with pytest.raises(SeqloomError, match="plans are made for 32,768 GPUs at most"):
        parse({**SHORT, "nodes": sizes[0], "gpus_per_node": sizes[1]})


def test_short_file(parse):
    cluster = parse(SHORT)
    assert cluster.name == "c"
    assert cluster == Cluster("c", 2, 4, *(getattr(Cluster.parse("2x4xH100"), name) for name in REST))
    toml = 'nodes = 2\ngpus_per_node = 4\ndevice = "H100"\nnics_per_node = 2\n'
    assert parse(toml, "c.toml").nic_of_gpu == (0, 0, 1, 1)


REST = ("device", "intra", "nic", "nics_per_node", "nic_of_gpu")


def test_long_file(parse):
    assert parse(LONG) == Cluster(
        name="own",
        nodes=2,
        gpus_per_node=4,
        device=Device("X1", 24, 100, 900),
        intra=Link("wire", 10, 5),
        nic=Link("wire", 10, 5),
        nics_per_node=2,
        nic_of_gpu=(1, 1, 0, 0),
    )


@pytest.mark.parametrize(
    ("gpus", "nics", "near"),
    [(8, 1, (0,) * 8), (8, 3, (0, 0, 0, 1, 1, 1, 2, 2)), (1, 1, (0,)), (5, 5, (0, 1, 2, 3, 4))],
)
def test_few_nics_are_shared_evenly(parse, gpus, nics, near):
    cluster = parse({**SHORT, "gpus_per_node": gpus, "nics_per_node": nics})
    assert cluster.nic_of_gpu == near
    assert cluster.gpus_per_nic == max(near.count(nic) for nic in range(nics))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {**SHORT, "nics_per_nod": 2},
            r"c\.json: unknown key 'nics_per_nod'; did you mean 'nics_per_node'\?$",
        ),
        (
            {"nodes": 1, "gpu_per_node": 4, "device": "H100"},
            "unknown key 'gpu_per_node'; did you mean 'gpus_per_node'",
        ),
        ({**SHORT, "zzz": 2}, "unknown key 'zzz'; legal keys: name, nodes"),
        ({**SHORT, "intra": {**LINK, "gbs": 3}}, "unknown key 'intra.gbs'; did you mean 'gb_s'"),
        ({**SHORT, "device": "H10"}, r"c\.json: unknown device 'H10'; did you mean H100"),
        ({**SHORT, "nodes": "many"}, "nodes = 'many': input should be a valid integer"),
        ({**SHORT, "nodes": 0}, "nodes = 0; it must be positive"),
        ({**SHORT, "nic_of_gpu": [0, 1]}, "nic_of_gpu has 2 entries for 4 GPUs of a node"),
        ({**SHORT, "nic_of_gpu": [0, 1, 2, 9]}, "names NIC 9 but a node has 4; use 0 to 3"),
        ({**SHORT, "nic_of_gpu": [0, 1, 3, 3]}, r"NIC 2 of 4 is near no GPU.*set nics_per_node to 3"),
        ({**SHORT, "nics_per_node": 2, "nic_of_gpu": [1, 1, 1, 1]}, "NIC 0 of 2 is near no GPU"),
        ({**SHORT, "gpus_per_node": 1, "nics_per_node": 4}, "NIC 1 of 4 is near no GPU.*set nics_per_node to 1"),
        ({**SHORT, "intra": {**LINK, "gb_s": 0}}, "gb_s = 0.0; it must be positive"),
        ({**SHORT, "intra": {**LINK, "latency_us": -1}}, "latency_us = -1.0; it must be 0 or more"),
        ({"nodes": 2, "device": "H100"}, "key 'gpus_per_node' is missing"),
        ("[1]", "holds list, not an object"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_files_are_refused(parse, content, message):
    with pytest.raises(SeqloomError, match=message):
        parse(content)


def test_bad_values_are_refused():
    with pytest.raises(SeqloomError, match="memory_gib = -1"):
        Device("X", -1, 1, 1)
    with pytest.raises(SeqloomError, match=r"nodes = 1.5; it must be a whole number"):
        Cluster("c", 1.5, 1, Device("X", 1, 1, 1), Link("a", 1, 0), Link("a", 1, 0), 1, (0,))
