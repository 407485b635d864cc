"""The small parts a node is made of: deadlines, capacity, the database, snapshot records."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from aenv.database import Database
from aenv.errors import Conflict, CorruptData, NoCapacity, NotFound, OperationFailed, StorageFull
from aenv.ids import LayerId, SandboxId, SnapshotId
from aenv.node.capacity import Capacity
from aenv.node.deadlines import Deadlines
from aenv.settings import Settings
from aenv.snapshots import store as tables
from aenv.snapshots.layers import LayerStore
from aenv.snapshots.records import Kind, SnapshotRecord
from aenv.snapshots.store import SnapshotStore
from aenv.testing.clock import FakeClock, settle
from aenv.vmm.contract import Manifest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class TestDeadlines:
    @pytest.fixture
    async def fired(self, clock: FakeClock) -> AsyncIterator[list[str]]:
        fired: list[str] = []
        self.deadlines = Deadlines(clock, fired.append)
        task = asyncio.ensure_future(self.deadlines.run())
        await settle()
        yield fired
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    def set(self, clock: FakeClock, name: str, in_s: float) -> None:
        self.deadlines.set(SandboxId(name), clock.now() + timedelta(seconds=in_s))

    async def test_they_come_in_their_order_each_once(self, clock: FakeClock, fired: list[str]) -> None:
        for name, in_s in (("c", 30), ("a", 10), ("b", 20)):
            self.set(clock, name, in_s)
        await clock.advance(15)
        assert fired == ["a"]
        await clock.advance(1000)
        assert fired == ["a", "b", "c"]

    async def test_one_set_again_replaces_the_one_before(self, clock: FakeClock, fired: list[str]) -> None:
        self.set(clock, "a", 10)
        self.set(clock, "a", 30)
        await clock.advance(29)
        assert fired == []
        await clock.advance(1)
        self.set(clock, "a", 30)
        self.set(clock, "a", 5)
        await clock.advance(100)
        assert fired == ["a", "a"]

    async def test_one_cleared_does_not_come(self, clock: FakeClock, fired: list[str]) -> None:
        self.set(clock, "a", 10)
        self.deadlines.clear(SandboxId("a"))
        self.deadlines.clear(SandboxId("never"))
        await clock.advance(100)
        assert fired == []

    async def test_one_that_has_passed_comes_at_once(self, clock: FakeClock, fired: list[str]) -> None:
        self.set(clock, "a", -5)
        await settle()
        assert fired == ["a"]

    async def test_a_clock_set_forward_is_seen(self, clock: FakeClock, fired: list[str]) -> None:
        self.set(clock, "a", 3600)
        await settle()
        clock._start += timedelta(hours=2)
        await clock.advance(61)
        assert fired == ["a"]

    async def test_those_that_no_longer_hold_do_not_pile_up(self, clock: FakeClock, fired: list[str]) -> None:
        for number in range(10_000):
            self.set(clock, f"s{number % 10}", 3600 + number)
        assert len(self.deadlines._heap) < 200
        await clock.advance(100_000)
        assert sorted(fired) == [f"s{number}" for number in range(10)]


class TestCapacity:
    def capacity(self, **settings: object) -> Capacity:
        given = {"home": Path("/"), "memory_overcommit": 2.0, **settings}
        return Capacity(Settings(**given), host_memory_mib=1000)  # type: ignore[arg-type]

    def test_memory_is_counted_up_to_the_limit(self) -> None:
        capacity = self.capacity()
        for _ in range(4):
            capacity.take_memory(500)
        with pytest.raises(NoCapacity) as caught:
            capacity.take_memory(1)
        assert caught.value.retryable
        assert caught.value.hint
        capacity.give_memory(500)
        capacity.take_memory(500)
        assert capacity.memory_taken_mib == 2000

    def test_what_runs_already_is_counted_over_the_limit(self) -> None:
        capacity = self.capacity()
        capacity.take_memory(5000, force=True)
        with pytest.raises(NoCapacity):
            capacity.take_memory(1)

    def test_a_disk_with_too_little_space_is_full(self) -> None:
        self.capacity(min_free_disk_mib=0).check_disk()
        with pytest.raises(StorageFull) as caught:
            self.capacity(min_free_disk_mib=1 << 40).check_disk()
        assert caught.value.hint


COMPONENT = ("CREATE TABLE things (name TEXT PRIMARY KEY) STRICT",)


class TestDatabase:
    @pytest.fixture
    async def database(self, tmp_path: Path) -> AsyncIterator[Database]:
        database = await Database.open(tmp_path / "db", {"things": COMPONENT})
        yield database
        await database.close()

    @staticmethod
    async def names(database: Database) -> list[str]:
        return [row["name"] for row in await database.read("SELECT name FROM things ORDER BY name")]

    @staticmethod
    async def add(database: Database, *names: str) -> None:
        def change(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT INTO things VALUES (?)", [(name,) for name in names])

        await database.write(change)

    async def test_what_was_written_is_there_again(self, tmp_path: Path) -> None:
        for number in range(3):
            database = await Database.open(tmp_path / "db", {"things": COMPONENT})
            await self.add(database, f"n{number}")
            assert await self.names(database) == [f"n{each}" for each in range(number + 1)]
            await database.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["db", "db-room"]

    async def test_a_write_that_fails_changes_nothing(self, database: Database) -> None:
        await self.add(database, "a")
        with pytest.raises(OperationFailed, match="UNIQUE"):
            await self.add(database, "b", "a")

        def defect(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO things VALUES ('c')")
            raise KeyError("a defect")

        with pytest.raises(KeyError):
            await database.write(defect)
        assert await self.names(database) == ["a"]
        await self.add(database, "b")

    async def test_a_query_that_fails_says_so(self, database: Database) -> None:
        with pytest.raises(OperationFailed, match="no such table"):
            await database.read("SELECT * FROM missing")

    async def test_migrations_are_taken_once_and_in_order(self, tmp_path: Path) -> None:
        second = "ALTER TABLE things ADD COLUMN size INTEGER NOT NULL DEFAULT 5; CREATE INDEX sizes ON things (size)"
        database = await Database.open(tmp_path / "db", {"things": COMPONENT})
        await self.add(database, "a")
        await database.close()
        for _ in range(2):
            database = await Database.open(tmp_path / "db", {"things": (*COMPONENT, second), "others": ()})
            (row,) = await database.read("SELECT * FROM things")
            assert tuple(row) == ("a", 5)
            await database.close()
        with pytest.raises(CorruptData, match="newer") as caught:
            await Database.open(tmp_path / "db", {"things": COMPONENT})
        assert caught.value.hint

    async def test_a_migration_that_fails_leaves_the_version_before(self, tmp_path: Path) -> None:
        await (await Database.open(tmp_path / "db", {"things": COMPONENT})).close()
        broken = (*COMPONENT, "CREATE TABLE more (name TEXT); CREATE TABLE things (name TEXT)")
        with pytest.raises(OperationFailed, match="already exists"):
            await Database.open(tmp_path / "db", {"things": broken})
        database = await Database.open(tmp_path / "db", {"things": COMPONENT})
        assert await database.read("SELECT name FROM sqlite_master WHERE name = 'more'") == []
        await database.close()

    async def test_a_file_that_is_no_database_is_left_as_it_is(self, tmp_path: Path) -> None:
        path = tmp_path / "db"
        path.write_bytes(b"something else" * 1000)
        with pytest.raises(CorruptData) as caught:
            await Database.open(path, {"things": COMPONENT})
        assert caught.value.hint
        assert path.read_bytes() == b"something else" * 1000

    async def test_a_killed_writer_leaves_whole_transactions(self, tmp_path: Path) -> None:
        program = f"""
