"""What a node may leave on a host: processes, namespaces, links, mounts, firewall tables, routes, control groups.
Compared before and after.
"""

import subprocess
from dataclasses import dataclass, fields
from pathlib import Path


def _lines(*command: str) -> frozenset[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return frozenset(line.strip() for line in result.stdout.splitlines() if line.strip())


def _processes() -> frozenset[str]:
    """Our programs and VMMs, as `pid command`; kernel threads and others' processes are not ours to count."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        name = Path(command[0].decode(errors="replace")).name
        if name in ("envd", "blockd", "edge") or name.startswith("qemu-system"):
            found.add(f"{entry.name} {name}")
    return frozenset(found)


def _cgroups() -> frozenset[str]:
    return frozenset(str(p) for p in Path("/sys/fs/cgroup").glob("**/aenv*") if p.is_dir())


@dataclass(frozen=True)
class Leftovers:
    processes: frozenset[str]
    namespaces: frozenset[str]
    links: frozenset[str]
    mounts: frozenset[str]
    tables: frozenset[str]
    routes: frozenset[str]
    cgroups: frozenset[str]

    @classmethod
    def now(cls) -> "Leftovers":
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        return cls(
            processes=_processes(),
            namespaces=_lines("ip", "netns", "list"),
            links=frozenset(p.name for p in Path("/sys/class/net").iterdir()),
            mounts=frozenset(line.split()[4] for line in mounts),
            tables=_lines("nft", "list", "tables"),
            routes=_lines("ip", "-4", "route", "show", "table", "all"),
            cgroups=_cgroups(),
        )

    def grown(self) -> list[str]:
        """What is there now and was not then, as `kind: thing`."""
        now = Leftovers.now()
        return [
            f"{field.name}: {thing}"
            for field in fields(self)
            for thing in sorted(getattr(now, field.name) - getattr(self, field.name))
        ]
