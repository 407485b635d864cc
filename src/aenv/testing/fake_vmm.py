"""A virtual machine monitor without machines, in the shape of stock Firecracker.

    FakeHost      what survives a server: the VMM "processes", and the network by which guests are reached
    FakeVmm       one such process: an API of resources with a configuration phase and a running phase, and a
    FakeGuest     its guest: a memory of pages over the memory image, a counter that advances while it runs,
                  some commands, and what its agent remembers
    FakeDriver    the VMM contract, spoken through nothing but the API

As with stock Firecracker, state is saved only together with memory, as the pages written since the last save,
into a sparse file; and only a VM that has not been configured can load a snapshot. Everything is in one
process and takes no time of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Callable
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from aenv.errors import OperationFailed
from aenv.vmm.contract import NetworkAttachment

PAGE = 4096
BUFFER_PAGES = 256
"""Pages of guest memory that commands can change."""
_MIB = 1 << 20
_TICKS_PER_S = 1000
_SECTOR = 512
_ZERO_PAGE = bytes(PAGE)
_PAGEMAP_ENTRY = 8
_PRIVATE = 1 << 63
"""A page that is present and of no file."""
CORRUPT = "cannot deserialize the microVM state"


class Failure(StrEnum):
    """What happens instead of an API request."""

    REFUSE = "refuse"
    """It is answered with an error and has no effect."""
    DIE = "die"
    """The process ends before it takes effect."""
    HANG = "hang"
    """It is never answered."""


class FakeHost:
    """Processes and networks of one pretended host. Several drivers, one after another, may work on it."""

    def __init__(self) -> None:
        self.processes: dict[int, FakeVmm] = {}
        self._pids = itertools.count(
            1_000_000_000
        )  # above what a kernel gives, so that none is mistaken for a real one
        self._failures: dict[str, Failure] = {}

    def fail(self, request: str, failure: Failure) -> None:
        """Let the next API request that is, say, `PUT /snapshot/create` go wrong; `spawn` stands for the
        start of a process.
        """
        self._failures[request] = failure

    def kill(self, pid: int) -> None:
        """As SIGKILL does. Without effect on a process that is gone."""
        if process := self.processes.pop(pid, None):
            process.end("signal 9")

    async def ask(self, network: NetworkAttachment, request: str, *, timeout_s: float = 1.0) -> str:
        """A command to the guest on this network, see `FakeGuest.command`, or `power-off`.

        Waits, as a packet would be repeated, until a guest runs there. Raises: TimeoutError.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            process = self.process_on(network)
            if process is not None and process.runs:
                return process.command(request)
            await asyncio.sleep(0.001)
        raise TimeoutError(f"no guest runs on {network.tap}")

    def process_on(self, network: NetworkAttachment) -> FakeVmm | None:
        """The VMM that is attached there; of several, the one whose guest runs."""
        found = [process for process in self.processes.values() if process.network == network]
        return max(found, key=lambda process: process.runs, default=None)

    def guest_on(self, network: NetworkAttachment) -> FakeGuest | None:
        """The guest that runs there."""
        process = self.process_on(network)
        return process.guest if process is not None and process.runs else None

    def spawn(self, vm_id: str) -> FakeVmm:
        if self.take_failure("spawn") is not None:
            raise OperationFailed(f"cannot start a VM for {vm_id}: told to fail")
        pid = next(self._pids)
        process = FakeVmm(self, pid, vm_id)
        self.processes[pid] = process
        return process

    def take_failure(self, request: str) -> Failure | None:
        return self._failures.pop(request, None)


class ApiError(Exception):
    """The API's answer 400: `fault_message`."""


