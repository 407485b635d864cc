"""The floor: what restoring and saving the same computer costs with nothing of ours around it.

A bare QEMU with the same devices on plain files in memory, its network ready beforehand, no confinement, no records.
Only its share of the CPU is that of a node's VM.
Everything in `open` and `prepare` is outside the measured times.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aenv.bench.dirty_pages import copy_dirty_pages
from aenv.bench.exchange import TIMEOUT_S, Connect, call
from aenv.errors import OperationFailed
from aenv.guest.client import ENVD_PORT, InitRequest
from aenv.network import namespace
from aenv.network.netlink import Netlink
from aenv.network.slot import (
    GATEWAY_ADDRESS,
    GATEWAY_MAC,
    GUEST_ADDRESS,
    GUEST_MAC,
    GUEST_PREFIX_LENGTH,
    NETNS_DIRECTORY,
    TAP,
)
from aenv.network.tap import create_tap
from aenv.snapshots.records import SnapshotRecord
from aenv.storage.client import BlockdClient
from aenv.vmm.cgroup import ControlGroups, Limits
from aenv.vmm.contract import Confinement, NetworkAttachment, VmSpec
from aenv.vmm.proc import open_memory
from aenv.vmm.process import in_network_namespace, spawn
from aenv.vmm.qemu import command
from aenv.vmm.qemu.vm import send_state, state_pipe
from aenv.vmm.tap import open_queue, set_attached

_MIB = 1 << 20
_FREEZE_TIMEOUT_MS = 5000


@dataclass(frozen=True)
class PlainSnapshot:
    """A snapshot as plain files of one directory, independent of the node it came from."""

    directory: Path
    vcpus: int
    memory_mib: int
    state: bytes
    memory: Path
    disk: Path

    @classmethod
    async def copy(
        cls, record: SnapshotRecord, state: bytes, layers: Path, storage: BlockdClient, directory: Path
    ) -> "PlainSnapshot":
        """Compose the snapshot's memory and disk into sparse files. Raises: OperationFailed and what blockd says."""
        name = f"bench-{secrets.token_hex(4)}"
        memory, disk = directory / "memory", directory / "disk"
        for kind, ids, target in (("memory", record.memory_layers, memory), ("disk", record.disk_layers, disk)):
            paths, size = [layers / f"{layer}.lsmt" for layer in ids], 0
            if kind == "memory":
                opened = await storage.open_memory(name, layers=paths, size=size, uid=os.getuid())
            else:
                opened = await storage.open_disk(name, layers=paths, size=size, upper=None, uid=os.getuid())
            try:
                copy_sparse(opened.path, target)
            finally:
                await storage.close(name)
        return cls(directory, record.vcpus, record.memory_mib, state, memory, disk)


class BareVm:
    """A QEMU process on a copy of the snapshot's disk. `start`, then what is to be measured, then `end`."""

    def __init__(self, snapshot: PlainSnapshot, platform: command.Platform, netns: Path) -> None:
        """Prepare what a start needs: disk, state in a pipe, queue of the tap, monitor socket, command."""
        self._snapshot = snapshot
        self._netns = netns
        self._undo = ExitStack()
        name = secrets.token_hex(4)
        disk = snapshot.directory / f"disk-{name}"
        self._undo.callback(disk.unlink, missing_ok=True)
        copy_sparse(snapshot.disk, disk)
        self._saved = snapshot.directory / f"saved-{name}"
        spec = VmSpec(
            vm_id=name,
            workdir=snapshot.directory,
            vcpus=snapshot.vcpus,
            memory_mib=snapshot.memory_mib,
            memory=snapshot.memory,
            disks=(disk,),
            network=NetworkAttachment(netns, TAP, GUEST_MAC),
            confinement=Confinement(uid=0, gid=0, memory_mib=snapshot.memory_mib),
        )
        self._command = _bare(command.arguments(platform, f"bench-{name}", spec, None))
        self._monitor_path = snapshot.directory / f"qmp-{name}"
        self._undo.callback(self._monitor_path.unlink, missing_ok=True)
        self._listener = self._undo.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(str(self._monitor_path))
        self._listener.listen(1)
        queue = in_network_namespace(netns, lambda: open_queue(TAP))
        self._undo.callback(os.close, queue)
        set_attached(queue, True)
        reader, writer = state_pipe()
        self._undo.callback(os.close, reader)
        send_state(writer, snapshot.state)
        os.close(writer)
        self._descriptors = {
            command.MONITOR_FD: self._listener.fileno(),
            command.QUEUE_FD: queue,
            command.STATE_FD: reader,
        }
        # Without a limit, but of the weight a node's VM has: where others want the CPU both get as much of it.
        limits = Limits(memory_mib=2 * snapshot.memory_mib + 1024, pids=1024, vcpus=snapshot.vcpus)
        self._group = ControlGroups(f"bench{name}").create("vm", limits)
        self._pid = 0
        self._monitor: _Monitor | None = None

    @property
    def connect(self) -> Connect:
        """Connects straight to the guest's agent."""

        def connect() -> socket.socket:
            address = (GUEST_ADDRESS, ENVD_PORT)
            return in_network_namespace(self._netns, lambda: socket.create_connection(address, TIMEOUT_S))

        return connect

    def start(self) -> None:
        """From the spawn to the guest's answer that it knows who it is and its processes run."""
        self._pid = spawn(self._command, self._descriptors)
        self._group.add(self._pid)
        self._monitor = _Monitor(self._monitor_path)
        self._monitor.wait_until_running()
        call(self.connect, "POST", "/init", {}, _identity().to_json())

    def freeze(self) -> None:
        """Stop the guest's processes, as a capture does."""
        call(self.connect, "POST", "/freeze", {}, {"timeoutMs": _FREEZE_TIMEOUT_MS})

    def save(self) -> int:
        """Stop, save the devices' state, copy the dirty pages into a plain file; returns how many pages."""
        assert self._monitor is not None
        self._monitor.execute("stop")
        self._monitor.execute("xen-save-devices-state", filename=f"{self._saved}-devices", live=False)
        memory = open_memory(self._pid, self._snapshot.memory.stat().st_ino, self._snapshot.memory_mib * _MIB)
        return copy_dirty_pages(memory, self._saved)

    def end(self) -> None:
        """End the process and remove everything but the snapshot. Idempotent."""
        if self._monitor is not None:
            self._monitor.close()
        if self._pid:
            os.kill(self._pid, 9)
            os.waitpid(self._pid, 0)
            self._pid = 0
        self._group.remove()
        for path in (self._saved, Path(f"{self._saved}-devices")):
            path.unlink(missing_ok=True)
        self._undo.close()