import asyncio, os
from pathlib import Path
from aenv.database import Database
async def main():
    database = await Database.open(Path({str(tmp_path / "db")!r}), {{"things": {COMPONENT!r}}})
    for number in range(10000):
        def change(connection):
            connection.execute("INSERT INTO things VALUES (?)", (f"a{{number}}",))
            connection.execute("INSERT INTO things VALUES (?)", (f"b{{number}}",))
        await database.write(change)
        print(number, flush=True)
asyncio.run(main())
"""
        writer = subprocess.Popen(  # noqa: ASYNC220 (nothing else is to run meanwhile)
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 20:
                writer.kill()
                break
        written = [int(line), *map(int, writer.stdout.read().split())]
        writer.stdout.close()
        writer.wait()
        database = await Database.open(tmp_path / "db", {"things": COMPONENT})
        names = set(await self.names(database))
        await database.close()
        assert {f"{side}{number}" for number in range(written[-1] + 1) for side in "ab"} <= names
        assert {name[1:] for name in names if name[0] == "a"} == {name[1:] for name in names if name[0] == "b"}

    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "aenv-test", tmp_path], check=True)
        yield tmp_path
        subprocess.run(["umount", "--lazy", tmp_path], check=True)

    @needs_root
    async def test_a_full_disk_takes_deletions(self, small_disk: Path) -> None:
        database = await Database.open(small_disk / "db", {"things": COMPONENT})
        await self.add(database, *(f"{number:04}" for number in range(2000)))
        free = os.statvfs(small_disk)
        with (small_disk / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free.f_bavail * free.f_frsize)
        with pytest.raises(StorageFull) as caught:
            await self.add(database, *(f"{'more' * 100}{number}" for number in range(20_000)))
        assert caught.value.hint
        for round_ in range(3):  # over the restarts of the program, too
            for number in range(50):
                name = f"{50 * round_ + number:04}"

                def change(connection: sqlite3.Connection, name: str = name) -> None:
                    connection.execute("DELETE FROM things WHERE name = ?", (name,))

                await database.write(change)
            await database.close()
            database = await Database.open(small_disk / "db", {"things": COMPONENT})
        assert len(await self.names(database)) == 1850
        (small_disk / "filler").unlink()
        await self.add(database, "again")
        await database.close()


MANIFEST = Manifest("fake", "1", "none", "fake", 1, "cpu", "x86_64", 1, 1, 128, 1, "k")


class TestSnapshotStore:
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    async def database(self, tmp_path: Path) -> AsyncIterator[Database]:
        database = await Database.open(tmp_path / "db", {"snapshots": tables.MIGRATIONS})
        yield database
        await database.close()

    @pytest.fixture
    async def store(self, database: Database, tmp_path: Path) -> SnapshotStore:
        return await self.opened(database, tmp_path)

    @staticmethod
    async def opened(database: Database, directory: Path) -> SnapshotStore:
        (directory / "layers").mkdir(exist_ok=True)
        store = SnapshotStore(database, LayerStore(directory / "layers"), directory / "states")
        await store.load()
        return store

    @staticmethod
    def record(store: SnapshotStore, name: str, *names: str) -> SnapshotRecord:
        snapshot_id = SnapshotId(name)
        return SnapshotRecord(
            id=snapshot_id,
            kind=Kind.SNAPSHOT,
            created_at=FakeClock().now(),
            manifest=MANIFEST,
            disk_layers=(LayerId("d" + name),),
            memory_layers=(),
            state_sha256=store.write_state(snapshot_id, name.encode()),
            vcpus=1,
            memory_mib=128,
            disk_mib=1024,
            envd_version="1",
            boot_id="b",
            names=names,
        )

    async def test_a_record_is_as_it_was_after_a_restart(
        self, store: SnapshotStore, database: Database, tmp_path: Path
    ) -> None:
        record = self.record(store, "s1", "name")
        await store.commit(record)
        (tmp_path / "states" / "of-nothing").touch()
        again = await self.opened(database, tmp_path)
        assert again.get(record.id) == again.find("name") == again.find("team/name:default") == record
        assert again.state(record) == b"s1"
        assert [path.name for path in (tmp_path / "states").iterdir()] == ["s1"]

    async def test_of_two_commits_of_one_name_one_is_refused(self, store: SnapshotStore) -> None:
        first, second = self.record(store, "s1", "name"), self.record(store, "s2", "name")
        results = await asyncio.gather(store.commit(first), store.commit(second), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), Conflict]
        assert store.find("name") == first
        await store.delete(first.id)
        await store.commit(second)
        assert store.find("name") == second

    async def test_a_commit_that_fails_gives_its_names_back(self, store: SnapshotStore) -> None:
        before, record = self.record(store, "s1", "name"), self.record(store, "s2", "name", "other")
        await store.commit(before)

        def fail(connection: sqlite3.Connection) -> None:
            raise StorageFull("told to be full")

        with pytest.raises(StorageFull):
            await store.commit(record, also=fail, replaces=[before.id])
        assert store.find("name") == before
        with pytest.raises(NotFound):
            store.find("other")
        await store.commit(record, replaces=[before.id])
        assert store.find("name") == store.find("other") == record
        with pytest.raises(NotFound):
            store.get(before.id)

    async def test_what_is_deleted_stays_so(self, store: SnapshotStore, database: Database, tmp_path: Path) -> None:
        """A record that becomes durable while it is deleted must not come back."""
        for number in range(20):
            record = self.record(store, f"s{number}")
            await store.commit(record)
            works = [store.mark_durable(record.id), store.delete(record.id)]
            await asyncio.gather(*(works if number % 2 else reversed(works)))
            with pytest.raises(NotFound):
                store.get(record.id)
        assert list((tmp_path / "states").iterdir()) == []
        assert (await self.opened(database, tmp_path)).all(*Kind) == []

    async def test_durable_is_written_down(self, store: SnapshotStore, database: Database, tmp_path: Path) -> None:
        record = self.record(store, "s1")
        await store.commit(record)
        await store.mark_durable(record.id)
        assert store.get(record.id).durable
        assert (await self.opened(database, tmp_path)).get(record.id).durable

    async def test_pauses_cannot_be_named(self, store: SnapshotStore) -> None:
        record = replace(self.record(store, "s1"), kind=Kind.PAUSE)
        await store.commit(record)
        with pytest.raises(NotFound):
            store.find("s1")
        assert store.get(record.id) == record

    async def test_what_cannot_be_read_is_neither_lost_nor_used(
        self, store: SnapshotStore, database: Database, tmp_path: Path
    ) -> None:
        await store.commit(self.record(store, "s1"))

        def damage(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE snapshots SET record = '[]'")

        await database.write(damage)
        again = await self.opened(database, tmp_path)
        assert again.exists(SnapshotId("s1"))
        assert not again.all_readable
        with pytest.raises(CorruptData):
            again.get(SnapshotId("s1"))
        await again.delete(SnapshotId("s1"))
        assert again.all_readable
        assert list((tmp_path / "states").iterdir()) == []


@pytest.fixture(autouse=True)
def nothing_mounted() -> Iterator[None]:
    yield
    assert "aenv-test" not in Path("/proc/self/mounts").read_text()
