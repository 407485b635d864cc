"""Control groups of VMM processes, version 2 or 1, whichever this host has its controllers in.

Groups are named `aenv-<instance>/<name>` below each hierarchy's root, so a sweep of one node's leftovers
touches no other node's. What is missing is not an error: the limits then do not apply, and
`ControlGroups.problems` says so.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CONTROLLERS = ("memory", "pids", "cpu")
_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    memory_mib: int
    pids: int
    vcpus: int
    """Share of the CPU under contention is proportional to it; idle CPU is free to all."""
    background: bool = False
    """A tenth of that share, until `ControlGroup.promote`."""


class ControlGroups:
    """The hierarchies in use on this host, and this node's part of them."""

    def __init__(self, instance_id: str, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._node = f"aenv-{instance_id}"
        self._roots: list[tuple[Path, tuple[str, ...], int]] = []
        missing = set(_CONTROLLERS)
        for root, version, options in _mounts(mountinfo):
            names = _read(root / "cgroup.controllers").split() if version == 2 else options
            usable = tuple(name for name in _CONTROLLERS if name in names and name in missing)
            if usable and _enable(root, usable, version):
                self._roots.append((root, usable, version))
                missing -= set(usable)
        self.problems = [f"no usable {name} control group: sandboxes are not limited by it" for name in sorted(missing)]

    def create(self, name: str, limits: Limits) -> ControlGroup:
        """A group with its limits set, in every hierarchy. A host that refuses one gets no limit from it."""
        directories = []
        for root, controllers, version in self._roots:
            directory = root / self._node / name
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                _enable(directory.parent, controllers, version)
                directories.append(directory)
                if "cpu" in controllers:
                    file, weight = _weight(os.cpu_count() or 1, version)
                    _write(directory.parent / file, str(weight))  # all VMs together: a process on every CPU
            for controller in controllers:
                for file, value in _settings(controller, limits, version):
                    _write(directory / file, value)
        return ControlGroup(directories)

    def named(self, name: str) -> ControlGroup:
        """The group an earlier `create` made, for another server process."""
        return ControlGroup([root / self._node / name for root, _, _ in self._roots])

    def remove_empty(self) -> None:
        """Remove groups that hold no process, and this node's part of the hierarchies when none is left."""
        for root, _, _ in self._roots:
            node = root / self._node
            for directory in [*node.glob("*/"), node]:
                with contextlib.suppress(OSError):
                    directory.rmdir()


@dataclass(frozen=True)
class ControlGroup:
    directories: Sequence[Path]

    def add(self, pid: int) -> None:
        """Move the process in; where that is refused it goes on without the limit."""
        for directory in self.directories:
            _write(directory / "cgroup.procs", str(pid))

    def promote(self, vcpus: int) -> None:
        """Give a group made for the background the share of `vcpus`."""
        for directory in self.directories:
            for file, weight in (_weight(vcpus, 1), _weight(vcpus, 2)):
                if (directory / file).exists():
                    _write(directory / file, str(weight))

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has killed a process of the group because of its memory limit."""
        texts = [
            _read(directory / name)
            for directory in self.directories
            for name in ("memory.events", "memory.oom_control")
        ]
        return any(re.search(r"^oom_kill [1-9]", text, re.MULTILINE) for text in texts)

    def remove(self) -> None:
        """Remove the group, which must hold no process, and the node's when this was its last. Idempotent."""
        for directory in self.directories:
            with contextlib.suppress(OSError):
                directory.rmdir()
                directory.parent.rmdir()


def _enable(directory: Path, controllers: Sequence[str], version: int) -> bool:
    """Whether groups below `directory` have these controllers; version 2 has to be told so."""
    if version == 1:
        return os.access(directory, os.W_OK)
    try:
        (directory / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers))
    except OSError:
        return False
    return True


def _weight(vcpus: int, version: int) -> tuple[str, int]:
    """(file, value) by which a group weighs as much as so many ordinary processes."""
    return ("cpu.weight", min(100 * vcpus, 10_000)) if version == 2 else ("cpu.shares", 1024 * vcpus)


def _settings(controller: str, limits: Limits, version: int) -> list[tuple[str, str]]:
    match controller, version:
        case "memory", 2:
            return [("memory.max", str(limits.memory_mib * _MIB)), ("memory.oom.group", "1")]
        case "memory", _:
            return [("memory.limit_in_bytes", str(limits.memory_mib * _MIB))]
        case "cpu", _:
            file, weight = _weight(limits.vcpus, version)
            return [(file, str(weight // 10 if limits.background else weight))]
        case _:
            return [("pids.max", str(limits.pids))]


def _mounts(mountinfo: Path) -> list[tuple[Path, int, list[str]]]:
    """(mount point, version, controllers named by the mount), version 2 first."""
    found = []
    for line in _read(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            found.append((Path(before.split()[4]), 2 if kind == "cgroup2" else 1, options.split(",")))
    return sorted(found, key=lambda mount: -mount[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write(path: Path, value: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(value)
