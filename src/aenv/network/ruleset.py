"""The nftables rules of a slot and of the host, as text for one atomic `nft -f` each. Pure, no I/O.

In a slot every packet of the guest is judged, established or not, and so are the answers to it: a policy that
tightens stops the flows it forbids at the next packet, in both directions. Only flows that the host opened
are exempt from the policy.
"""

from collections.abc import Sequence

from aenv.network.reachability import Range
from aenv.network.slot import GUEST_ADDRESS, TAP, UPLINK, Slot, SlotPlan

MAX_FLOWS = 16384
"""Connections one guest may have open. The host's connection table is shared, and a port scan must not fill
it for everyone."""

TABLE = "aenv"


def slot_rules(slot: Slot, plan: SlotPlan, allowed: Sequence[Range], dns: Sequence[str]) -> str:
    """The whole table of a new slot. `dns`: resolvers open on port 53 whatever `allowed` says."""
    host_end = plan.host_end(slot.index)
    return f"""
table inet {TABLE} {{
  set reachable {{ type ipv4_addr; flags interval; }}
  set resolvers {{ type ipv4_addr; }}

  chain guard {{
    type filter hook prerouting priority raw; policy accept;
    meta nfproto ipv6 drop
    iifname {TAP} ip saddr != {GUEST_ADDRESS} drop
  }}
  chain inbound {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname {UPLINK} ip daddr {slot.host_address} dnat ip to {GUEST_ADDRESS}
  }}
  chain outbound {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname {UPLINK} ip saddr {GUEST_ADDRESS} snat ip to {slot.host_address}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    iifname {TAP} oifname {UPLINK} goto from_guest
    iifname {UPLINK} oifname {TAP} goto to_guest
  }}
  chain from_guest {{
    ct direction reply accept
    ct state new ct count over {MAX_FLOWS} drop
    ip daddr @resolvers meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr @reachable accept
    meta l4proto tcp reject with tcp reset
    reject with icmp admin-prohibited
  }}
  chain to_guest {{
    ct state related meta l4proto icmp accept
    ct direction original ip saddr {host_end} accept
    ct direction original drop
    ip saddr @resolvers meta l4proto {{ tcp, udp }} th sport 53 accept
    ip saddr @reachable accept
  }}
}}
{_elements("reachable", allowed)}{_elements("resolvers", dns)}"""


def policy_rules(allowed: Sequence[Range], dns: Sequence[str]) -> str:
    """Replaces a slot's policy, leaving everything else."""
    return (
        f"flush set inet {TABLE} reachable\n"
        f"flush set inet {TABLE} resolvers\n"
        f"{_elements('reachable', allowed)}{_elements('resolvers', dns)}"
    )


def host_rules(plan: SlotPlan, dns: Sequence[str]) -> str:
    """The node's table on the host, replacing one left by an earlier run.

    A slot's own rules are the policy; these hold what must be true even if those were gone: no sandbox opens
    a connection to the host or to another sandbox, nobody but the host opens one to a sandbox. Accepting here
    does not overrule another table's drop.
    """
    ours = f'"{plan.link_prefix}*"'
    sandboxes = f"{{ {plan.host_range}, {plan.veth_range} }}"
    to_resolvers = ""
    if dns:
        to_resolvers = f"ip daddr {{ {', '.join(dns)} }} meta l4proto {{ tcp, udp }} th dport 53 accept"
    return f"""
table inet {plan.table} {{
}}
delete table inet {plan.table}
table inet {plan.table} {{
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname {ours} jump from_slot
  }}
  chain from_slot {{
    ct state established,related accept
    {to_resolvers}
    drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname {ours} goto forward_out
    oifname {ours} ct state established,related accept
    oifname {ours} drop
  }}
  chain forward_out {{
    ip daddr {sandboxes} drop
    ip saddr != {plan.host_range} drop
    meta nfproto ipv6 drop
    tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    accept
  }}
  chain outbound {{
    type nat hook postrouting priority srcnat; policy accept;
    iifname {ours} masquerade
  }}
}}
"""


def no_host_rules(plan: SlotPlan) -> str:
    """Removes the node's table; fine when there is none."""
    return f"table inet {plan.table} {{\n}}\ndelete table inet {plan.table}\n"


def _elements(name: str, members: Sequence[Range] | Sequence[str]) -> str:
    if not members:
        return ""
    return f"add element inet {TABLE} {name} {{ {', '.join(str(member) for member in members)} }}\n"
