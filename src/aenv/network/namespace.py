"""Network namespaces by name, and threads that work inside one. Linux only; needs CAP_SYS_ADMIN.

A thread that entered a namespace is never given back to a pool: it ends with its work, so no other work of
the server can find itself in a sandbox's network. Children started from it are born in its namespace.
"""

import asyncio
import ctypes
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SHARED = 0x100000
_MNT_DETACH = 0x2
_OWN_NETNS = Path("/proc/thread-self/ns/net")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_void_p]


async def in_fresh_thread(work: Callable[[], T], *, name: str) -> T:
    """Run `work` in a thread of its own and return what it returns.

    Cancelling the caller does not stop the thread: whoever may be cancelled holds this call in a task and
    awaits that shielded.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await done


def create(path: Path) -> None:
    """Put the calling thread into a new namespace, named by `path`. On failure the name does not exist.

    Raises: FileExistsError when the name is taken, OSError.
    """
    path.touch(exist_ok=False)
    try:
        _call(_libc.unshare, _CLONE_NEWNET)
        _mount(_OWN_NETNS, path, _MS_BIND)
    except BaseException:
        path.unlink()
        raise


def enter(path: Path) -> None:
    """Put the calling thread into the namespace named by `path`. Raises: OSError."""
    with opened(path) as descriptor:
        _call(_libc.setns, descriptor, _CLONE_NEWNET)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of the namespace named by `path`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Take the name away; the namespace goes with the last process in it. An absent name is fine. Raises:
    OSError."""
    # Detached first: unlinking a mount point detaches it too, but only where no other mount namespace is
    # involved.
    _libc.umount2(os.fsencode(path), _MNT_DETACH)
    path.unlink(missing_ok=True)


def prepare_directory(directory: Path) -> None:
    """Make `directory` a shared mount of its own, as `ip netns` does before its first use.

    Were it not, the next `ip netns add` would mount the directory over itself, and a second, hidden mount of
    each of our namespaces would keep it alive for good. Idempotent. Raises: OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with opened(directory) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            _mount(Path("none"), directory, _MS_SHARED | _MS_REC)
        except OSError:  # EINVAL: not a mount point yet
            _mount(directory, directory, _MS_BIND | _MS_REC)
            _mount(Path("none"), directory, _MS_SHARED | _MS_REC)


def set_sysctl(name: str, value: int) -> None:
    """Set `name` (with slashes, below net/) in the calling thread's namespace. Raises: OSError."""
    Path("/proc/sys/net", name).write_text(str(value))


def _mount(source: Path, target: Path, flags: int) -> None:
    _call(_libc.mount, os.fsencode(source), os.fsencode(target), None, flags, None)


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
