"""Harnesses of the VMM conformance suite, for the fake VMM and for QEMU with real guests. Memory images are plain
files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from aenv.settings import Settings
from aenv.testing.fake_driver import FakeDriver
from aenv.testing.fake_vmm import BUFFER_PAGES, FakeHost
from aenv.testing.vmm_conformance import Kept
from aenv.vmm.contract import BootSource, Confinement, Driver, Manifest, NetworkAttachment, SavedVm, Vm, VmSpec
from aenv.vmm.process import processes_named
from aenv.vmm.qemu.driver import QemuDriver
from tests.support.plain_memory import capture, compose, create_image
from tests.support.vm_guest import boot_source
from tests.support.vm_network import GuestLink, network

_MIB = 1 << 20
_DISK_BYTES = 1 * _MIB


class PlainHarness:
    """What both harnesses share: a directory of working directories, memory images and disks."""

    memory_mib: int
    vcpus: int
    uid: int

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count(1)

    async def fresh_spec(self) -> VmSpec:
        return self._spec(self._network(), self._disk())

    async def keep(self, spec: VmSpec, vm: Vm, saved: SavedVm) -> Kept:
        captured = capture(saved.memory)
        manifest = Manifest.from_json(vm.record.manifest)
        return Kept(saved.state, manifest, (spec.memory, captured), captured.pages)

    async def spec_on(self, kept: Kept, *, beside: VmSpec | None = None) -> VmSpec:
        spec = self._spec(beside.network, beside.disks[0]) if beside else await self.fresh_spec()
        await self.complete(spec, kept)
        return spec

    async def pending_spec(self, predecessor: VmSpec) -> VmSpec:
        return self._spec(predecessor.network, predecessor.disks[0])

    async def complete(self, spec: VmSpec, kept: Kept) -> None:
        below, captured = kept.memory
        compose(below, captured, spec.memory)

    def _network(self) -> NetworkAttachment:
        raise NotImplementedError

    def _disk(self) -> Path:
        disk = self.directory / f"disk-{next(self._numbers)}"
        create_image(disk, _DISK_BYTES, self.uid)
        return disk

    def _spec(self, attachment: NetworkAttachment, disk: Path) -> VmSpec:
        name = f"vm{next(self._numbers)}"
        workdir = self.directory / name
        workdir.mkdir(mode=0o700)
        os.chown(workdir, self.uid, self.uid)
        memory = self.directory / f"{name}-memory"
        create_image(memory, self.memory_mib * _MIB, self.uid)
        return VmSpec(
            vm_id=name,
            workdir=workdir,
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            memory=memory,
            disks=[disk],
            network=attachment,
            confinement=Confinement(self.uid, self.uid, self.memory_mib),
        )

    def _files(self) -> list[str]:
        """What drivers have left in working directories."""
        return [str(file) for workdir in self.directory.glob("vm*/") for file in workdir.iterdir()]


class FakeHarness(PlainHarness):
    """Everything in this process."""

    memory_mib = 2
    vcpus = 1
    buffer_pages = BUFFER_PAGES
    noise_pages = 4

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.uid = os.getuid()
        self.host = FakeHost()
        self.driver: Driver = FakeDriver(self.host)
        self.source = BootSource(Path("kernel"), Path("initramfs"), "", key="fake")
        self._base: Kept | None = None

    async def base(self) -> Kept:
        if self._base is None:
            spec = await self.fresh_spec()
            vm = await self.driver.boot(spec, self.source)
            await vm.suspend()
            self._base = await self.keep(spec, vm, await vm.save())
            await vm.stop()
        return self._base

    async def ask(self, spec: VmSpec, request: str, *, timeout_s: float = 1.0) -> str:
        return await self.host.ask(spec.network, request, timeout_s=timeout_s)

    async def lost_packets(self, spec: VmSpec, stop: asyncio.Event) -> int:
        while not stop.is_set():
            await self.ask(spec, "count")
            await asyncio.sleep(0.005)
        return 0

    def kill(self, pid: int) -> None:
        self.host.kill(pid)

    async def another_driver(self) -> Driver:
        return FakeDriver(self.host)

    def holdings(self) -> list[str]:
        return [*_descriptors(), *(str(pid) for pid in self.host.processes), *self._files()]

    def _network(self) -> NetworkAttachment:
        return NetworkAttachment(self.directory / f"netns-{next(self._numbers)}", "tap0", "02:00:00:00:00:01")


class QemuBench:
    """What the tests of a module share: driver, guest, one capture of it booted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.instance_id = f"t{os.getpid() % 46656:03x}"[:4]
        self.driver: QemuDriver | None = None
        self.source: BootSource | None = None
        self.base: Kept | None = None

    async def prepare(self) -> tuple[QemuDriver, BootSource]:
        if self.driver is None or self.source is None:
            self.driver = await self.new_driver()
            self.source = await boot_source(self.directory)
        return self.driver, self.source

    async def new_driver(self) -> QemuDriver:
        return await QemuDriver.create(Settings(), self.instance_id)


