"""What a sandbox may reach."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkPolicy:
    """Egress of one sandbox. CIDRs in text form.

    An allowed one wins over a denied one; the node's denied_cidrs win over both.
    """

    internet: bool = True
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
