"""The node: all parts put together, started, and stopped. The only place where they meet.

Order of start: storage engine, edge, network, VMM driver; then what an earlier process left is taken over; then the
template; then the API answers. On stop it is the reverse. blockd, edge and VMMs are not children that die with this
process: after `kill -9` the next one adopts them.
"""

import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import structlog
import uvicorn

from aenv.aiokit import Bounded, TaskSet
from aenv.api.app import create_app
from aenv.api.keys import load_api_key
from aenv.clock import SystemClock
from aenv.database import Database
from aenv.errors import Conflict, HostUnsupported, OperationFailed
from aenv.guest.assets import ensure_assets
from aenv.ids import InstanceId, new_instance_id
from aenv.ledger import Ledger
from aenv.network.pool import SlotPool
from aenv.node import record as sandbox_tables
from aenv.node.capacity import Capacity
from aenv.node.capture import Capturer
from aenv.node.deadlines import Deadlines
from aenv.node.front_door import ensure_edge
from aenv.node.machines import Machines
from aenv.node.manager import SandboxManager
from aenv.node.paths import NodePaths
from aenv.node.services import Services
from aenv.node.storage_watch import watch_storage
from aenv.node.tokens import Tokens
from aenv.node.warm_pool import OWNER as WARM_POOL
from aenv.node.warm_pool import WarmPool
from aenv.settings import Settings
from aenv.snapshots import store as snapshot_tables
from aenv.snapshots.layers import LayerStore
from aenv.snapshots.store import SnapshotStore
from aenv.storage.supervisor import ensure_blockd, stop_blockd
from aenv.templates.base import BaseTemplate
from aenv.vmm.qemu.driver import QemuDriver

log = structlog.get_logger(__name__)

Progress = Callable[[str], None]


@asynccontextmanager
async def running_node(
    settings: Settings, progress: Progress, *, keep_running: Callable[[], bool]
) -> AsyncIterator["Node"]:
    """A whole node. On leaving, running sandboxes are paused and everything this process started ends, unless
    `keep_running` says so.

    Raises: HostUnsupported, Conflict (another server has this home), CorruptData, StorageFull; nothing is left then.
    """
    require_root()
    paths = NodePaths.of(settings)
    require_reachable(paths.home, paths.runtime, settings.cache.absolute())
    with exclusive(paths):
        make_directories(paths, settings)
        async with AsyncExitStack() as stack:
            node = await _start(stack, settings, paths, progress, keep_running)
            yield node


class Node:
    """What the command line needs of a running node."""

    def __init__(self, manager: SandboxManager, services: Services, url: str) -> None:
        self.manager = manager
        self.services = services
        self.url = url


async def _start(
    stack: AsyncExitStack,
    settings: Settings,
    paths: NodePaths,
    progress: Progress,
    keep_running: Callable[[], bool],
) -> Node:
    clock, ledger, instance = SystemClock(), Ledger(paths.ledger), load_instance_id(paths)
    assets = await ensure_assets(settings, progress)
    database = await Database.open(
        paths.database, {"snapshots": snapshot_tables.MIGRATIONS, "sandboxes": sandbox_tables.MIGRATIONS}
    )
    stack.push_async_callback(database.close)

    def left_running() -> bool:
        """What runs on by wish, for lack of a pause, or because the start failed, needs blockd and edge."""
        return keep_running() or any(entry.owner != WARM_POOL for entry in ledger.entries("vm"))

    storage = await ensure_blockd(settings, ledger)

    async def end_storage() -> None:
        if not left_running():
            await stop_blockd(settings, ledger)

    stack.push_async_callback(end_storage)
    driver = await QemuDriver.create(settings, instance)
    for warning in driver.warnings:
        log.warning(warning)
    slots = SlotPool(settings, instance, ledger, clock)
    await slots.start()
    stack.push_async_callback(slots.close)

    tasks = TaskSet("node")
    layers = LayerStore(paths.layers)
    snapshots = SnapshotStore(database, layers, paths.states)
    machines = Machines(
        settings=settings,
        paths=paths,
        ledger=ledger,
        driver=driver,
        slots=slots,
        storage=storage,
        layers=layers,
    )
    capturer = Capturer(machines, clock)
    warm_pool = WarmPool(machines, snapshots, tasks, settings.warm_pool_size)
    stack.push_async_callback(warm_pool.close)

    front_door = await ensure_edge(settings, ledger)

    async def end_front_door() -> None:
        await (front_door.close() if left_running() else front_door.stop())

    stack.push_async_callback(end_front_door)
    manager: SandboxManager
    deadlines = Deadlines(clock, lambda sandbox: manager.expired(sandbox))  # noqa: PLW0108 (the manager comes later)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    services = Services(
        settings=settings,
        clock=clock,
        database=database,
        snapshots=snapshots,
        layers=layers,
        machines=machines,
        capturer=capturer,
        front_door=front_door,
        deadlines=deadlines,
        capacity=Capacity(settings),
        starts=Bounded(
            settings.max_starts_in_flight or 2 * (os.cpu_count() or 1),
            wait_s=settings.start_queue_timeout_s,
            clock=clock,
        ),
        tasks=tasks,
        tokens=Tokens.load(paths.secrets),
        warm_pool=warm_pool,
        boot_id=boot_id,
        dns_servers=list(slots.dns_servers),
    )
    manager = SandboxManager(services)
    stack.push_async_callback(manager.let_go)
    stack.push_async_callback(tasks.close)
    for problem in await snapshots.load():
        log.error("left as it is", error=str(problem))
    await manager.recover()
    tasks.spawn(deadlines.run(), name="deadlines")
    tasks.spawn(watch_storage(settings, ledger, storage, driver), name="storage watch")
    base = BaseTemplate(
        settings=settings,
        machines=machines,
        capturer=capturer,
        snapshots=snapshots,
        clock=clock,
        boot_id=boot_id,
    )
    template = await base.ensure(assets, progress)
    manager.serve(template)
    warm_pool.serve(template)
    await _serve_api(stack, manager, settings, paths)
    stack.push_async_callback(lambda: manager.stop(keep_running=keep_running()))
    return Node(manager, services, f"http://{front_door.listen}")