class QemuHarness(PlainHarness):
    """Real guests in real network namespaces."""

    memory_mib = 192
    vcpus = 2
    buffer_pages = 8192
    noise_pages = 2500
    uid = 2_999_999

    def __init__(self, directory: Path, bench: QemuBench, driver: QemuDriver, source: BootSource) -> None:
        super().__init__(directory)
        self._bench = bench
        self._links: dict[Path, GuestLink] = {}
        self._undo = contextlib.ExitStack()
        self._warnings = driver.warnings
        self.driver: Driver = driver
        self.source = source

    @property
    def driver_warnings(self) -> list[str]:
        """What the host lacks."""
        return self._warnings

    def close(self) -> None:
        self._undo.close()

    async def base(self) -> Kept:
        if self._bench.base is None:
            spec = await self.fresh_spec()
            vm = await self.driver.boot(spec, self.source)
            try:
                await self.ask(spec, "hash", timeout_s=120)  # which touches the whole buffer
                await vm.suspend()
                kept = await self.keep(spec, vm, await vm.save())
            finally:
                await vm.stop()
            below, captured = kept.memory
            lasting = self._bench.directory / "base-memory"
            shutil.move(below, lasting)
            self._bench.base = Kept(kept.state, kept.manifest, (lasting, captured), kept.pages)
        return self._bench.base

    async def ask(self, spec: VmSpec, request: str, *, timeout_s: float = 30.0) -> str:
        return await self._links[spec.network.netns].ask(request, timeout_s=timeout_s)

    async def lost_packets(self, spec: VmSpec, stop: asyncio.Event) -> int:
        return await self._links[spec.network.netns].count_lost(stop)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    async def another_driver(self) -> Driver:
        return await self._bench.new_driver()

    def holdings(self) -> list[str]:
        processes = [f"{pid} {name}" for pid, name in processes_named(f"aenv-{self._bench.instance_id}-")]
        # Where a hierarchy may be, and no deeper: other nodes' groups come and go meanwhile.
        root, node = Path("/sys/fs/cgroup"), f"aenv-{self._bench.instance_id}"
        groups = [*root.glob(f"{node}/*/"), *root.glob(f"*/{node}/*/")]
        return [*_descriptors(), *processes, *(str(group) for group in groups), *self._files()]

    def _network(self) -> NetworkAttachment:
        link = self._undo.enter_context(network())
        self._links[link.netns] = link
        return link.attachment


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A directory other users can enter, with a short path; in memory where that takes direct I/O."""
    directory = Path(tempfile.mkdtemp(prefix="aenv-", dir="/dev/shm" if _takes_direct_io("/dev/shm") else None))
    try:
        directory.chmod(0o755)
        yield directory
    finally:
        shutil.rmtree(directory)


def _takes_direct_io(directory: str) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


def _descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that reads the directory
            found.append(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
    return sorted(found)
