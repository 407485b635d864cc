"""Pure parts of network/: addresses, policies, resolvers, indexes, rule text."""

from ipaddress import IPv4Address, ip_address, ip_network
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import HostUnsupported, InvalidRequest, NoCapacity
from aenv.ids import InstanceId
from aenv.network.host import missing_capabilities, require_host
from aenv.network.indexes import IndexSequence
from aenv.network.nft import find_nft
from aenv.network.policy import NetworkPolicy
from aenv.network.reachability import NEVER_REACHABLE, Range, reachable
from aenv.network.resolvers import resolvers
from aenv.network.slot import SlotPlan
from aenv.settings import Settings

ALL = "0.0.0.0/0"


def contains(ranges: list[Range], address: int) -> bool:
    return any(item.first <= address <= item.last for item in ranges)


# Few, long prefixes around few addresses, so that rules overlap, nest and touch often; both ends of the space
# included.
addresses = st.one_of(st.integers(0, 40), st.integers(2**32 - 40, 2**32 - 1), st.integers(2**31 - 20, 2**31 + 20))
cidrs = st.builds(
    lambda address, length: str(ip_network((address, length), strict=False)),
    addresses,
    st.one_of(st.integers(0, 2), st.integers(26, 32)),
)
lists = st.lists(cidrs, max_size=5)


@given(st.booleans(), lists, lists, lists, st.lists(addresses, max_size=40))
def test_precedence(internet: bool, allow: list[str], deny: list[str], never: list[str], probes: list[int]) -> None:
    policy = NetworkPolicy(internet, tuple(allow), tuple(deny))
    ranges = reachable(policy, never)
    edges = [edge for item in ranges for edge in (item.first, item.last, item.first - 1, item.last + 1)]
    for probe in [*probes, *(edge for edge in edges if 0 <= edge < 2**32), 0, 2**32 - 1]:
        address = ip_address(probe)

        def listed(cidrs: list[str], address: IPv4Address = address) -> bool:  # type: ignore[assignment]
            return any(address in ip_network(cidr) for cidr in cidrs)

        expected = not listed(never) and (listed(allow) or (internet and not listed(deny)))
        assert contains(ranges, probe) == expected
    assert all(one.last + 1 < other.first for one, other in pairwise(ranges))


def test_everything_but_the_ends() -> None:
    policy = NetworkPolicy(deny_out=("255.255.255.255", "0.0.0.0/32"))
    assert [str(item) for item in reachable(policy, ())] == ["0.0.0.1-255.255.255.254"]


def test_nothing_is_left_of_a_denied_internet() -> None:
    assert reachable(NetworkPolicy(deny_out=("0.0.0.0/1", "128.0.0.0/1")), NEVER_REACHABLE) == []
    assert reachable(NetworkPolicy(internet=False), ()) == []


def test_a_single_address_is_written_as_one() -> None:
    policy = NetworkPolicy(internet=False, allow_out=("198.51.100.7", "192.0.2.0/31"))
    assert [str(item) for item in reachable(policy, ())] == ["192.0.2.0-192.0.2.1", "198.51.100.7"]


def test_metadata_cannot_be_allowed() -> None:
    policy = NetworkPolicy(allow_out=("169.254.169.254/32", ALL))
    ranges = reachable(policy, NEVER_REACHABLE)
    assert not contains(ranges, int(IPv4Address("169.254.169.254")))
    assert contains(ranges, int(IPv4Address("8.8.8.8")))


@pytest.mark.parametrize("text", ["example.com", "*.example.com", "10.0.0.0/33", "", "1.2.3", "10.0.0.0/8/8", "::/129"])
def test_what_is_no_cidr_is_refused(text: str) -> None:
    for policy in (NetworkPolicy(allow_out=(text,)), NetworkPolicy(deny_out=(text,))):
        with pytest.raises(InvalidRequest):
            reachable(policy, ())


def test_ipv6_is_denied_anyway_and_cannot_be_allowed() -> None:
    assert reachable(NetworkPolicy(deny_out=("::/0",)), ()) == [Range(0, 2**32 - 1)]
    with pytest.raises(InvalidRequest, match="IPv6"):
        reachable(NetworkPolicy(allow_out=("2001:db8::/32",)), ())


def test_addresses_and_names_of_a_slot() -> None:
    plan = SlotPlan(Settings(), InstanceId("ab12"))
    slot = plan.slot(32767)
    assert (slot.host_address, slot.uid) == ("10.11.127.255", 2_032_767)
    assert (plan.host_end(32767), plan.slot_end(32767)) == ("10.12.255.254", "10.12.255.255")
    assert str(slot.netns) == "/run/netns/aenv-ab12-32767"
    assert len(plan.link(32767)) <= 15
    assert plan.last_index == 32767
    assert plan.index_of_link(plan.link(7)) == 7
    assert plan.index_of_netns("aenv-ab12-7") == 7
    for name in ("avab1-7", "avab12-07", "avab12-7x", "xavab12-7", "avab12-"):
        assert plan.index_of_link(name) is None


@pytest.mark.parametrize(
    "ranges",
    [
        {"host_interaction_cidr": "10.12.0.0/16"},
        {"veth_cidr": "169.254.0.0/16"},
        {"veth_cidr": "10.12.0.0/99"},
        {"host_interaction_cidr": "fd00::/64"},
        {"host_interaction_cidr": "10.11.0.0/31"},
    ],
)
def test_unusable_ranges_are_refused(ranges: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        SlotPlan(Settings(**ranges), InstanceId("ab12"))  # type: ignore[arg-type]


def test_indexes_go_round_and_end() -> None:
    sequence = IndexSequence(first=3, last=4)
    assert [sequence.take(()) for _ in range(5)] == [3, 4, 1, 2, 3]
    assert sequence.take({4, 1}) == 2
    with pytest.raises(NoCapacity):
        sequence.take({1, 2, 3, 4})


def test_resolvers_a_sandbox_can_reach(tmp_path: Path) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("# by systemd\nnameserver 127.0.0.53\nnameserver ::1\noptions edns0\n")
    real.write_text("nameserver 10.0.0.2\nnameserver fd00::1\nnameserver 9.9.9.9\nnameserver 10.0.0.2\nnameserver\n")
    assert resolvers(Settings(), (stub, real)) == ("10.0.0.2", "9.9.9.9")
    assert resolvers(Settings(), (stub, tmp_path / "absent")) == ()
    assert resolvers(Settings(dns_servers=["1.1.1.1"]), (real,)) == ("1.1.1.1",)
    with pytest.raises(InvalidRequest):
        resolvers(Settings(dns_servers=["127.0.0.1"]))


def test_a_host_without_what_it_takes_is_told_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_capabilities("CapPrm:\t0\nCapEff:\t0000000000001000\n") == ["CAP_SYS_ADMIN"]
    assert missing_capabilities("CapEff:\t0000000000000000\n") == ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnsupported, match="install the package nftables"):
        find_nft(also="")
    if not missing_capabilities(Path("/proc/self/status").read_text()):
        with pytest.raises(HostUnsupported, match="tun"):
            require_host(tun=tmp_path / "tun")
