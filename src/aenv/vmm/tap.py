"""Queues of a multi-queue tap. A queue is a descriptor; a detached one neither sends nor receives, and one
tap serves several processes in turn.
"""

import fcntl
import os
import socket
import struct

_TUNSETIFF = 0x400454CA
_TUNGETIFF = 0x800454D2
_TUNSETQUEUE = 0x400454D9

_IFF_TAP = 0x0002
_IFF_MULTI_QUEUE = 0x0100
_IFF_ATTACH_QUEUE = 0x0200
_IFF_DETACH_QUEUE = 0x0400
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000

_FLAGS = struct.Struct("16sH22x")
"""`struct ifreq` as far as it matters here: interface name and flags."""


def open_queue(tap: str) -> int:
    """A new, detached queue of the existing tap `tap` of the caller's network namespace. The caller closes
    it. Raises: OSError.
    """
    socket.if_nametoindex(tap)  # else a missing tap would be made anew, leading nowhere
    queue = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_MULTI_QUEUE | _IFF_VNET_HDR
        fcntl.ioctl(queue, _TUNSETIFF, _FLAGS.pack(tap.encode(), flags))
        set_attached(queue, False)
    except BaseException:
        os.close(queue)
        raise
    return queue


def set_attached(queue: int, attached: bool) -> None:
    """Put the queue on the tap or take it off. Idempotent. Raises: OSError."""
    _, flags = _FLAGS.unpack(fcntl.ioctl(queue, _TUNGETIFF, bytes(_FLAGS.size)))
    if attached != (not flags & _IFF_DETACH_QUEUE):
        change = _IFF_ATTACH_QUEUE if attached else _IFF_DETACH_QUEUE
        fcntl.ioctl(queue, _TUNSETQUEUE, _FLAGS.pack(b"", change))
