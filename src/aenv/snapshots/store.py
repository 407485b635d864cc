"""The snapshot records of this node: in memory, backed by the database, with their device-state files and layer holds.

A record is committed only when its state file and layers exist; it is deleted before they go. So whatever is found at
start is whole, but for host power loss before `durable`, which `load` checks.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from aenv.database import Database
from aenv.errors import Conflict, CorruptData, NotFound, StorageFull
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

    async def load(self) -> list[CorruptData]:
        """Read all records and take their holds; removes state files without a record. Returns the records that could
        not be read, which stay on disk.
        """
        problems = []
        known = set()
        for row in await self._database.read("SELECT id, record FROM snapshots"):
            known.add(row["id"])
            try:
                self._insert(SnapshotRecord.from_json(json.loads(row["record"])))
            except (CorruptData, ValueError) as error:
                problems.append(CorruptData(f"snapshot {row['id']}: {error}"))
        self._states.mkdir(parents=True, exist_ok=True)
        for path in self._states.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
        return problems

    # reading

    def get(self, snapshot_id: SnapshotId) -> SnapshotRecord:
        """Raises: NotFound."""
        record = self._records.get(snapshot_id)
        if record is None:
            raise NotFound(f"snapshot {snapshot_id} does not exist")
        return record

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
            raise NotFound(f"template '{reference}' not found", hint="`aenv template list` shows what there is")
        return record

    def all(self, *kinds: Kind) -> list[SnapshotRecord]:
        """Records of these kinds, newest first."""
        return sorted((r for r in self._records.values() if r.kind in kinds), key=lambda r: r.created_at, reverse=True)

    def state(self, record: SnapshotRecord) -> bytes:
        """The device state. Raises: CorruptData when it is missing or not what was captured."""
        path = self._states / record.id
        try:
            state = path.read_bytes()
        except OSError as error:
            raise CorruptData(f"device state of snapshot {record.id} cannot be read: {error.strerror}") from error
        if hashlib.sha256(state).hexdigest() != record.state_sha256:
            raise CorruptData(
                f"device state of snapshot {record.id} is damaged",
                hint="the snapshot cannot be restored; delete it",
            )
        return state

    def check_name(self, name: str) -> None:
        """Raises: Conflict when another snapshot has the name."""
        if name in self._names:
            raise Conflict(
                f"the name '{name}' is taken by {self._names[name]}",
                hint="delete that one first, or take another name",
            )

    # writing

    def write_state(self, snapshot_id: SnapshotId, state: bytes) -> str:
        """Write a device state ahead of its record; returns its sha256 (hex). Raises: StorageFull."""
        try:
            (self._states / snapshot_id).write_bytes(state)
        except OSError as error:
            raise StorageFull(
                f"device state could not be written: {error.strerror}", hint="free space in AENV_HOME"
            ) from error
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
        for name in record.names:
            holder = self._names.get(name)
            if holder is not None and holder != record.id and all(holder != r.id for r in replaced):
                self.check_name(name)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO snapshots VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record",
                (record.id, json.dumps(record.to_json())),
            )
            connection.executemany("DELETE FROM snapshots WHERE id = ?", [(r.id,) for r in replaced])
            if also is not None:
                also(connection)

        await self._database.write(change)
        self._insert(record)
        for old in replaced:
            self._remove(old)

    async def delete(self, snapshot_id: SnapshotId, also: Change | None = None) -> None:
        """Remove a record, in one transaction with `also`; its layers go unless others hold them. Raises: NotFound."""
        record = self.get(snapshot_id)

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))
            if also is not None:
                also(connection)

        await self._database.write(change)
        self._remove(record)

    async def mark_durable(self, snapshot_id: SnapshotId) -> None:
        """The layers are on stable storage; so is the state file after this. A record deleted meanwhile is fine."""
        record = self._records.get(snapshot_id)
        if record is None or record.durable:
            return
        for path in (self._states / snapshot_id, self._states):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        if snapshot_id in self._records:
            await self.commit(replace(record, durable=True))

    def _insert(self, record: SnapshotRecord) -> None:
        self._records[record.id] = record
        for name in record.names:
            self._names[name] = record.id
        self._layers.hold(record.id, [*record.disk_layers, *record.memory_layers])

    def _remove(self, record: SnapshotRecord) -> None:
        self._records.pop(record.id, None)
        for name in record.names:
            if self._names.get(name) == record.id:
                del self._names[name]
        (self._states / record.id).unlink(missing_ok=True)
        self._layers.release(record.id)