class _Monitor:
    """The least of a QMP session."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")
        self._lines.readline()
        self.execute("qmp_capabilities")

    def execute(self, name: str, **arguments: object) -> Any:
        self._socket.sendall(json.dumps({"execute": name, "arguments": arguments}).encode())
        while True:
            answer = self._next(name)
            if "return" in answer:
                return answer["return"]

    def wait_until_running(self) -> None:
        """A packet sent earlier would be lost, and be sent again only after a second."""
        if not self.execute("query-status")["running"]:
            while self._next("the state").get("event") != "RESUME":
                pass

    def _next(self, asked: str) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._lines.readline() or '{"error": "the session ended"}')
        if "error" in message:
            raise OperationFailed(f"bare QEMU refused {asked}: {message['error']}")
        return message

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@contextmanager
def tap_namespace() -> Iterator[Path]:
    """A network namespace with nothing but a tap, as a slot has it."""
    path = NETNS_DIRECTORY / f"aenv-bench-{secrets.token_hex(3)}"

    def build() -> None:
        namespace.create(path)
        create_tap(TAP)
        with Netlink() as inside:
            tap = inside.link_index(TAP)
            inside.set_mac(tap, GATEWAY_MAC)
            inside.set_up(tap)
            inside.add_address(tap, GATEWAY_ADDRESS, GUEST_PREFIX_LENGTH)

    namespace.prepare_directory(NETNS_DIRECTORY)
    thread = threading.Thread(target=build, name="bench-netns")
    thread.start()
    thread.join()
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            namespace.remove(path)


def copy_sparse(source: Path, target: Path) -> None:
    """Raises: OperationFailed."""
    done = subprocess.run(["cp", "--sparse=always", source, target], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OperationFailed(f"cannot copy {source}: {done.stderr.strip()}")


def working_directory() -> Path:
    """A new directory in memory where that can be."""
    base = Path("/dev/shm")
    room = base.is_dir() and shutil.disk_usage(base).free > 4 << 30
    path = (base if room else Path("/var/tmp")) / f"aenv-bench-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return path


def _bare(arguments: list[str]) -> list[str]:
    """Our command line without its confinement, and running as soon as the state is loaded."""
    sandbox = arguments.index("-sandbox")
    return [word for place, word in enumerate(arguments) if word != "-S" and place not in (sandbox, sandbox + 1)]


def _identity() -> InitRequest:
    name = f"i{secrets.token_hex(9)}"
    return InitRequest(
        access_token="",
        env_vars={},
        timestamp=datetime.now(UTC),
        entropy=secrets.token_bytes(64),
        hostname=name,
        machine_id=secrets.token_hex(16),
        dns_servers=["1.1.1.1"],
        default_user="user",
        sandbox_id=name,
        template_id="bench",
        lifecycle_id=f"{name}-1",
        thaw=True,
    )
