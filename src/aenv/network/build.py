"""Makes, checks and frees one slot. Synchronous, for a fresh thread; knows the kernel, no pool and no ledger.

An index belongs to whoever adds the route to its host address first: the kernel's table is the arbiter
among all nodes of a host, whatever files they keep. The route goes with its link, so a freed slot frees its
index.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ipaddress import IPv4Address
from pathlib import Path

from aenv.errors import OperationFailed
from aenv.network import namespace, nft
from aenv.network.netlink import Netlink
from aenv.network.ruleset import TABLE
from aenv.network.slot import (
    GATEWAY_ADDRESS,
    GATEWAY_MAC,
    GUEST_ADDRESS,
    GUEST_MAC,
    GUEST_PREFIX_LENGTH,
    NETNS_DIRECTORY,
    TAP,
    UPLINK,
    Slot,
    SlotPlan,
)
from aenv.network.tap import create_tap


class IndexTakenError(Exception):
    """Another node, or a slot left by an earlier run, has this index. Nothing was left behind."""


class SlotBuilder:
    """Builds one slot: `build` in a fresh thread, once."""

    def __init__(self, slot: Slot, plan: SlotPlan, rules: str, nft_program: Path) -> None:
        self._slot = slot
        self._plan = plan
        self._rules = rules
        self._nft = nft_program
        self._host_link = 0

    def build(self) -> None:
        """Leaves the thread in the slot's namespace.

        Raises: IndexTakenError, OperationFailed; nothing is left then.
        """
        step: Callable[[ExitStack], None] = self._namespace
        try:
            # Opened before the first step, so it speaks to the host's namespace throughout.
            with Netlink() as self._host, ExitStack() as undo:
                for step in self.steps():
                    step(undo)
                undo.pop_all()
        except (OSError, OperationFailed) as error:
            part = step.__name__.strip("_").replace("_", " ")
            raise OperationFailed(f"network slot {self._slot.index}: its {part} failed: {error}") from error

    def steps(self) -> Sequence[Callable[[ExitStack], None]]:
        """In order. Each registers how to undo what would outlive a failure."""
        return (self._namespace, self._veth_pair, self._claim, self._uplink, self._tap, self._filter)

    def _namespace(self, undo: ExitStack) -> None:
        try:
            namespace.create(self._slot.netns)
        except FileExistsError:
            raise IndexTakenError from None
        undo.callback(namespace.remove, self._slot.netns)
        # Before there are links: these are what new links start with.
        namespace.set_sysctl("ipv4/ip_forward", 1)
        if Path("/proc/sys/net/ipv6").is_dir():
            namespace.set_sysctl("ipv6/conf/all/disable_ipv6", 1)
            namespace.set_sysctl("ipv6/conf/default/disable_ipv6", 1)

    def _veth_pair(self, undo: ExitStack) -> None:
        name, mac = self._plan.link(self._slot.index), self._plan.link_mac(self._slot.index)
        with namespace.opened(self._slot.netns) as netns:
            try:
                self._host_link = self._host.add_veth(name, mac=mac, peer=UPLINK, peer_netns=netns)
            except FileExistsError:
                raise IndexTakenError from None
        undo.callback(self._host.delete_link, name)
        self._host.set_up(self._host_link)

    def _claim(self, _undo: ExitStack) -> None:
        index = self._slot.index
        try:
            self._host.add_route(
                f"{self._slot.host_address}/32", link=self._host_link, gateway=self._plan.slot_end(index)
            )
        except FileExistsError:
            raise IndexTakenError from None
        # Only now: it follows from the index, and the host would have it twice had the claim failed.
        self._host.add_address(self._host_link, self._plan.host_end(index), 31)

    def _uplink(self, _undo: ExitStack) -> None:
        index = self._slot.index
        with Netlink() as inside:
            uplink = inside.link_index(UPLINK)
            inside.add_address(uplink, self._plan.slot_end(index), 31)
            inside.set_up(uplink)
            inside.add_route("0.0.0.0/0", link=uplink, gateway=self._plan.host_end(index))

    def _tap(self, _undo: ExitStack) -> None:
        create_tap(TAP)
        with Netlink() as inside:
            tap = inside.link_index(TAP)
            inside.set_mac(tap, GATEWAY_MAC)
            inside.set_up(tap)
            inside.add_address(tap, GATEWAY_ADDRESS, GUEST_PREFIX_LENGTH)
            # Known, so not asked for: a guest that is slow to answer ARP would be "no route to host" for a while.
            inside.add_neighbour(tap, GUEST_ADDRESS, GUEST_MAC)

    def _filter(self, _undo: ExitStack) -> None:
        nft.apply(self._nft, self._rules)


def free(plan: SlotPlan, index: int) -> None:
    """Free whatever there is of slot `index` of this node; nothing is fine. Link, route and name are gone
    after.

    The namespace itself goes with the last process in it, and leads nowhere until then.
    Raises: OperationFailed.
    """
    try:
        with Netlink() as host:
            host.delete_link(plan.link(index))
        namespace.remove(plan.slot(index).netns)
    except OSError as error:
        raise OperationFailed(f"cannot free network slot {index}: {error}") from error


def existing(plan: SlotPlan) -> set[int]:
    """Indexes of which this node has a link or a namespace. Raises: OperationFailed."""
    try:
        with Netlink() as host:
            found = {plan.index_of_link(name) for name in host.link_names()}
        if NETNS_DIRECTORY.is_dir():
            found |= {plan.index_of_netns(path.name) for path in NETNS_DIRECTORY.iterdir()}
    except OSError as error:
        raise OperationFailed(f"cannot list network slots: {error}") from error
    return {index for index in found if index is not None}


def claimed(plan: SlotPlan) -> set[int]:
    """Indexes that any node of this host has, and what this node has besides. Raises: OperationFailed."""
    first = int(plan.host_range.network_address)
    try:
        with Netlink() as host:
            routes = host.host_routes()
    except OSError as error:
        raise OperationFailed(f"cannot list the host's routes: {error}") from error
    return existing(plan) | {int(IPv4Address(address)) - first for address, _ in routes}


def verify(slot: Slot, plan: SlotPlan, nft_program: Path) -> None:
    """Check that a slot made by an earlier run is whole. Leaves the thread in its namespace.

    Raises: OperationFailed naming what is missing.
    """
    try:
        with Netlink() as host:
            link = host.link_index(plan.link(slot.index))
            if (slot.host_address, link) not in host.host_routes():
                raise OperationFailed(f"network slot {slot.index} has no route to {slot.host_address}")
        namespace.enter(slot.netns)
        with Netlink() as inside:
            for name in (TAP, UPLINK):
                inside.link_index(name)
    except OSError as error:
        raise OperationFailed(f"network slot {slot.index} is not whole: {error}") from error
    if not nft.has_table(nft_program, TABLE):
        raise OperationFailed(f"network slot {slot.index} has no packet filter")


def set_policy(slot: Slot, rules: str, nft_program: Path) -> None:
    """Apply `rules` in the slot's namespace. Raises: OperationFailed; the rules are as before then."""
    try:
        namespace.enter(slot.netns)
    except OSError as error:
        raise OperationFailed(f"cannot enter network slot {slot.index}: {error}") from error
    nft.apply(nft_program, rules)