class FakeVmm:
    """One VMM process and its API: `PUT` configures or acts, `PATCH` changes a running machine."""

    def __init__(self, host: FakeHost, pid: int, vm_id: str) -> None:
        self.pid = pid
        self.vm_id = vm_id
        self.start_time = pid
        self.guest: FakeGuest | None = None
        self.network: NetworkAttachment | None = None
        self.outcome: str | None = None
        self.ended = asyncio.Event()
        self._host = host
        self._machine: dict[str, Any] = {}
        self._boot_source: dict[str, Any] | None = None
        self._disks: list[Path] = []

    @property
    def runs(self) -> bool:
        return self.guest is not None and self.guest.running

    async def request(self, method: str, path: str, body: dict[str, Any]) -> None:
        """Raises: ApiError, ConnectionError when the process is or goes away."""
        failure = self._host.take_failure(f"{method} {path}")
        if failure is Failure.DIE:
            self._host.kill(self.pid)
        if self.outcome is not None:
            raise ConnectionError(f"the VMM ended with {self.outcome}")
        if failure is Failure.HANG:
            await self.ended.wait()
            raise ConnectionError("the VMM ended while it was asked")
        if failure is Failure.REFUSE:
            raise ApiError(f"{method} {path} was told to fail")
        handler, before_start = self._handlers[f"{method} {path}"]
        if before_start is not (self.guest is None):
            raise ApiError(
                f"{method} {path} is not supported {'after' if before_start else 'before'} starting the microVM"
            )
        try:
            handler(self, body)
        except OSError as error:
            raise ApiError(f"{method} {path}: {error}") from error

    def command(self, request: str) -> str:
        assert self.guest is not None
        if request == "power-off":
            self._host.processes.pop(self.pid)
            self.end("status 0")
            return ""
        return self.guest.command(request, self._disks)

    def end(self, outcome: str) -> None:
        if self.guest is not None:
            self.guest.close()
        self.outcome = outcome
        self.ended.set()

    def _configure_machine(self, body: dict[str, Any]) -> None:
        if not body.get("track_dirty_pages"):
            raise ApiError("this driver depends on dirty page tracking")
        self._machine = body

    def _set_boot_source(self, body: dict[str, Any]) -> None:
        self._boot_source = body

    def _add_drive(self, body: dict[str, Any]) -> None:
        self._disks.append(Path(body["path_on_host"]))

    def _add_network(self, body: dict[str, Any]) -> None:
        self.network = NetworkAttachment(Path(body["netns"]), body["host_dev_name"], body["guest_mac"])

    def _act(self, body: dict[str, Any]) -> None:
        if body["action_type"] != "InstanceStart" or self._boot_source is None or not self._machine:
            raise ApiError("cannot start without machine-config and boot-source")
        self.guest = FakeGuest(self._machine["mem_size_mib"] * _MIB)
        self.guest.resume()

    def _change_vm(self, body: dict[str, Any]) -> None:
        assert self.guest is not None
        if body["state"] == "Paused":
            self.guest.pause()
        else:
            self.guest.resume()

    def _create_snapshot(self, body: dict[str, Any]) -> None:
        assert self.guest is not None
        if self.guest.running:
            raise ApiError("cannot save a running microVM")
        match body["snapshot_type"]:
            case "Diff":
                self.guest.write_diff(Path(body["mem_file_path"]))
            case "State":
                pass  # unlike the original: for the driver that reads the memory of the process
            case other:
                raise ApiError(f"snapshot type {other} is not pretended")
        guest = self.guest
        state = {"ticks": guest.ticks, "size": guest.size, "disks": len(self._disks), "agent": guest.agent}
        content = json.dumps(state).encode()
        Path(body["snapshot_path"]).write_bytes(blake2b(content, digest_size=8).digest() + content)

    def _load_snapshot(self, body: dict[str, Any]) -> None:
        if self._machine or self._boot_source is not None:
            raise ApiError("loading a snapshot is not allowed after configuring the microVM")
        content = Path(body["snapshot_path"]).read_bytes()
        if blake2b(content[8:], digest_size=8).digest() != content[:8]:
            raise ApiError(f"{CORRUPT}: checksum mismatch")
        state = json.loads(content[8:])
        if state["disks"] != len(body["drive_overrides"]):
            raise ApiError("the microVM state has another number of drives")
        self.guest = FakeGuest(state["size"], Path(body["mem_backend"]["backend_path"]), state["ticks"])
        self.guest.agent = state["agent"]
        self._disks = [Path(path) for path in body["drive_overrides"]]
        self._add_network(body["network_overrides"])

    _handlers: dict[str, tuple[Callable[[FakeVmm, dict[str, Any]], None], bool]] = {  # noqa: RUF012
        # request: (handler, whether it belongs before the start)
        "PUT /machine-config": (_configure_machine, True),
        "PUT /boot-source": (_set_boot_source, True),
        "PUT /drives": (_add_drive, True),
        "PUT /network-interfaces": (_add_network, True),
        "PUT /actions": (_act, True),
        "PUT /snapshot/load": (_load_snapshot, True),
        "PATCH /vm": (_change_vm, False),
        "PUT /snapshot/create": (_create_snapshot, False),
    }


