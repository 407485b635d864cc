"""The few rtnetlink requests that slots need, typed, with errors as OSError.

Source: rtnetlink(7). pyroute2 does the messages; its own exceptions do not leave this module.
"""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from pyroute2 import IPRoute  # type: ignore[attr-defined]
from pyroute2.netlink.exceptions import NetlinkError

_MAIN_TABLE = 254
_PERMANENT = 0x80
"""NUD_PERMANENT (linux/neighbour.h)."""
_ONLINK = 0x4
"""RTNH_F_ONLINK (linux/rtnetlink.h): the gateway is on this link, whatever addresses the link has."""


class Netlink:
    """A netlink socket of the namespace the thread was in when it was made; it stays with that namespace.

    Every call raises OSError with the kernel's errno; what exists already is FileExistsError.
    """

    def __init__(self) -> None:
        self._socket: Any = IPRoute()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def add_veth(self, name: str, *, mac: str, peer: str, peer_netns: int) -> int:
        """A veth pair, one end here, the other named `peer` in the namespace of that descriptor; both down.

        Returns: the interface index of this end.
        """
        with _os_errors(f"add link {name}"):
            other = {"ifname": peer, "net_ns_fd": peer_netns}
            self._socket.link("add", ifname=name, kind="veth", address=mac, peer=other)
        return self.link_index(name)

    def link_index(self, name: str) -> int:
        """Raises: OSError ENODEV when there is no such link."""
        with _os_errors(f"look up link {name}"):
            found = self._socket.link_lookup(ifname=name)
        if not found:
            raise OSError(errno.ENODEV, f"no link {name}")
        return int(found[0])

    def link_names(self) -> list[str]:
        with _os_errors("list links"):
            return [link.get("ifname") for link in self._socket.get_links()]

    def set_mac(self, link: int, mac: str) -> None:
        with _os_errors(f"set hardware address {mac}"):
            self._socket.link("set", index=link, address=mac)

    def set_up(self, link: int) -> None:
        with _os_errors("set link up"):
            self._socket.link("set", index=link, state="up")

    def delete_link(self, name: str) -> None:
        """Its addresses and routes go with it. An absent link is fine."""
        try:
            link = self.link_index(name)
            with _os_errors(f"delete link {name}"):
                self._socket.link("del", index=link)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def add_neighbour(self, link: int, address: str, mac: str) -> None:
        """For good: no request is ever made for it."""
        with _os_errors(f"add neighbour {address}"):
            self._socket.neigh("add", ifindex=link, dst=address, lladdr=mac, state=_PERMANENT)

    def add_address(self, link: int, address: str, prefix_length: int) -> None:
        with _os_errors(f"add address {address}"):
            self._socket.addr("add", index=link, address=address, prefixlen=prefix_length)

    def add_route(self, destination: str, *, link: int, gateway: str) -> None:
        """A route that must be new, through a gateway taken to be on `link`."""
        with _os_errors(f"add route {destination}"):
            self._socket.route("add", dst=destination, gateway=gateway, oif=link, flags=_ONLINK)

    def host_routes(self) -> list[tuple[str, int]]:
        """(address, interface index) of every /32 in the main table."""
        with _os_errors("list routes"):
            routes = self._socket.get_routes(family=socket.AF_INET, table=_MAIN_TABLE)
            return [(route.get("dst"), route.get("oif")) for route in routes if route["dst_len"] == 32]


@contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        raise OSError(error.code, f"{what}: {error.args[1] if len(error.args) > 1 else error}") from error
