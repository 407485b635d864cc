"""Durable records in SQLite: one connection, one thread, every write a transaction that is on stable storage when it
returns.

WAL with synchronous=FULL. Each component owns its tables and migrates them by itself: a list of SQL scripts, of which
the n-th leads to version n. Memory holds what the node decides by; the database is read at start only.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from aenv.errors import CorruptData, StorageFull

T = TypeVar("T")


class Database:
    """Use `open`, then `write` and `read`; `close` waits for what is under way."""

    def __init__(self, connection: sqlite3.Connection, thread: ThreadPoolExecutor) -> None:
        self._connection = connection
        self._thread = thread

    @classmethod
    async def open(cls, path: Path, components: dict[str, Sequence[str]]) -> "Database":
        """Open or make the database at `path` and bring each component's tables to its newest version.

        Raises:
            CorruptData: the file is no database, or was written by a newer version.
        """
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")

        def connect() -> sqlite3.Connection:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, isolation_level=None)
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("PRAGMA foreign_keys=ON")
                _migrate(connection, components)
            except sqlite3.DatabaseError as error:
                connection.close()
                raise CorruptData(
                    f"the database {path} cannot be read: {error}",
                    hint="restore it from a backup, or move it away",
                ) from error
            except CorruptData:
                connection.close()
                raise
            return connection

        loop = asyncio.get_running_loop()
        try:
            return cls(await loop.run_in_executor(thread, connect), thread)
        except BaseException:
            thread.shutdown(wait=False)
            raise

    async def write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Run `change` in a transaction. When this returns it is durable; when it raises nothing was changed.

        Raises:
            StorageFull: no space left for it.
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
        except sqlite3.OperationalError as error:
            if "full" in str(error) or "disk I/O" in str(error):
                raise StorageFull(
                    f"the record could not be written: {error}", hint="free space in AENV_HOME"
                ) from error
            raise

    async def read(self, query: str, parameters: Sequence[object] = ()) -> list[sqlite3.Row]:
        def fetch() -> list[sqlite3.Row]:
            cursor = self._connection.cursor()
            cursor.row_factory = sqlite3.Row
            return cursor.execute(query, parameters).fetchall()

        return await asyncio.get_running_loop().run_in_executor(self._thread, fetch)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()


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
