"""A node of fakes around the real manager, database, ledger, layers and blockd; and servers that fail or die on it.

World    what outlives a server: directories, blockd, VMM processes, network, routes, clock
Server   one server process on it: everything of `aenv.node`, as aenv/server.py puts it together
Gate     every call of one server to what is outside it; there a call can fail, wait, or be the last one
"""

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from aenv.aiokit import Bounded, TaskSet
from aenv.database import Database
from aenv.errors import AenvError
from aenv.guest.assets import Assets
from aenv.ledger import Ledger
from aenv.node import record as sandbox_tables
from aenv.node.capacity import Capacity
from aenv.node.capture import Capturer
from aenv.node.deadlines import Deadlines
from aenv.node.machines import Machines
from aenv.node.manager import SandboxManager
from aenv.node.paths import NodePaths
from aenv.node.record import SandboxRecord
from aenv.node.services import Services
from aenv.node.tokens import Tokens
from aenv.node.views import CreateRequest, OnTimeout, PublicState, SandboxView
from aenv.node.warm_pool import WarmPool
from aenv.server import make_directories
from aenv.settings import Settings
from aenv.snapshots import store as snapshot_tables
from aenv.snapshots.layers import LayerStore
from aenv.snapshots.records import SnapshotRecord
from aenv.snapshots.store import SnapshotStore
from aenv.storage.client import BlockdClient
from aenv.storage.supervisor import ensure_blockd, stop_blockd
from aenv.templates.base import BaseTemplate
from aenv.testing.clock import FakeClock, settle
from aenv.testing.fake_driver import FakeDriver
from aenv.testing.fake_network import FakeFrontDoor, FakeNetwork, FakeSlotPool, attachment
from aenv.testing.fake_succession import FakeSuccessionDriver
from aenv.testing.fake_vmm import FakeHost
from aenv.vmm.contract import CaptureKind

DRIVERS = {CaptureKind.TRACKING: FakeDriver, CaptureKind.SUCCESSION: FakeSuccessionDriver}
HOST_MEMORY_MIB = 40
"""Room for ten sandboxes."""
_MIB = 1 << 20
_REAL_WAIT_S = 20.0


class Died(BaseException):
    """Raised in what is left of a server that died, when a test has ended."""


