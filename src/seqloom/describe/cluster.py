"""Clusters: devices, nodes, NICs and links, by spelling (``8x8xH100``, ``4x8xH200+4x8xH100``), preset or file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from math import gcd
from pathlib import Path
from typing import Any

from seqloom.describe.presets import Presets
from seqloom.errors import SeqloomError
from seqloom.reader import build, is_file_name, read_mapping

_SPELLING = re.compile(r"(?:(\d+)x)?(\d+)x(.+)", re.IGNORECASE)
MOST = 1e9
"""No size or rate of a cluster is larger."""
MAX_RANKS = 1 << 15
"""GPUs of the largest cluster that plans are made for."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU (or one CPU process): memory, and what its data sheet promises."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    name: str
    memory_gib: float
    """Memory that the device reports, GiB."""
    peak_tflops: float
    """Dense bf16 peak, TFLOP/s."""
    hbm_gb_s: float
    """Memory bandwidth, GB/s."""

    def __post_init__(self) -> None:
        _positive(f"device {self.name}", self, "memory_gib", "peak_tflops", "hbm_gb_s")


def is_device(name: str, gpu: str) -> bool:
    """Whether the device of this name is what a driver calls `gpu`: "A100-80G" is "NVIDIA A100-SXM4-80GB"."""
    words = re.split(r"[\s-]+", gpu)
    return all(any(re.match(rf"{re.escape(part)}(?!\d)", word) for word in words) for part in name.split("-"))


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two devices: data-sheet bandwidth in one direction, and latency."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    name: str
    gb_s: float
    """GB/s in one direction: of one GPU for the link inside a node, of one NIC for the network."""
    latency_us: float
    """Time of a message without bytes, microseconds."""

    def __post_init__(self) -> None:
        _positive(f"link {self.name}", self, "gb_s")
        if not 0 <= self.latency_us <= MOST:
            raise SeqloomError(
                f"link {self.name}: latency_us = {self.latency_us}; it must be 0 or more, at most {MOST:.0e}"
            )


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equally many GPUs. Ranks are numbered node by node.

    ``8x8xH100`` is 8 nodes of 8 H100, with the links and NICs usual for that device. ``4x8xH200+4x8xH100`` has nodes of
    different devices, with the slowest links and the fewest NICs of them.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    name: str
    nodes: int
    gpus_per_node: int
    device: Device
    """Of all nodes; where they differ, that with the least memory, which plans count on everywhere."""
    intra: Link
    """Inside a node, per GPU."""
    nic: Link
    """Between nodes, per NIC."""
    nics_per_node: int
    nic_of_gpu: tuple[int, ...]
    """For each GPU of a node, the NIC that is near it: int[gpus_per_node]."""
    host_gib: float | None = None
    """Host memory of a node, GiB; None: not known."""
    speeds: tuple[float, ...] = ()
    """How many times as fast as its profile says each rank computes, or each node; none: all alike."""
    node_devices: tuple[Device, ...] = ()
    """Device of every node, where they differ."""

    def __post_init__(self) -> None:
        if self.host_gib is not None:
            _positive(f"cluster {self.name}", self, "host_gib")
        for size in ("nodes", "gpus_per_node", "nics_per_node"):
            if not isinstance(getattr(self, size), int):
                raise SeqloomError(f"cluster {self.name}: {size} = {getattr(self, size)!r}; it must be a whole number")
        _positive(f"cluster {self.name}", self, "nodes", "gpus_per_node", "nics_per_node")
        _check_size(self.nodes, self.gpus_per_node)
        near, gpus, nics = self.nic_of_gpu, self.gpus_per_node, self.nics_per_node
        wrong, idle = [nic for nic in near if not 0 <= nic < nics], nics - len(set(near))
        problem = ""
        if len(near) != gpus:
            problem = f"nic_of_gpu has {len(near)} entries for {gpus} GPUs of a node; give one NIC for each"
        elif wrong:
            problem = f"nic_of_gpu names NIC {wrong[0]} but a node has {nics}; use 0 to {nics - 1}"
        elif idle:
            problem = (
                f"NIC {next(nic for nic in count() if nic not in near)} of {nics} is near no GPU of a node (nic_of_gpu "
                f"is {list(near)}), so nothing could use it; name it there, or set nics_per_node to {nics - idle} and "
                "number the NICs from 0"
            )
        if self.node_devices and len(self.node_devices) != self.nodes:
            problem = f"node_devices has {len(self.node_devices)} entries; give one for each of the {self.nodes} nodes"
        if self.speeds and len(self.speeds) not in (self.nodes, self.ranks):
            problem = (
                f"speeds has {len(self.speeds)} entries; give one for each of the {self.nodes} nodes, or one for each "
                f"of the {self.ranks} GPUs"
            )
        if problem:
            raise SeqloomError(f"cluster {self.name}: {problem}")

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """A cluster by spelling (``8x8xH100``, ``8xH100``), by preset name, or from a .json or .toml file."""
        if is_file_name(text):
            path = Path(text)
            content = read_mapping(path)
            try:
                content = {"name": path.stem} | with_device_defaults(content)
            except SeqloomError as error:
                raise SeqloomError(f"{path}: {error}") from None
            return build(cls, content, str(path))
        if "+" in text:
            return _joined([cls.parse(part) for part in text.split("+")])
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            spelled = "spell it as nodes x GPUs x device, 8x8xH100 or 4x8xH200+4x8xH100, or give a .json or .toml file"
            return CLUSTERS.lookup(text, alternative=spelled)
        return cls.of(int(match[1] or 1), int(match[2]), match[3])

    @classmethod
    def of(cls, nodes: int, gpus_per_node: int, device: str) -> Cluster:
        """``nodes`` nodes of ``gpus_per_node`` devices with the links usual for that device."""
        name = DEVICES.lookup(device).device.name
        spelling = f"{gpus_per_node}x{name}" if nodes == 1 else f"{nodes}x{gpus_per_node}x{name}"
        return _built(spelling, {"nodes": nodes, "gpus_per_node": gpus_per_node, "device": name})

    @property
    def spelling(self) -> str:
        """``nodes x GPUs x device``; :meth:`parse` reads it back as this cluster with the usual links."""
        devices = self.node_devices or (self.device,) * self.nodes
        runs = [(name, len(list(same))) for name, same in groupby(device.name for device in devices)]
        return "+".join(("" if n == 1 else f"{n}x") + f"{self.gpus_per_node}x{name}" for name, n in runs)

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.nodes * self.gpus_per_node

    def nic_of(self, rank: int) -> int:
        """The NIC near ``rank``, numbered within its node."""
        if not 0 <= rank < self.ranks:
            raise SeqloomError(f"rank {rank} is not in cluster {self.name}; ranks are 0 to {self.ranks - 1}")
        return self.nic_of_gpu[rank % self.gpus_per_node]

    def subcluster(self, ranks: int) -> Cluster:
        """So many neighbouring ranks: inside a node, or some whole nodes. SeqloomError for any other number.

        Of nodes that differ they are as if all had `device`.
        """
        size = self.gpus_per_node
        if ranks == self.ranks:
            return self
        if not 1 <= ranks < self.ranks or (ranks > size and ranks % size):
            legal = [*range(1, size), *range(size, self.ranks + 1, size)]
            nearest = min(legal, key=lambda n: (abs(n - ranks), n))
            raise SeqloomError(
                f"{ranks} ranks of cluster {self.name}: a part lies inside a node of {size} or is some of "
                f"{self.nodes} whole nodes; use {nearest} ranks"
            )
        gpus = min(ranks, size)
        nics = {nic: number for number, nic in enumerate(dict.fromkeys(self.nic_of_gpu[:gpus]))}
        return replace(
            self,
            name=f"{ranks} of {self.name}",
            nodes=max(1, ranks // size),
            gpus_per_node=gpus,
            nics_per_node=len(nics),
            nic_of_gpu=tuple(nics[nic] for nic in self.nic_of_gpu[:gpus]),
            speeds=(),
            node_devices=(),
            host_gib=None if self.host_gib is None else self.host_gib * gpus / size,
        )

    @property
    def gpus_per_nic(self) -> int:
        """The most GPUs that share one NIC."""
        return max(self.nic_of_gpu.count(nic) for nic in range(self.nics_per_node))


@dataclass(frozen=True, slots=True)
class DevicePreset:
    """A device and what usually joins it to others."""

    device: Device
    intra: Link
    nic: Link
    gpus_per_nic: int
    source: str
    """Where the figures come from."""


def with_device_defaults(content: dict[str, Any]) -> dict[str, Any]:
    """Fill in what the device's preset knows when ``device`` is a name; other keys stay as they are.

    A description in this short form, in a file or among the presets, needs ``nodes``, ``gpus_per_node`` and
    ``device``.
    """
    content = _with_node_devices(content)
    device, gpus = content.get("device"), content.get("gpus_per_node")
    if not isinstance(gpus, int):
        return content  # the type check that follows says so
    nodes = content.get("nodes")
    _check_size(nodes if isinstance(nodes, int) else 1, gpus)
    if isinstance(device, str):
        usual = DEVICES.lookup(device)
        nics = -(-gpus // usual.gpus_per_nic)
        links = {"intra": usual.intra, "nic": usual.nic, "nics_per_node": nics}
        content = links | content | {"device": usual.device}
    nics = content.get("nics_per_node")
    if "nic_of_gpu" not in content and isinstance(nics, int):
        content = content | {"nic_of_gpu": tuple(gpu * nics // gpus for gpu in range(gpus))}
    return content


def _with_node_devices(content: dict[str, Any]) -> dict[str, Any]:
    """Look up devices of nodes that are names; the one with the least memory is the cluster's, with slowest links."""
    names = content.get("node_devices")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        return content
    presets = [DEVICES.lookup(name) for name in names]
    least = min((preset.device for preset in presets), key=lambda device: (device.memory_gib, device.peak_tflops))
    intra, nic = (min((getattr(p, link) for p in presets), key=lambda each: each.gb_s) for link in ("intra", "nic"))
    shared, gpus = max(preset.gpus_per_nic for preset in presets), content.get("gpus_per_node")
    nics = {"nics_per_node": -(-gpus // shared)} if isinstance(gpus, int) else {}
    usual = {"nodes": len(names), "device": least, "intra": intra, "nic": nic}
    return usual | nics | content | {"node_devices": tuple(preset.device for preset in presets)}


def _joined(parts: Sequence[Cluster]) -> Cluster:
    """One cluster of the nodes of several."""
    sizes = [part.gpus_per_node for part in parts]
    if len(set(sizes)) > 1:
        common = gcd(*sizes)
        split = "+".join(f"{part.ranks // common}x{common}x{part.device.name}" for part in parts)
        raise SeqloomError(
            f"nodes of {' and '.join(map(str, dict.fromkeys(sizes)))} GPUs; plans need nodes of equally many: cut them "
            f"into nodes of {common}, {split}"
        )
    devices = [device for part in parts for device in part.node_devices or (part.device,) * part.nodes]
    if len(set(devices)) == 1:
        return Cluster.of(len(devices), sizes[0], devices[0].name)
    built = _built("", {"gpus_per_node": sizes[0], "node_devices": [device.name for device in devices]})
    return replace(built, name=built.spelling)


def _check_size(nodes: int, gpus_per_node: int) -> None:
    """Refuse a cluster that is too large to plan for, before anything is made of its size."""
    if max(nodes, 1) * max(gpus_per_node, 1) > MAX_RANKS:
        raise SeqloomError(
            f"a cluster of {nodes:,} nodes with {gpus_per_node:,} GPUs each; plans are made for {MAX_RANKS:,} GPUs at "
            "most"
        )


def _built(name: str, entry: dict[str, Any]) -> Cluster:
    return Cluster(name=name, **with_device_defaults(entry))


def _device(name: str, entry: dict[str, Any]) -> DevicePreset:
    return DevicePreset(
        device=Device(name=name, **entry["device"]),
        intra=Link(**entry["intra"]),
        nic=Link(**entry["nic"]),
        gpus_per_nic=entry["gpus_per_nic"],
        source=entry["source"],
    )


def _positive(what: str, value: object, *names: str) -> None:
    for name in names:
        number = getattr(value, name)
        if not number > 0:
            raise SeqloomError(f"{what}: {name} = {number}; it must be positive")
        if number > MOST:
            raise SeqloomError(f"{what}: {name} = {number:.3g}; it must be at most {MOST:.0e}")


DEVICES: Presets[DevicePreset] = Presets("device", "devices.json", _device)
"""Every known device, by name."""

CLUSTERS: Presets[Cluster] = Presets("cluster", "clusters.json", _built)
"""Every preset cluster, by name."""