class FakeGuest:
    """A computer of pages. While paused, its counter is in page 0, where a capture finds it."""

    def __init__(self, size: int, image: Path | None = None, ticks: int = 0) -> None:
        self.size = size
        self.running = False
        self.agent: dict[str, Any] = {}
        """What `FakeAgent` remembers: part of the guest's memory, so of every capture."""
        self._image = None if image is None else os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        self._pages: dict[int, bytes] = {}
        self._dirty: set[int] = set()
        self._ticks = ticks
        self._resumed_at = 0.0

    @property
    def ticks(self) -> int:
        elapsed = time.monotonic() - self._resumed_at if self.running else 0.0
        return self._ticks + int(elapsed * _TICKS_PER_S)

    @property
    def private_pages(self) -> int:
        return len(self._pages)

    def resume(self) -> None:
        if not self.running:
            self._resumed_at = time.monotonic()
            self.running = True

    def pause(self) -> None:
        if self.running:
            self._ticks = self.ticks
            self.running = False
            self._write(0, self._ticks.to_bytes(8, "little").ljust(PAGE, b"\0"))

    def close(self) -> None:
        self.running = False
        if self._image is not None:
            os.close(self._image)

    def write_diff(self, path: Path) -> None:
        """Pages written since the last time, into a file of the memory's size; into the one that is there, if
        it has that size.
        """
        with path.open("r+b" if path.exists() else "x+b") as file:
            file.truncate(self.size)
            for page in self._dirty:
                os.pwrite(file.fileno(), self._pages[page], page * PAGE)
        self._dirty.clear()

    def memory_files(self) -> tuple[int, int]:
        """Descriptors in the shape of /proc/PID/mem and /proc/PID/pagemap, the memory mapped at address 0. For the
        caller to close.
        """
        memory, pagemap = os.memfd_create("memory"), os.memfd_create("pagemap")
        os.truncate(memory, self.size)
        os.truncate(pagemap, self.size // PAGE * _PAGEMAP_ENTRY)
        for page, content in self._pages.items():
            os.pwrite(memory, content, page * PAGE)
            os.pwrite(pagemap, _PRIVATE.to_bytes(_PAGEMAP_ENTRY, "little"), page * _PAGEMAP_ENTRY)
        return memory, pagemap

    def command(self, request: str, disks: list[Path]) -> str:
        """`count`: ticks so far. `fill SEED FROM N`, `hash`: write pages of the buffer, hash it. `write DISK VALUE`,
        `read DISK`.
        """
        match request.split():
            case ["count"]:
                return str(self.ticks)
            case ["fill", seed, first, count]:
                for page in range(int(first), min(int(first) + int(count), BUFFER_PAGES)):
                    self._write(1 + page, blake2b(f"{seed} {page}".encode()).digest() * (PAGE // 64))
                return "ok"
            case ["hash"]:
                digest = blake2b(digest_size=8)
                for page in range(BUFFER_PAGES):
                    digest.update(self._read(1 + page))
                return str(int.from_bytes(digest.digest(), "little"))
            case ["write", disk, value]:
                with disks[int(disk)].open("r+b") as file:
                    file.write(int(value).to_bytes(_SECTOR, "little"))
                return "ok"
            case ["read", disk]:
                with disks[int(disk)].open("rb") as file:
                    return str(int.from_bytes(file.read(8), "little"))
        return "error"

    def _read(self, page: int) -> bytes:
        if page in self._pages:
            return self._pages[page]
        return _ZERO_PAGE if self._image is None else os.pread(self._image, PAGE, page * PAGE)

    def _write(self, page: int, content: bytes) -> None:
        self._pages[page] = content
        self._dirty.add(page)
