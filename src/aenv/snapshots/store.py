"""The snapshot records of this node: in memory, backed by the database, with their device-state files and layer holds.

A record is committed only when its state file and layers exist; it is deleted before they go. So whatever is found at
start is whole, but for host power loss before `durable`: then it must not be trusted (`distrust`).
"""

import asyncio
import errno
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from aenv.database import Database
from aenv.errors import Conflict, CorruptData, NotFound, OperationFailed, StorageFull
from aenv.ids import SnapshotId
from aenv.snapshots.layers import LayerStore
from aenv.snapshots.records import Kind, SnapshotRecord

MIGRATIONS = ("CREATE TABLE snapshots (id TEXT PRIMARY KEY, record TEXT NOT NULL) STRICT",)

Change = Callable[[sqlite3.Connection], None]


class SnapshotStore:
    def __init__(self, database: Database, layers: LayerStore, states: Path) -> None:
        self._database = database
        self._layers = layers
        self._states = states
        self._records: dict[SnapshotId, SnapshotRecord] = {}
        self._names: dict[str, SnapshotId] = {}
        """Of records, and of those that are being committed."""
        self._corrupt: dict[SnapshotId, CorruptData] = {}
        """Records that cannot be read, or whose contents must not be used."""

    async def load(self) -> list[CorruptData]:
        """Read all records and take their holds; removes state files without a record. Returns the records that could
        not be read, which stay on disk; what layers they hold is not known.
        """
        known = set()
        for row in await self._database.read("SELECT id, record FROM snapshots"):
            known.add(row["id"])
            try:
                self._insert(SnapshotRecord.from_json(json.loads(row["record"])))
            except (CorruptData, ValueError) as error:
                self._corrupt[row["id"]] = CorruptData(
                    f"the record of snapshot {row['id']} cannot be read: {error}",
                    hint="run the version of aenv that wrote it, or delete what needs it",
                )
        self._states.mkdir(parents=True, exist_ok=True)
        for path in self._states.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
        return list(self._corrupt.values())

    # reading

    def get(self, snapshot_id: SnapshotId) -> SnapshotRecord:
        """Raises: NotFound; CorruptData when it is there but cannot be read."""
        record = self._records.get(snapshot_id)
        if record is not None:
            return record
        if snapshot_id in self._corrupt:
            raise self._corrupt[snapshot_id]
        raise NotFound(f"snapshot {snapshot_id} does not exist")

    def exists(self, snapshot_id: SnapshotId) -> bool:
        """Whether there is a record, readable or not."""
        return snapshot_id in self._records or snapshot_id in self._corrupt

    @property
    def all_readable(self) -> bool:
        """Whether the holds of all records are known."""
        return self._corrupt.keys() <= self._records.keys()

    def find(self, reference: str) -> SnapshotRecord:
        """The record with this id or name; `name:default` and `namespace/name` mean `name`. Pauses and forks cannot
        be named.

        Raises: NotFound.
        """
        record = self._records.get(SnapshotId(reference))
        if record is None:
            name = reference.rsplit("/", 1)[-1].removesuffix(":default")
            record = self._records.get(self._names.get(name, SnapshotId("")))
        if record is None or record.kind in (Kind.PAUSE, Kind.FORK):
            raise NotFound(f"template '{reference}' not found", hint="there are `base` and the snapshots you made")
        return record

    def all(self, *kinds: Kind) -> list[SnapshotRecord]:
        """Records of these kinds, newest first."""
        return sorted((r for r in self._records.values() if r.kind in kinds), key=lambda r: r.created_at, reverse=True)

    def state(self, record: SnapshotRecord) -> bytes:
        """The device state. Raises: CorruptData when it is missing or not what was captured."""
        if record.id in self._corrupt:
            raise self._corrupt[record.id]
        path = self._states / record.id
        try:
            state = path.read_bytes()
        except OSError as error:
            raise CorruptData(
                f"device state of snapshot {record.id} cannot be read: {error.strerror}",
                hint=f"restore the file {path}, or delete what needs it",
            ) from error
        if hashlib.sha256(state).hexdigest() != record.state_sha256:
            raise CorruptData(
                f"device state of snapshot {record.id} is damaged",
                hint=f"restore the file {path}, or delete what needs it",
            )
        return state

    def check(self, record: SnapshotRecord) -> None:
        """Raises: CorruptData when something it needs is missing or damaged, as far as can be seen without reading
        layers.
        """
        self.state(record)
        for path in self._layers.paths([*record.disk_layers, *record.memory_layers]):
            if not path.exists():
                raise CorruptData(f"layer {path.name} of snapshot {record.id} is missing", hint="restore the file")

    def distrust(self, record: SnapshotRecord, error: CorruptData) -> None:
        """From here on `state` raises `error`: what the record names is there, but must not be used."""
        self._corrupt[record.id] = error

    def check_name(self, name: str) -> None:
        """Raises: Conflict when another snapshot has the name."""
        if name in self._names:
            raise Conflict(
                f"the name '{name}' is taken by {self._names[name]}",
                hint="delete that one first, or take another name",
            )

    # writing

    def write_state(self, snapshot_id: SnapshotId, state: bytes) -> str:
        """Write a device state ahead of its record; returns its sha256 (hex). Raises: StorageFull, OperationFailed; no
        file is left then.
        """
        path = self._states / snapshot_id
        try:
            path.write_bytes(state)
        except OSError as error:
            path.unlink(missing_ok=True)
            message = f"device state could not be written: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(message, hint="free space in AENV_HOME") from error
            raise OperationFailed(message) from error
        return hashlib.sha256(state).hexdigest()

    def discard_state(self, snapshot_id: SnapshotId) -> None:
        """Undo `write_state` for a capture that came to nothing."""
        if snapshot_id not in self._records:
            (self._states / snapshot_id).unlink(missing_ok=True)

    async def commit(
        self, record: SnapshotRecord, also: Change | None = None, replaces: Iterable[SnapshotId] = ()
    ) -> None:
        """Make the record durable, in one transaction with `also` and the removal of the records it replaces.

        Raises: Conflict when one of its names is taken, StorageFull; nothing is changed then.
        """
        replaced = [self._records[r] for r in replaces if r in self._records]
        self._reserve(record, [r.id for r in replaced])

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO snapshots VALUES (?, ?)", (record.id, json.dumps(record.to_json())))
            connection.executemany("DELETE FROM snapshots WHERE id = ?", [(r.id,) for r in replaced])
            if also is not None:
                also(connection)

        try:
            await self._database.write(change)
        except BaseException:
            self._release_names(record)
            for old in replaced:
                self._names.update(dict.fromkeys(old.names, old.id))
            raise
        self._insert(record)
        for old in replaced:
            self._remove(old)

    async def delete(self, snapshot_id: SnapshotId) -> None:
        """Remove a record, one that cannot be read too; its layers go unless others hold them. Raises: NotFound,
        StorageFull; it is there still then.
        """
        if snapshot_id not in self._corrupt:
            self.get(snapshot_id)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))

        await self._database.write(change)
        self._corrupt.pop(snapshot_id, None)
        record = self._records.get(snapshot_id)
        if record is not None:
            self._remove(record)
        self.discard_state(snapshot_id)

    async def mark_durable(self, snapshot_id: SnapshotId) -> None:
        """The layers are on stable storage; so is the state file after this. A record deleted meanwhile is fine.

        Raises: StorageFull, OperationFailed.
        """
        record = self._records.get(snapshot_id)
        if record is None or record.durable:
            return
        try:
            await asyncio.to_thread(self._sync_state, snapshot_id)
        except OSError as error:
            if snapshot_id not in self._records:
                return
            raise OperationFailed(f"device state of snapshot {snapshot_id}: {error.strerror}") from error
        durable = replace(record, durable=True)

        def change(connection: sqlite3.Connection) -> None:
            # Not an insert: a deletion may have been written since we looked.
            connection.execute(
                "UPDATE snapshots SET record = ? WHERE id = ?", (json.dumps(durable.to_json()), snapshot_id)
            )

        await self._database.write(change)
        if snapshot_id in self._records:
            self._records[snapshot_id] = durable

    def _sync_state(self, snapshot_id: SnapshotId) -> None:
        for path in (self._states / snapshot_id, self._states):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _reserve(self, record: SnapshotRecord, replaced: Sequence[SnapshotId]) -> None:
        """Take the names before the record is written, so that of two that want one only one is. Raises: Conflict."""
        for name in record.names:
            if self._names.get(name, record.id) not in (record.id, *replaced):
                self.check_name(name)
        self._names.update(dict.fromkeys(record.names, record.id))

    def _release_names(self, record: SnapshotRecord) -> None:
        for name in record.names:
            if self._names.get(name) == record.id:
                del self._names[name]

    def _insert(self, record: SnapshotRecord) -> None:
        self._records[record.id] = record
        for name in record.names:
            self._names[name] = record.id
        self._layers.hold(record.id, [*record.disk_layers, *record.memory_layers])

    def _remove(self, record: SnapshotRecord) -> None:
        self._records.pop(record.id, None)
        self._release_names(record)
        (self._states / record.id).unlink(missing_ok=True)
        self._layers.release(record.id)
