"""The tap device of a slot.

Persistent and multi-queue: the VMM of the moment opens a queue of its own by name, and its successor another
one beside it. Whether packets carry a vnet header is decided by each opening for the whole device
(linux/drivers/net/tun.c, tun_set_iff), so it is the VMM's choice; ours here is only the start.
"""

import fcntl
import os
import struct
from pathlib import Path

TUN = Path("/dev/net/tun")

_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_IFF_MULTI_QUEUE = 0x0100
_REQUEST = "16sH22x"
"""struct ifreq: name and flags."""


def create_tap(name: str) -> None:
    """Create the device in the calling thread's namespace; it stays, down, with no queue. Raises: OSError."""
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR | _IFF_MULTI_QUEUE
    descriptor = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack(_REQUEST, name.encode(), flags))
        fcntl.ioctl(descriptor, _TUNSETPERSIST, 1)
    finally:
        os.close(descriptor)