class Gate:
    """The calls of one server, in order, as `disk.snapshot`, `database.write` …

    `fail`: the next call of that name raises; `errors`: the n-th call does. `hold`: the next one of that name waits for
    the event; `hold_at`: the n-th call waits for good. `die_at`: the server dies at that call, before it takes effect
    or after; like every later one it never returns, so nothing is cleaned up.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self.errors: dict[int, BaseException] = {}
        self.failed = ""
        """The call that failed last."""
        self.hold: dict[str, asyncio.Event] = {}
        self.reached = asyncio.Event()
        """Something is held, or the server has died."""
        self.hold_at: int | None = None
        self.die_at: int | None = None
        self.die_after = False
        self.dead = False
        self.in_flight = 0
        """What a server had begun when it died may still take effect: wait for it."""
        self._buried = False

    def begin(self) -> None:
        """Count from here."""
        self.calls.clear()
        self.failed = ""

    def bury(self) -> None:
        """What still hangs may end, without effect."""
        self.dead = self._buried = True

    async def call(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        await self._live()
        number = len(self.calls)
        self.calls.append(name)
        if number == self.hold_at:
            self.hold_at = None
            self.hold[name] = asyncio.Event()
        if event := self.hold.pop(name, None):
            self.reached.set()
            await event.wait()
        if error := self.fail.pop(name, None) or self.errors.pop(number, None):
            self.failed = name
            raise error
        await self._die(number, after=False)
        self.in_flight += 1
        try:
            result = await work()
        finally:
            self.in_flight -= 1
        await self._live()
        await self._die(number, after=True)
        return result

    async def _die(self, number: int, *, after: bool) -> None:
        if number == self.die_at and after is self.die_after:
            self.dead = True
            self.reached.set()
            await self._live()

    async def _live(self) -> None:
        if self._buried:
            raise Died
        if self.dead:
            try:
                await asyncio.Event().wait()
            finally:
                raise Died


class Gated:
    """An object behind a gate: its coroutines pass through, what it returns with coroutines of its own is gated too."""

    def __init__(self, target: Any, gate: Gate, name: str) -> None:
        self._target, self._gate, self._name = target, gate, name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._target, attribute)
        if asyncio.iscoroutinefunction(found):
            if attribute in ("wait", "detach"):
                return found

            async def call(*args: Any, **kwargs: Any) -> Any:
                result = await self._gate.call(f"{self._name}.{attribute}", lambda: found(*args, **kwargs))
                if hasattr(result, "stop") or hasattr(result, "take_over"):
                    return Gated(result, self._gate, "vm" if hasattr(result, "stop") else "successor")
                return result

            return call
        if callable(found) and attribute in ("release", "assign", "record", "erase", "unlink"):

            def act(*args: Any, **kwargs: Any) -> Any:
                return None if self._gate.dead else found(*args, **kwargs)

            return act
        return found


class World:
    """One pretended host with a real blockd."""

    def __init__(self, directory: Path, kind: CaptureKind, home: Path | None = None, **settings: Any) -> None:
        self.directory = directory
        self.kind = kind
        self.settings = Settings(
            **{
                "home": home or directory / "home",
                "runtime": directory / "run",
                "template_vcpus": 1,
                "template_memory_mib": 128,
                "template_disk_mib": 1024,
                "min_free_disk_mib": 0,
                "freeze_timeout_s": 0.5,
                "restore_timeout_s": 2.0,
                "boot_timeout_s": 5.0,
                "max_starts_in_flight": 4,
                "start_queue_timeout_s": 30.0,
                **settings,
            }
        )
        self.paths = NodePaths.of(self.settings)
        make_directories(self.paths, self.settings)
        self.clock = FakeClock()
        self.host = FakeHost()
        self.network = FakeNetwork(self.host, uid=self.settings.blockd_uid + 1)
        self.storage: BlockdClient
        self.boot_id = "boot-1"
        self.servers: list[Server] = []
        self.logs: list[dict[str, Any]] = []
        image = directory / "base.ext4"
        image.write_bytes(os.urandom(4096) + bytes(60 << 10))
        self.assets = Assets("x86_64", image, image, "boot", "6.12", "0.1.0", image, image.stat().st_size, "base")

    async def start_blockd(self) -> None:
        self.storage = await ensure_blockd(self.settings, Ledger(self.paths.ledger))

    async def server(self, gate: Gate | None = None) -> "Server":
        """A server that has recovered and serves."""
        server = await self.open(gate)
        await server.begin()
        return server

    async def open(self, gate: Gate | None = None) -> "Server":
        server = Server(self, gate or Gate(), await open_database(self.paths.database))
        self.servers.append(server)
        return server

    async def close(self) -> None:
        for server in self.servers:
            await server.bury()
        await settle()
        self.network.close()
        for pid in list(self.host.processes):
            self.host.kill(pid)
        await stop_blockd(self.settings, Ledger(self.paths.ledger))

    async def ask(self, view: SandboxView, server: "Server", request: str) -> str:
        """A command to the guest of a sandbox, where its route leads."""
        return await self.host.ask(self.attachment(view, server), request)

    def attachment(self, view: SandboxView, server: "Server") -> Any:
        route = self.network.routes[view.id]
        return next(attachment(slot) for slot in self.network.slots.values() if slot.host_address == route.address)

    def guest(self, view: SandboxView, server: "Server") -> Any:
        found = self.host.guest_on(self.attachment(view, server))
        assert found is not None, "no guest runs where the route leads"
        return found

    async def reboot(self) -> None:
        """The host's power fails and comes back: only files are left."""
        for pid in list(self.host.processes):
            self.host.kill(pid)
        await stop_blockd(self.settings, Ledger(self.paths.ledger))
        self.network.lose_all()
        shutil.rmtree(self.paths.runtime)
        make_directories(self.paths, self.settings)
        self.boot_id = f"{self.boot_id}+"
        await self.start_blockd()


