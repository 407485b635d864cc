"""A blockd of one test: its directories, its process, and I/O on what it exports."""

import asyncio
import contextlib
import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from aenv.storage.client import BlockdClient
from aenv_native import program

UID = 2_345_678
SECTOR = 512
_libc = ctypes.CDLL(None, use_errno=True)

needs_fuse = pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse")


def blockd_program() -> str:
    return os.environ.get("AENV_BLOCKD") or str(program("blockd"))


class Blockd:
    """A blockd that can be ended, killed and started again on the same files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mount = directory / "mount"
        self.socket = directory / "socket"
        self.log = directory / "log"
        self.layers = self._writable("layers")
        self.client = BlockdClient(self.socket, timeout_s=60)
        self._process: asyncio.subprocess.Process | None = None
        self._uppers = 0

    def _writable(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir()
        os.chown(path, UID, UID)
        return path

    def layer(self, name: str) -> Path:
        return self.layers / name

    def new_upper(self) -> Path:
        self._uppers += 1
        return self._writable(f"upper{self._uppers}")

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            blockd_program(),
            *("--socket", str(self.socket), "--mount", str(self.mount)),
            *("--uid", str(UID), "--log", str(self.log)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"

    async def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def ended(self) -> int:
        """Return when it has ended: its exit status."""
        assert self._process is not None
        return await self._process.wait()

    def mounted(self) -> bool:
        return str(self.mount) in Path("/proc/self/mountinfo").read_text()


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    """Return when `condition` holds; for what nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_blockd() -> AsyncIterator[Blockd]:
    directory = Path(tempfile.mkdtemp(prefix="blockd-", dir="/tmp"))
    directory.chmod(0o755)
    blockd = Blockd(directory)
    await blockd.start()
    try:
        yield blockd
    finally:
        await blockd.kill()
        await until(lambda: not blockd.mounted())  # the process that blockd left for that is at work
        shutil.rmtree(directory)


class ExportedFile:
    """A file in the mount, opened for direct I/O. Blocking: for use in threads."""

    def __init__(self, path: Path, flags: int = os.O_RDWR | os.O_DIRECT) -> None:
        self.descriptor = os.open(path, flags | os.O_CLOEXEC)

    def __enter__(self) -> "ExportedFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read(self, offset: int, length: int) -> bytes:
        content = bytearray()
        buffer = mmap.mmap(-1, 1 << 20)  # direct I/O wants aligned memory
        while len(content) < length:
            part = memoryview(buffer)[: min(len(buffer), length - len(content))]
            got = os.preadv(self.descriptor, [part], offset + len(content))
            content += part[:got]
            if not got:
                break
        return bytes(content)

    def write(self, offset: int, data: bytes) -> None:
        buffer = mmap.mmap(-1, len(data))
        buffer.write(data)
        assert os.pwrite(self.descriptor, buffer, offset) == len(data)

    def punch(self, offset: int, length: int) -> None:
        self.fallocate(0x3, offset, length)

    def zero_range(self, offset: int, length: int) -> None:
        self.fallocate(0x10, offset, length)

    def fallocate(self, mode: int, offset: int, length: int) -> None:
        call = _libc.fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if call(self.descriptor, mode, offset, length):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def sync(self) -> None:
        os.fsync(self.descriptor)


def read_disk(path: Path, size: int) -> bytes:
    with ExportedFile(path, os.O_RDONLY | os.O_DIRECT) as disk:
        return disk.read(0, size)
