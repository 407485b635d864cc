"""Durable records in SQLite: one connection, one thread, every write a transaction that is on stable storage when it
returns.

WAL with synchronous=FULL. Each component owns its tables and migrates them by itself: a list of SQL scripts, of which
the n-th leads to version n. Memory holds what the node decides by; the database is read at start only.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from aenv.errors import AenvError, CorruptData, OperationFailed, StorageFull

T = TypeVar("T")

_CHECKPOINT_PAGES = 256
_LOG_BYTES = 4 << 20
"""Room for the write-ahead log, taken while there is some: what is deleted on a full disk has to be written down too.
The log is written over from its start once it is checkpointed, so it stays within. While the database is closed, which
removes the log, a file named `<database>-room` keeps the place.
"""


class Database:
    """Use `open`, then `write` and `read`; `close` waits for what is under way."""

    def __init__(self, path: Path, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._path = path
        self._connection = connection
        self._thread = thread

    @classmethod
    async def open(cls, path: Path, components: dict[str, Sequence[str]]) -> "Database":
        """Open or make the database at `path` and bring each component's tables to its newest version.

        Raises:
            CorruptData: the file is no database, or was written by a newer version.
            StorageFull, OperationFailed: it cannot be made or opened.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")

        def connect() -> sqlite3.Connection:
            path.parent.mkdir(parents=True, exist_ok=True)
            _room(path).unlink(missing_ok=True)
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("PRAGMA foreign_keys=ON")
                connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
                _migrate(connection, components)
                _reserve(_log(path))
            except BaseException:
                connection.close()
                raise
            return connection

        loop = asyncio.get_running_loop()
        try:
            return cls(path, await loop.run_in_executor(thread, connect), thread)
        except sqlite3.Error as error:
            thread.shutdown(wait=False)
            raise _named(error, f"the database {path} cannot be opened") from error
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Run `change` in a transaction. When this returns it is durable; when it raises nothing was changed.

        Raises:
            StorageFull: no space left for it.
            CorruptData, OperationFailed: what else SQLite refuses it for.
        """

        def transaction() -> T:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = change(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except sqlite3.Error as error:
            raise _named(error, "the record could not be written") from error

    async def read(self, query: str, parameters: Sequence[object] = ()) -> list[sqlite3.Row]:
        """Raises: CorruptData, OperationFailed."""

        def fetch() -> list[sqlite3.Row]:
            cursor = self._connection.cursor()
            cursor.row_factory = sqlite3.Row
            return cursor.execute(query, parameters).fetchall()

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, fetch)
        except sqlite3.Error as error:
            raise _named(error, "the records could not be read") from error

    async def close(self) -> None:
        def end() -> None:
            self._connection.close()
            _reserve(_room(self._path))

        await asyncio.get_running_loop().run_in_executor(self._thread, end)
        self._thread.shutdown()


def _named(error: sqlite3.Error, what: str) -> AenvError:
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL | sqlite3.SQLITE_IOERR:  # the second is how the log's index runs out of space
            return StorageFull(f"{what}: {error}", hint="free space in AENV_HOME")
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return CorruptData(f"{what}: {error}", hint="restore it from a backup, or move it away")
        case _:
            return OperationFailed(f"{what}: {error}")


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _room(path: Path) -> Path:
    return path.with_name(f"{path.name}-room")


def _reserve(path: Path) -> None:
    """Give a file the blocks of a log. Zeros after the last frame of a log are none of its frames."""
    with suppress(OSError):  # a full disk must not keep the node from starting, and from deleting something
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _LOG_BYTES)
        finally:
            os.close(descriptor)


def _migrate(connection: sqlite3.Connection, components: dict[str, Sequence[str]]) -> None:
    connection.execute(
        "CREATE TABLE IF NOT EXISTS versions (component TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT"
    )
    for component, scripts in components.items():
        row = connection.execute("SELECT version FROM versions WHERE component = ?", (component,)).fetchone()
        version = row[0] if row else 0
        if version > len(scripts):
            raise CorruptData(
                f"table version {version} of {component} is newer than this program knows ({len(scripts)})",
                hint="run the version of aenv that wrote it, or a newer one",
            )
        for number, script in enumerate(scripts[version:], start=version + 1):
            connection.execute("BEGIN IMMEDIATE")
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
            connection.execute(
                "INSERT INTO versions VALUES (?, ?) ON CONFLICT (component) DO UPDATE SET version = excluded.version",
                (component, number),
            )
            connection.execute("COMMIT")