class Server:
    def __init__(self, world: World, gate: Gate, database: Database) -> None:
        self.world, self.gate = world, gate
        settings, paths, clock = world.settings, world.paths, world.clock
        self.ledger: Any = Gated(Ledger(paths.ledger), gate, "ledger")
        self._database = database
        self.database: Any = Gated(database, gate, "database")
        storage: Any = Gated(world.storage, gate, "storage")
        self.slots = FakeSlotPool(world.network, self.ledger)
        slots: Any = Gated(self.slots, gate, "slots")
        front_door: Any = Gated(FakeFrontDoor(world.network), gate, "edge")
        driver: Any = Gated(DRIVERS[world.kind](world.host), gate, "driver")
        self.tasks = TaskSet("node")
        self.layers = LayerStore(paths.layers)
        self.snapshots = SnapshotStore(self.database, self.layers, paths.states)
        self.machines = Machines(
            settings=settings,
            paths=paths,
            ledger=self.ledger,
            driver=driver,
            slots=slots,
            storage=storage,
            layers=self.layers,
        )
        capturer = Capturer(self.machines, clock)
        self.deadlines = Deadlines(clock, lambda sandbox: self.manager.expired(sandbox))
        self.capacity = Capacity(settings, host_memory_mib=HOST_MEMORY_MIB * 128)
        self.warm_pool = WarmPool(self.machines, self.snapshots, self.tasks, settings.warm_pool_size)
        self.services = Services(
            settings=settings,
            clock=clock,
            database=self.database,
            snapshots=self.snapshots,
            layers=self.layers,
            machines=self.machines,
            capturer=capturer,
            front_door=front_door,
            deadlines=self.deadlines,
            capacity=self.capacity,
            starts=Bounded(settings.max_starts_in_flight, wait_s=settings.start_queue_timeout_s, clock=clock),
            tasks=self.tasks,
            tokens=Tokens("5eed" * 16),
            warm_pool=self.warm_pool,
            boot_id=world.boot_id,
            dns_servers=slots.dns_servers,
        )
        self.manager = SandboxManager(self.services)
        self.template = BaseTemplate(
            settings=settings,
            machines=self.machines,
            capturer=capturer,
            snapshots=self.snapshots,
            clock=clock,
            boot_id=world.boot_id,
        )
        self.base: SnapshotRecord | None = None
        self.problems: list[AenvError] = []
        self._abandoned: list[asyncio.Task[Any]] = []

    async def begin(self) -> None:
        self.problems = list(await self.snapshots.load())
        await self.manager.recover()
        self.tasks.spawn(self.deadlines.run(), name="deadlines")
        self.base = await self.template.ensure(self.world.assets, lambda line: None)
        self.manager.serve(self.base)
        self.warm_pool.serve(self.base)

    async def stop(self, *, keep_running: bool = False) -> None:
        """As a server stops that is told to."""
        await self.manager.stop(keep_running=keep_running)
        await self.tasks.close()
        await self.warm_pool.close()
        await self._database.close()

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """A caller of a server that died: it ends with it."""
        self._abandoned.append(task)

    async def bury(self) -> None:
        """Let what is left of it end without effect."""
        self.gate.bury()
        for task in self._abandoned:
            task.cancel()
        await asyncio.gather(*self._abandoned, return_exceptions=True)
        with contextlib.suppress(Died):
            await self.tasks.close()
        with contextlib.suppress(Exception):
            await self._database.close()

    # asking

    async def create(self, template: str = "base", **options: Any) -> SandboxView:
        request = {"timeout_s": 300, "on_timeout": OnTimeout.PAUSE, **options}
        return await self.manager.create(CreateRequest(template, **request))

    def state(self, view: SandboxView) -> PublicState:
        return self.manager.get(view.id).state

    # what must be so

    async def quiet(self) -> None:
        """Return when nothing is under way any more, so that what there is can be counted."""
        async with asyncio.timeout(_REAL_WAIT_S):
            while any(not name.startswith("node: watch-") for name in self._busy()):
                await asyncio.sleep(0.002)

    def _busy(self) -> list[str]:
        resting = {f"node: sandbox-{view.id}" for view in self.manager.sandboxes() if self._at_rest(view)}
        names = [task.get_name() for task in self.tasks._tasks]
        return [name for name in names if name not in {"node: deadlines", "node: warm-pool"} | resting]

    def _at_rest(self, view: SandboxView) -> bool:
        sandbox = self.manager._sandboxes[view.id]
        return bool(sandbox._queue._getters)  # type: ignore[attr-defined]

    async def check(self) -> None:
        """Everything that is held is held by somebody, and what is said of sandboxes is so."""
        await self.quiet()
        world = self.world
        views = self.manager.sandboxes()
        assert world.network.mistakes == []
        assert self.tasks.failures == 0
        rows = {row["id"]: row["record"] for row in await self._database.read("SELECT id, record FROM sandboxes")}
        assert set(rows) == {view.id for view in views}
        machines = {}
        for view in views:
            sandbox = self.manager._sandboxes[view.id]
            machine = sandbox._actions.machine
            stored = SandboxRecord.from_json(json.loads(rows[view.id]))
            assert stored.lifecycle.state == view.state == sandbox.state
            if view.state is PublicState.RUNNING:
                assert machine is not None
                machines[view.id] = machine
                guest = world.guest(view, self)
                assert guest.agent["frozen"] is False, "it is said to run, and is frozen"
                assert guest.agent["sandboxId"] == view.id
                assert self.deadlines._due[view.id] == view.end_at
                assert sandbox.record.paused_as is None
            else:
                assert machine is None
                assert view.id not in world.network.routes
                assert view.id not in self.deadlines._due
                record = self.snapshots.get(stored.paused_as)
                assert self.snapshots.state(record)
                for path in self.layers.paths([*record.disk_layers, *record.memory_layers]):
                    assert path.exists()
        pool = self.warm_pool._ready
        held = [*machines.values(), *pool]
        assert set(world.network.routes) == set(machines)
        assert set(self.deadlines._due) == set(machines)
        assert {slot.index for slot in self.slots.in_use} == {machine.slot.index for machine in held}
        assert set(world.network.slots) == {machine.slot.index for machine in held}
        assert {process.vm_id for process in world.host.processes.values()} == {machine.id for machine in held}
        images = {machine.disk_image for machine in held} | {f"{machine.id}-memory" for machine in held}
        assert {image.id for image in await world.storage.images()} == images
        assert {path.name for path in world.paths.machines.iterdir()} == {machine.id for machine in held}
        assert {path.name for path in world.paths.uppers.iterdir()} == {machine.disk_image for machine in held}
        entries = {(entry.kind, entry.name, entry.owner) for entry in Ledger(world.paths.ledger).entries()}
        expected = {("blockd", "daemon", "")}
        for machine in held:
            owner = machine.owner
            expected |= {("vm", machine.id, owner), ("slot", str(machine.slot.index), owner)}
            expected |= {("image", machine.disk_image, owner), ("image", f"{machine.id}-memory", owner)}
        assert entries == expected
        assert self.capacity.memory_taken_mib == sum(m.shape.memory_mib for m in machines.values())
        assert self.services.starts.in_flight == 0
        records = list(self.snapshots._records.values())
        snapshot_rows = await self._database.read("SELECT id FROM snapshots")
        assert {row["id"] for row in snapshot_rows} == {record.id for record in records}
        assert {path.name for path in world.paths.states.iterdir()} == {record.id for record in records}
        holders = {record.id: {*record.disk_layers, *record.memory_layers} for record in records}
        holders |= {sandbox: set(machine.layers) for sandbox, machine in machines.items()}
        assert {name: set(layers) for name, layers in self.layers._holders.items()} == holders
        layers = set().union(*holders.values())
        assert {path.stem for path in world.paths.layers.iterdir()} == layers
        for machine in machines.values():
            opened = await world.storage.image(machine.disk_image)
            assert tuple(LayerStore.layer_of(path) for path in opened.layers) == machine.disk_layers

    async def end(self) -> None:
        """Kill and delete all but the template: nothing may be left then."""
        for view in self.manager.sandboxes():
            await self.manager.kill(view.id)
        for snapshot in self.manager.list_snapshots():
            await self.manager.delete_snapshot(snapshot.id)
        await self.check()
        assert self.base is not None
        assert list(self.snapshots._records) == [self.base.id]


