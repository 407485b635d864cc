"""What network slots need of the host itself: programs, devices, rights, kernel settings, and the node's
table."""

from contextlib import suppress
from pathlib import Path

from aenv.errors import HostUnsupported, OperationFailed
from aenv.network import namespace, nft
from aenv.network.slot import NETNS_DIRECTORY
from aenv.network.tap import TUN

_CAPABILITIES = {12: "CAP_NET_ADMIN", 21: "CAP_SYS_ADMIN"}
"""Bits of linux/capability.h."""

_AT_LEAST = {
    # The neighbour table is one for all namespaces, and each slot in use has three entries in it.
    "ipv4/neigh/default/gc_thresh1": 32768,
    "ipv4/neigh/default/gc_thresh2": 65536,
    "ipv4/neigh/default/gc_thresh3": 131072,
    # The host's connection table carries the flows of all sandboxes.
    "netfilter/nf_conntrack_max": 1048576,
}
"""Kernel settings that limit how many slots a host can have. Raised, never lowered."""


def missing_capabilities(status: str) -> list[str]:
    """Names of the needed capabilities that are not effective, from the text of /proc/PID/status."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    effective = int(fields.get("CapEff", "0"), 16)
    return [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]


def require_host(tun: Path = TUN) -> Path:
    """Check what cannot be made up for. Returns the path of nft.

    Raises: HostUnsupported naming the first thing that is missing and how to get it.
    """
    if missing := missing_capabilities(Path("/proc/thread-self/status").read_text()):
        raise HostUnsupported(f"network namespaces need {' and '.join(missing)}", hint="run the server as root")
    if not tun.exists():
        raise HostUnsupported(
            f"{tun} does not exist",
            hint="load the kernel module tun; in a container, pass the device through",
        )
    return nft.find_nft()


def prepare_host(nft_program: Path, rules: str) -> None:
    """Make the host a router with the node's table in place. Idempotent.

    Forwarding stays on afterwards: others may have come to need it. Raises: HostUnsupported.
    """
    try:
        # Only when it is off: writing it also resets the setting of every link.
        if Path("/proc/sys/net/ipv4/ip_forward").read_text().strip() != "1":
            namespace.set_sysctl("ipv4/ip_forward", 1)
        namespace.prepare_directory(NETNS_DIRECTORY)
    except OSError as error:
        raise HostUnsupported(
            f"cannot set up the host's network: {error}",
            hint="the server needs to write /proc/sys/net and to mount below /run",
        ) from error
    for name, value in _AT_LEAST.items():
        _raise_to(name, value)
    try:
        nft.apply(nft_program, rules)
    except OperationFailed as error:
        raise HostUnsupported(
            f"this kernel does not take the packet filter: {error.message}",
            hint="it needs nf_tables with nat, conntrack and inet support",
        ) from error


def _raise_to(name: str, value: int) -> None:
    # Limits, not needs: where they cannot be set (in a container) the host carries fewer slots.
    path = Path("/proc/sys/net", name)
    with suppress(OSError, ValueError):
        if int(path.read_text()) < value:
            path.write_text(str(value))
