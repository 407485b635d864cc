"""Which DNS servers sandboxes use."""

from ipaddress import IPv4Address
from pathlib import Path

from aenv.errors import InvalidRequest
from aenv.settings import Settings

_RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
"""The second lists the real servers where the first names only systemd-resolved's stub on loopback."""


def resolvers(settings: Settings, files: tuple[Path, ...] = _RESOLV_CONF) -> tuple[str, ...]:
    """The configured servers, else those of the first file that names one a sandbox could reach; () when none
    does.

    A sandbox has its own loopback and no IPv6, so servers there do not count. Raises: InvalidRequest for a
    malformed setting.
    """
    if settings.dns_servers:
        for text in settings.dns_servers:
            if not _usable(text):
                raise InvalidRequest(f"setting dns_servers: {text!r} is not an IPv4 address off loopback")
        return tuple(settings.dns_servers)
    for file in files:
        if servers := _nameservers(file):
            return servers
    return ()


def _nameservers(file: Path) -> tuple[str, ...]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ()
    words = (line.split() for line in lines)
    named = [entry[1] for entry in words if len(entry) >= 2 and entry[0] == "nameserver"]
    return tuple(dict.fromkeys(address for address in named if _usable(address)))


def _usable(text: str) -> bool:
    try:
        address = IPv4Address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified or address.is_multicast)
