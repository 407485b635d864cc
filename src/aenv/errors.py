"""Every error that crosses a package boundary, in one tree.

    AenvError
    ├── CallerError            the request is at fault; the same request fails again
    │   ├── InvalidRequest     malformed or out of range
    │   ├── Unauthenticated    no key, or a wrong one
    │   ├── NotFound           sandbox, snapshot or template does not exist (any more)
    │   └── Conflict           the thing's state does not allow it now
    ├── BusyError              capacity; try again later
    │   ├── TooManyStarts      the bound on starts in flight
    │   ├── NoCapacity         memory or disk of this node is used up
    │   └── ShuttingDown       the node is stopping
    ├── GuestUnresponsive      the sandbox's agent does not answer; the VM itself may be alive
    ├── StorageFull            the host's disk is full
    ├── HostUnsupported        something this host lacks; the hint says how to get it
    ├── CorruptData            a layer, manifest or state file is not what it should be
    ├── IncompatibleSnapshot   made on a host or by a version that does not fit this one
    ├── SandboxLost            the sandbox's state is gone; it is reported failed
    └── OperationFailed        any other failure of this node's own work; the sandbox is as before

Each class answers three questions: may the caller retry as is (`retryable`), whose fault is it (`fault`),
and is the sandbox it was about still usable (`sandbox_usable`). The HTTP status is api/'s business.
"""

from typing import ClassVar, Literal


class AenvError(Exception):
    """Base of the tree.

    Args:
        message: what failed, naming the thing.
        hint: what to do about it; shown to people after the message.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    fault: ClassVar[Literal["caller", "node", "guest"]] = "node"
    sandbox_usable: ClassVar[bool] = True

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class CallerError(AenvError):
    fault = "caller"


class InvalidRequest(CallerError):
    code = "invalid_request"


class Unauthenticated(CallerError):
    code = "unauthenticated"


class NotFound(CallerError):
    code = "not_found"


class Conflict(CallerError):
    code = "conflict"


class BusyError(AenvError):
    """Args: retry_after_s: when trying again makes sense, in whole seconds."""

    code = "busy"
    retryable = True

    def __init__(self, message: str, *, hint: str = "", retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class TooManyStarts(BusyError):
    code = "too_many_starts"


class NoCapacity(BusyError):
    code = "no_capacity"


class ShuttingDown(BusyError):
    code = "shutting_down"


class GuestUnresponsive(AenvError):
    code = "guest_unresponsive"
    fault = "guest"
    retryable = True


class StorageFull(AenvError):
    code = "storage_full"


class HostUnsupported(AenvError):
    code = "host_unsupported"


class CorruptData(AenvError):
    code = "corrupt_data"


class IncompatibleSnapshot(AenvError):
    code = "incompatible_snapshot"


class SandboxLost(AenvError):
    code = "sandbox_lost"
    sandbox_usable = False


class OperationFailed(AenvError):
    code = "operation_failed"
