"""A policy as the set of addresses a sandbox may reach: interval arithmetic on IPv4. Pure, no I/O.

The kernel is given one answer instead of three lists and an order of precedence: disjoint ranges, one look-up
a packet, and the precedence is decided here, where it can be tested against every address.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network

from aenv.errors import InvalidRequest
from aenv.network.policy import NetworkPolicy

NEVER_REACHABLE = (
    "127.0.0.0/8",
    "169.254.0.0/16",  # link-local: the guest's own link, and the metadata service of most clouds
    "168.63.129.16/32",  # Azure's wire server: public by number, metadata by nature
)
"""Refused even when the operator empties `denied_cidrs`: no sandbox has business there."""

_LAST = 2**32 - 1


@dataclass(frozen=True)
class Range:
    """Addresses `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return str(IPv4Address(self.first))
        return f"{IPv4Address(self.first)}-{IPv4Address(self.last)}"


def reachable(policy: NetworkPolicy, never: Iterable[str]) -> list[Range]:
    """What `policy` leaves reachable: sorted, disjoint, not touching. `never` wins over the policy.

    Raises: InvalidRequest for text that is no CIDR, and for an IPv6 range to be allowed (sandboxes have no
    IPv6, so denying one holds).
    """
    allowed = _ranges(policy.allow_out, ipv6_holds=False)
    denied = _ranges(policy.deny_out, ipv6_holds=True)
    base = _without([Range(0, _LAST)], denied) if policy.internet else []
    return _without(_union([*base, *allowed]), _ranges(never, ipv6_holds=True))


def _ranges(cidrs: Iterable[str], *, ipv6_holds: bool) -> list[Range]:
    ranges = []
    for text in cidrs:
        network = _parse(text)
        if isinstance(network, IPv4Network):
            ranges.append(Range(int(network.network_address), int(network.broadcast_address)))
        elif not ipv6_holds:
            raise InvalidRequest(f"cannot allow {text!r}: sandboxes have no IPv6")
    return _union(ranges)


def _parse(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text, strict=False)
    except ValueError as error:
        raise InvalidRequest(
            f"{text!r} is not an IP address or CIDR", hint="domain names are not supported in network rules"
        ) from error


def _union(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for new in sorted(ranges, key=lambda item: item.first):
        if merged and new.first <= merged[-1].last + 1:
            merged[-1] = Range(merged[-1].first, max(merged[-1].last, new.last))
        else:
            merged.append(new)
    return merged


def _without(ranges: list[Range], holes: list[Range]) -> list[Range]:
    """Both sorted and disjoint; so is the result."""
    left: list[Range] = []
    for current in ranges:
        first = current.first
        for hole in holes:
            if hole.last < first:
                continue
            if hole.first > current.last:
                break
            if hole.first > first:
                left.append(Range(first, hole.first - 1))
            first = hole.last + 1
        if first <= current.last:
            left.append(Range(first, current.last))
    return left
