"""Processes of this machine, read from /proc."""

from __future__ import annotations

from pathlib import Path


def _processes() -> dict[int, tuple[int, str]]:
    """Parent and command line of every process."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            found[int(folder.name)] = parent, (folder / "cmdline").read_text()
        except OSError:
            continue
    return found


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, without the trackers of multiprocessing."""
    return sorted(p for p, (parent, line) in _processes().items() if parent == pid and "resource_tracker" not in line)


def descendants_of(pid: int) -> list[int]:
    """Children of a process, and theirs."""
    found, parents = [], _processes()
    level = [pid]
    while level:
        level = sorted(child for child, (parent, _) in parents.items() if parent in level)
        found += level
    return found


def ranks_of(launcher: int) -> list[int]:
    """Processes of the ranks, in their order: children of the launcher, or of the process that forks for it."""
    servers = [pid for pid in children_of(launcher) if "forkserver" in _processes().get(pid, (0, ""))[1]]
    return children_of(servers[0] if servers else launcher)


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; one that has stays until its parent looks at how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
