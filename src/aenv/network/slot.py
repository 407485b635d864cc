"""What a slot is, and the names, addresses and numbers that follow from its index. No I/O.

    guest eth0 169.254.0.21 ── tap0 169.254.0.22 │ uplink ══ veth ══ av<instance>-<index> │ host
                                    namespace aenv-<instance>-<index>                       route: host
                                    address via uplink

Everything left of the veth is the same in every slot, hardware addresses too: it is part of every snapshot,
and a restored guest goes on with the neighbour it remembers.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from pathlib import Path

from aenv.errors import InvalidRequest
from aenv.ids import InstanceId
from aenv.settings import Settings

TAP = "tap0"
UPLINK = "uplink"
GUEST_ADDRESS = "169.254.0.21"
GATEWAY_ADDRESS = "169.254.0.22"
GUEST_PREFIX_LENGTH = 30
GUEST_MAC = "06:a9:fe:00:00:15"
GATEWAY_MAC = "06:a9:fe:00:00:16"

NETNS_DIRECTORY = Path("/run/netns")
"""Where `ip netns` looks, so that an operator can step into a sandbox's network with the tool at hand."""

_LAST_INDEX = 32767


@dataclass(frozen=True)
class Slot:
    """A network a VM can be started in. Nothing in it changes while it exists; its policy is the kernel's
    state."""

    index: int
    """1..32767, unique on this host among all nodes."""
    netns: Path
    host_address: str
    """The only address by which the host reaches the guest; all its ports lead there."""
    uid: int
    """The user its VMM runs as; unique on this host because the index is."""
    tap: str = TAP
    mac: str = GUEST_MAC
    guest_address: str = GUEST_ADDRESS
    gateway_address: str = GATEWAY_ADDRESS


class SlotPlan:
    """All slots one node could have.

    Raises: InvalidRequest when the configured ranges are malformed, too small or overlap.
    """

    def __init__(self, settings: Settings, instance: InstanceId) -> None:
        self._settings = settings
        self._instance = instance
        self.host_range = _range("host_interaction_cidr", settings.host_interaction_cidr)
        self.veth_range = _range("veth_cidr", settings.veth_cidr)
        guest_range = IPv4Network(f"{GATEWAY_ADDRESS}/{GUEST_PREFIX_LENGTH}", strict=False)
        for one, other in (
            (self.host_range, self.veth_range),
            (self.host_range, guest_range),
            (self.veth_range, guest_range),
        ):
            if one.overlaps(other):
                raise InvalidRequest(
                    f"network ranges {one} and {other} overlap",
                    hint="set AENV_HOST_INTERACTION_CIDR and AENV_VETH_CIDR to ranges of their own",
                )
        self.last_index = min(_LAST_INDEX, self.host_range.num_addresses - 2, self.veth_range.num_addresses // 2 - 1)
        if self.last_index < 1:
            raise InvalidRequest("the network ranges hold no slot", hint="use at least a /30 for each")
        self.table = f"aenv_{instance}"
        """The node's nftables table on the host."""
        self.link_prefix = f"av{instance}-"
        self._link_name = re.compile(rf"av{re.escape(instance)}-([1-9][0-9]*)")
        self._netns_name = re.compile(rf"aenv-{re.escape(instance)}-([1-9][0-9]*)")

    def slot(self, index: int) -> Slot:
        return Slot(
            index=index,
            netns=NETNS_DIRECTORY / f"aenv-{self._instance}-{index}",
            host_address=str(self.host_range[index]),
            uid=self._settings.vmm_uid(index),
        )

    def link(self, index: int) -> str:
        """Name of the host's end of the veth pair; 12 of the 15 characters a name may have."""
        return f"{self.link_prefix}{index}"

    def link_mac(self, index: int) -> str:
        """Of the host's end. Given, not random: udev rewrites a random one while the other end already
        remembers it."""
        return f"06:a9:ff:00:{index >> 8:02x}:{index & 255:02x}"

    def host_end(self, index: int) -> str:
        """Address of the host's end of the /31."""
        return str(self.veth_range[2 * index])

    def slot_end(self, index: int) -> str:
        """Address of the namespace's end of the /31."""
        return str(self.veth_range[2 * index + 1])

    def index_of_link(self, name: str) -> int | None:
        """The index when `name` is a link of this node, else None."""
        match = self._link_name.fullmatch(name)
        return int(match[1]) if match else None

    def index_of_netns(self, name: str) -> int | None:
        """The index when `name` is a namespace of this node, else None."""
        match = self._netns_name.fullmatch(name)
        return int(match[1]) if match else None


def _range(setting: str, text: str) -> IPv4Network:
    try:
        network = ip_network(text)
    except ValueError as error:
        raise InvalidRequest(f"setting {setting}: {error}") from error
    if not isinstance(network, IPv4Network):
        raise InvalidRequest(f"setting {setting}: {text} is not an IPv4 range")
    return network