async def open_database(path: Path) -> Database:
    return await Database.open(path, {"snapshots": snapshot_tables.MIGRATIONS, "sandboxes": sandbox_tables.MIGRATIONS})


@contextlib.contextmanager
def collected_logs() -> Iterator[list[dict[str, Any]]]:
    """What is logged meanwhile; printed too, briefly."""
    entries: list[dict[str, Any]] = []

    def collect(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        entries.append({**event, "log_level": method})
        return {**event, "log_level": method}

    before = structlog.get_config()
    structlog.configure(processors=[collect, structlog.processors.format_exc_info, structlog.dev.ConsoleRenderer()])
    try:
        yield entries
    finally:
        structlog.configure(**before)


@contextlib.asynccontextmanager
async def open_world(kind: CaptureKind, *, home: Path | None = None, **settings: Any) -> AsyncIterator[World]:
    memory = Path("/dev/shm")  # most of the time on a disk would be waiting for it to sync
    directory = Path(tempfile.mkdtemp(prefix="aenv-n-", dir=memory if memory.is_dir() else "/tmp"))
    directory.chmod(0o755)
    world = World(directory, kind, home, **settings)
    with collected_logs() as world.logs:
        try:
            await world.start_blockd()
            yield world
        finally:
            await world.close()
            shutil.rmtree(directory, ignore_errors=True)
