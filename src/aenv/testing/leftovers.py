"""What one node holds on its host: processes, namespaces, links, mounts, firewall tables, routes, control groups.

Host-global names carry the node's instance id and command lines its directories, so other nodes are not counted.
"""

import subprocess
from pathlib import Path


def held_by(instance: str, directory: Path) -> list[str]:
    """What there is now of the node with this instance id and state below `directory`, as `kind: thing`."""
    marks = (f"aenv-{instance}", f"aenv_{instance}", f"av{instance}", str(directory))
    kinds = {
        "process": _processes(),
        "namespace": _lines("ip", "netns", "list"),
        "link": [path.name for path in Path("/sys/class/net").iterdir()],
        "mount": [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()],
        "table": _lines("nft", "list", "tables"),
        "route": _lines("ip", "-4", "route", "show", "table", "all"),
        "control group": [str(path) for path in Path("/sys/fs/cgroup").glob("*/aenv-*")]
        + [str(path) for path in Path("/sys/fs/cgroup").glob("aenv-*")],
    }
    return [
        f"{kind}: {thing}" for kind, things in kinds.items() for thing in things if any(mark in thing for mark in marks)
    ]


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def _processes() -> list[str]:
    """Command lines of our programs and VMMs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if Path(command[0]).name.startswith(("blockd", "edge", "qemu-system")):
            found.append(f"{entry.name} {' '.join(command)}")
    return found
