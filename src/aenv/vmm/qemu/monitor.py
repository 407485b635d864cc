"""A QMP session with one QEMU process."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Any

from qemu.qmp import EventListener, ExecuteError, QMPClient, QMPError

from aenv.errors import OperationFailed

# The library logs every lost connection as an error; whoever uses the monitor reports it, once and with the
# sandbox's name.
_session_log = logging.getLogger("aenv.vmm.qemu.qmp")
_session_log.setLevel(logging.CRITICAL + 1)


class MonitorLostError(Exception):
    """The session has ended: QEMU is gone or has closed it."""


class Monitor:
    def __init__(self, client: QMPClient, migration: EventListener) -> None:
        self._client = client
        self._migration = migration

    @classmethod
    async def connect(cls, connection: socket.socket) -> Monitor:
        """Negotiate on a connected socket, which is the monitor's from here on. Raises: MonitorLostError."""
        client = QMPClient()
        client.logger = _session_log
        migration = EventListener(("MIGRATION",))
        client.register_listener(migration)
        # The library's own negotiation takes an event that comes before the answer for a failure, and QEMU, which is
        # loading a state meanwhile, may send one.
        client.negotiate = False
        try:
            await client.connect(connection)
        except (QMPError, OSError, EOFError) as error:
            connection.close()
            raise MonitorLostError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        monitor = cls(client, migration)
        try:
            await monitor.execute("qmp_capabilities")
        except OperationFailed as error:
            await monitor.close()
            raise MonitorLostError(error.message) from error
        except BaseException:
            await monitor.close()
            raise
        return monitor

    async def execute(self, command: str, arguments: dict[str, object] | None = None) -> Any:
        """Raises: OperationFailed when QEMU refuses it, MonitorLostError."""
        try:
            return await self._client.execute(command, arguments)
        except ExecuteError as error:
            raise OperationFailed(f"QEMU refused {command}: {error}") from error
        except (QMPError, OSError, EOFError) as error:
            raise MonitorLostError(str(error)) from error

    async def loaded(self) -> None:
        """Return when the incoming state is loaded. Does not end when QEMU does: it exits on a state it
        cannot load.

        Raises: OperationFailed, MonitorLostError.
        """
        # Events from before the session are lost, so the status is asked once before the first wait.
        while (await self.execute("query-migrate")).get("status") != "completed":
            await self._migration.get()

    async def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(QMPError, OSError, EOFError):  # how the session ended no longer matters
            await self._client.disconnect()