async def _serve_api(stack: AsyncExitStack, manager: SandboxManager, settings: Settings, paths: NodePaths) -> None:
    """uvicorn on the control socket, which edge forwards to."""
    app = create_app(manager, settings=settings, api_key=load_api_key(settings, paths.secrets))
    paths.control_socket.unlink(missing_ok=True)
    config = uvicorn.Config(
        app,
        uds=str(paths.control_socket),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(), name="api")
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
    if not listening.done():
        listening.cancel()
        await serving
        raise OperationFailed(f"the API does not listen on {paths.control_socket}")

    async def end() -> None:
        server.should_exit = True
        await serving
        await app.state.context.tasks.close()
        paths.control_socket.unlink(missing_ok=True)

    stack.push_async_callback(end)


class _Server(uvicorn.Server):
    """Signals are the node's business, not uvicorn's; and it says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def serve(settings: Settings, *, keep_running: bool) -> None:
    """`aenv server`: run a node until SIGTERM or SIGINT. Prints one line on standard output when it is ready."""
    stop, ready = asyncio.Event(), asyncio.Event()
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None

    def end() -> None:
        # A first start builds for minutes: it is given up, once; what it has begun is undone on the way out.
        if not ready.is_set() and not stop.is_set():
            this.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        async with running_node(settings, progress, keep_running=lambda: keep_running) as node:
            ready.set()
            print(f"ready {node.url}", flush=True)
            await stop.wait()
            log.info("stopping", keep_running=keep_running)
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        log.info("stopped before it was ready")


# what must be there before anything else


def require_root() -> None:
    """Raises: HostUnsupported."""
    if os.geteuid() != 0:
        raise HostUnsupported(
            "the node needs root, for network namespaces, mounts and processes of other users",
            hint="use sudo",
        )


@contextmanager
def exclusive(paths: NodePaths) -> Iterator[None]:
    """One server a home and a runtime directory. Raises: Conflict, HostUnsupported for one that cannot be written."""
    locks = []
    try:
        for directory in (paths.home, paths.runtime):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                lock = os.open(directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise HostUnsupported(
                    f"{directory} cannot be used: {error.strerror}",
                    hint="make it a directory that root can write, or choose another AENV_HOME or AENV_RUNTIME",
                ) from error
            locks.append(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Conflict(
                    f"another server uses {directory}",
                    hint="stop it, or give this one its own AENV_HOME and AENV_RUNTIME",
                ) from error
        yield
    finally:
        for lock in locks:
            os.close(lock)


def make_directories(paths: NodePaths, settings: Settings) -> None:
    """Owners and modes as who works there needs them: blockd unprivileged on layers, VMMs in their own directory."""
    for directory in (paths.home, paths.runtime, paths.machines):
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o711)
    for directory in (paths.states, paths.secrets, paths.logs):
        directory.mkdir(exist_ok=True)
        directory.chmod(0o700)
    for directory in (paths.layers, paths.uppers):
        directory.mkdir(exist_ok=True)
        os.chown(directory, settings.blockd_uid, settings.blockd_uid)
        directory.chmod(0o700)


def require_reachable(*directories: Path) -> None:
    """blockd and the VMMs are not root: they must be able to get to where they work. Raises: HostUnsupported."""
    for directory in directories:
        for parent in reversed(directory.parents):
            if parent.exists() and not parent.stat().st_mode & 0o001:
                raise HostUnsupported(
                    f"{parent} keeps the unprivileged parts of the node out of {directory}",
                    hint=f"chmod o+x {parent}, or choose another place",
                )


def load_instance_id(paths: NodePaths) -> InstanceId:
    """This home's short name in host-global names; made at the first start."""
    path = paths.home / "instance-id"
    try:
        return InstanceId(path.read_text().strip())
    except FileNotFoundError:
        path.write_text(new_instance_id() + "\n")
        return InstanceId(path.read_text().strip())
