"""The node's side of edge: starts or adopts it, and tells it where each sandbox is (docs/protocols/edge.md).

edge outlives this process. While this one lives it also watches over edge: one that dies is started again on
the same address and given the whole table. Owns the table's last word; knows nothing of the states behind it.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import structlog

from aenv.aiokit import TaskSet
from aenv.errors import HostUnsupported, OperationFailed
from aenv.ids import SandboxId
from aenv.ledger import Ledger
from aenv.node.paths import NodePaths
from aenv.settings import Settings
from aenv.vmm.process import Process, spawn
from aenv_native import program

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
"""edge drains for 2 s."""
REQUEST_TIMEOUT_S = 10.0
RESTART_PAUSE_S = 1.0
_LEDGER_KIND = "edge"


@dataclass(frozen=True)
class Route:
    """Where a sandbox is, and what a request must show."""

    generation: int
    address: str | None
    """Host-side address of its slot; None only when paused."""
    access_token: str | None = field(default=None, repr=False)
    traffic_token: str | None = field(default=None, repr=False)
    envd_port: int = 49983
    state: Literal["running", "paused"] = "running"


async def ensure_edge(settings: Settings, ledger: Ledger) -> "FrontDoor":
    """Adopt the edge of this runtime directory if it is as the settings say; else end it and start one.

    Raises: HostUnsupported (no program, or the address cannot be had), OperationFailed; no edge runs then.
    """
    front_door = FrontDoor(settings, ledger)
    try:
        await front_door._open()
    except BaseException:
        await front_door.close()
        raise
    return front_door


class FrontDoor:
    """Calls raise OperationFailed when edge neither answers nor comes back; its successor is told even so."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        paths = NodePaths.of(settings)
        self._ledger = ledger
        self._socket = paths.runtime / "edge.sock"
        self._log_path = paths.logs / "edge.log"
        domains = ["--domain", settings.domain] if settings.domain else []
        self._options = [
            *("--control", str(paths.control_socket), "--admin", str(self._socket)),
            *("--uid", str(settings.edge_uid), *domains),
        ]
        self.listen = settings.listen
        """HOST:PORT of the public listener; the real port once open."""
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self._socket)),
            base_url="http://edge",
            timeout=REQUEST_TIMEOUT_S,
        )
        self._routes: dict[SandboxId, Route] = {}
        self._order = asyncio.Lock()
        """Messages go one at a time: a table on its way must not undo a route sent after it."""
        self._restored = asyncio.Event()
        """Set when the next edge after a death has the table; replaced then."""
        self._process: Process | None = None
        self._tasks = TaskSet("front door")

    async def publish(self, sandbox_id: SandboxId, route: Route) -> None:
        """Requests go there from now on; what went through a different route of the sandbox is cut.

        Raises: OperationFailed, also when edge knows a newer generation.
        """
        before = self._routes.get(sandbox_id)
        self._routes[sandbox_id] = route
        response = await self._tell("PUT", f"/routes/{sandbox_id}", asdict(route))
        if response is not None and response.is_error:
            if before is None:
                del self._routes[sandbox_id]
            else:
                self._routes[sandbox_id] = before
            raise OperationFailed(f"edge refused the route of sandbox {sandbox_id}: {response.text}")

    async def withdraw(self, sandbox_id: SandboxId, generation: int) -> None:
        """No request reaches the sandbox once this returns, and its clients are cut. A newer route stays.

        Raises: OperationFailed.
        """
        held = self._routes.get(sandbox_id)
        if held is not None and held.generation <= generation:
            del self._routes[sandbox_id]
        response = await self._tell("DELETE", f"/routes/{sandbox_id}?generation={generation}")
        if response is not None and response.is_error and response.status_code != 409:
            raise OperationFailed(f"edge did not withdraw the route of sandbox {sandbox_id}: {response.text}")

    async def sync(self, routes: Mapping[SandboxId, Route]) -> None:
        """`routes` are all there are. Equal ones keep their connections. Raises: OperationFailed."""
        self._routes = dict(routes)
        response = await self._tell("PUT", "/routes", self._table())
        if response is not None and response.is_error:
            raise OperationFailed(f"edge refused the table of routes: {response.text}")

    async def stop(self) -> None:
        """End edge and let go of it: short exchanges finish, the rest is cut. Idempotent."""
        await self._tasks.close()
        if self._process is not None:
            await self._end(self._process)
            self._process = None
        await self.close()

    async def close(self) -> None:
        """Let go of edge, which goes on. Idempotent."""
        await self._tasks.close()
        if self._process is not None:
            self._process.close()
        await self._client.aclose()

    # the process

    async def _open(self) -> None:
        self._process = await self._adopt()
        if self._process is None:
            self._process = await self._start()
        self._tasks.spawn(self._watch(self._process), name="watch")

    async def _adopt(self) -> Process | None:
        """The edge that serves our socket, if it is as we want it; any other of ours is ended."""
        process, listen = None, ""
        # The socket lies where only root can put one, so who answers there is ours.
        with suppress(httpx.TransportError, ProcessLookupError):
            health = (await self._client.get("/health")).json()
            process, listen = Process(health["pid"]), health["listen"]
        if process is None:
            process = self._recorded()
        if process is None:
            return None
        wanted, found = self._command(), _command_line(process.pid)
        listens = found[1:3] == wanted[1:3] or listen == self.listen
        if listen and listens and found[3:] == wanted[3:]:
            self.listen = listen
            self._record(process)
            log.info("adopted edge", pid=process.pid, listen=listen)
            return process
        log.warning("ending an edge that does not answer or was started with other settings", pid=process.pid)
        await self._end(process)
        return None

    async def _start(self) -> Process:
        """Returns once it listens. Raises: HostUnsupported, OperationFailed; nothing is left then."""
        command = self._command()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        errors = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        written_before = os.fstat(errors).st_size
        try:
            process = Process(spawn(command, {1: write_end, 2: errors}))
        except OSError as error:
            os.close(read_end)
            raise OperationFailed(f"edge cannot be started: {error}") from error
        finally:
            os.close(write_end)
            os.close(errors)
        self._record(process)
        try:
            line = await asyncio.wait_for(_first_line(read_end), START_TIMEOUT_S)
        except BaseException as error:
            await self._end(process)
            if isinstance(error, TimeoutError):
                raise OperationFailed(f"edge was not ready within {START_TIMEOUT_S:g} s") from error
            raise
        if not line.startswith("ready "):
            await self._end(process)
            raise self._start_failure(written_before)
        self.listen = line.removeprefix("ready ").strip()
        return process

    def _start_failure(self, log_offset: int) -> Exception:
        with self._log_path.open("rb") as file:
            file.seek(log_offset)
            reason = file.read(4096).decode(errors="replace").strip() or "it said nothing"
        if "cannot listen on" in reason and str(self._socket) not in reason:
            hint = f"end what listens on {self.listen}, or choose another address with AENV_LISTEN"
            return HostUnsupported(f"the front door did not start: {reason}", hint=hint)
        return OperationFailed(f"edge did not start: {reason}")

    async def _watch(self, process: Process) -> None:
        while True:
            await process.wait()
            log.error("edge has ended; starting it again", pid=process.pid)
            process.close()
            try:
                process = self._process = await self._start()
                await self._restore()
            except (HostUnsupported, OperationFailed, httpx.HTTPError) as error:
                log.error("edge could not be restored", error=str(error))
                await self._end(process)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _restore(self) -> None:
        async with self._order:
            (await self._client.put("/routes", json=self._table())).raise_for_status()
        restored, self._restored = self._restored, asyncio.Event()
        restored.set()

    async def _end(self, process: Process) -> None:
        try:
            with suppress(httpx.HTTPError):
                await self._client.post("/shutdown")
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            process.kill()
            await process.wait()
        finally:
            process.close()
        self._socket.unlink(missing_ok=True)
        self._ledger.erase(_LEDGER_KIND, _LEDGER_KIND)

    def _command(self) -> list[str]:
        try:
            executable = os.environ.get("AENV_EDGE") or str(program("edge"))
        except FileNotFoundError as error:
            raise HostUnsupported("the program edge is not installed", hint=str(error)) from error
        return [executable, "--listen", self.listen, *self._options]

    def _record(self, process: Process) -> None:
        self._ledger.record(_LEDGER_KIND, _LEDGER_KIND, pid=process.pid, start_time=process.start_time)

    def _recorded(self) -> Process | None:
        for entry in self._ledger.entries(_LEDGER_KIND):
            with suppress(ProcessLookupError, KeyError):
                return Process(entry.details["pid"], entry.details["start_time"])
        return None

    # messages

    def _table(self) -> dict[str, Any]:
        return {"routes": {sandbox_id: asdict(route) for sandbox_id, route in self._routes.items()}}

    async def _tell(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response | None:
        """The answer; None when edge died meanwhile and its successor has been given the whole table."""
        restored = self._restored
        try:
            async with self._order:
                return await self._client.request(method, path, json=body)
        except httpx.TransportError as error:
            try:
                await asyncio.wait_for(restored.wait(), START_TIMEOUT_S)
            except TimeoutError:
                raise OperationFailed(f"edge does not answer: {error!r}") from error
            return None


async def _first_line(descriptor: int) -> str:
    """A pipe's first line, "" when it ends before. Closes the descriptor."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        return (await reader.readline()).decode(errors="replace")
    finally:
        transport.close()


def _command_line(pid: int) -> list[str]:
    """Words of a process's command; [] when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
