"""What every VMM driver has to do, as tests: derive a class from `VmmConformance` and give it a fixture `harness`.

The harness supplies what a node would: images, networks, disks, and a guest that can be observed (see `Harness.ask`).
The suite does not know how a driver captures except by what the contract says; it demands that nothing is lost, that a
capture holds about what changed since the one before, and that nothing stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import pytest

from aenv.errors import CorruptData, IncompatibleSnapshot, OperationFailed, SandboxLost
from aenv.vmm.contract import (
    BootSource,
    CaptureKind,
    Driver,
    Manifest,
    ProcessMemory,
    SavedVm,
    Successor,
    Vm,
    VmRecord,
    VmSpec,
)

_SOON_S = 30.0
_LOST_PACKETS = 2
"""Of hundreds, over three captures: what is in flight at the very moment. A capture must never lose what arrives during
it.
"""


@dataclass(frozen=True)
class Kept:
    """A capture in keeping: everything a restore needs."""

    state: bytes = field(repr=False)
    manifest: Manifest
    memory: Any
    """The harness's own: what the pages were put into."""
    pages: int
    """How many pages the capture held."""


class Harness(Protocol):
    """A node's part of the work, and its eyes and hands."""

    driver: Driver
    source: BootSource
    buffer_pages: int
    """Size of the guest's buffer."""
    noise_pages: int
    """More pages than the guest changes by itself between two captures a second apart."""

    async def fresh_spec(self) -> VmSpec:
        """Empty memory, one disk, and a network of its own."""

    async def keep(self, spec: VmSpec, vm: Vm, saved: SavedVm) -> Kept:
        """Put the dirty pages over those `spec.memory` has; close descriptors, remove the diff."""

    async def spec_on(self, kept: Kept, *, beside: VmSpec | None = None) -> VmSpec:
        """A spec on kept memory, with a network and a disk of its own, or with those of `beside`."""

    async def pending_spec(self, predecessor: VmSpec) -> VmSpec:
        """A spec with the predecessor's network and disk, and a memory image yet to be filled."""

    async def complete(self, spec: VmSpec, kept: Kept) -> None:
        """Fill the memory image of a pending spec."""

    async def base(self) -> Kept:
        """A capture of a booted guest, made once."""

    async def ask(self, spec: VmSpec, request: str, *, timeout_s: float = _SOON_S) -> str:
        """A command to the guest over its network, repeated until it is answered. Raises: TimeoutError.

        `count`: ticks so far, about one a millisecond. `fill SEED FROM N`: write N pages of the buffer. `hash`: of the
        buffer. `write DISK VALUE`, `read DISK`. `power-off`.
        """

    async def lost_packets(self, spec: VmSpec, stop: asyncio.Event) -> int:
        """Send requests every few milliseconds until `stop`; how many were never answered, each sent once."""

    def kill(self, pid: int) -> None:
        """SIGKILL."""

    async def another_driver(self) -> Driver:
        """As a new server process would make it."""

    def holdings(self) -> list[str]:
        """Processes, descriptors, groups, links that exist on behalf of VMs; equal lists before and after mean nothing
        leaked.
        """


class VmmConformance:
    """Inherited tests. Each gets a `harness` fixture; VMs a test leaves are not cleaned up for it."""

    @pytest.fixture(autouse=True)
    def nothing_left(self, harness: Harness) -> Any:
        before = harness.holdings()
        yield
        assert harness.holdings() == before

    # running

    async def test_boots_and_answers(self, harness: Harness) -> None:
        spec = await harness.fresh_spec()
        async with _ended(await harness.driver.boot(spec, harness.source)) as vm:
            assert int(await harness.ask(spec, "count", timeout_s=120)) >= 0
            assert "ready" in await vm.console()
            assert vm.stats().resident_bytes >= vm.stats().private_bytes >= 0
            assert json.loads(json.dumps(asdict(vm.record)))["vm_id"] == spec.vm_id

    async def test_suspend_stops_it_and_resume_lets_it_go_on(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            before = int(await harness.ask(spec, "count"))
            await vm.suspend()
            await vm.suspend()
            await asyncio.sleep(1.0)
            await vm.resume()
            await vm.resume()
            after = int(await harness.ask(spec, "count"))
            assert before <= after < before + 900

    async def test_power_off_ends_the_wait(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            with contextlib.suppress(TimeoutError):
                await harness.ask(spec, "power-off", timeout_s=1.0)
            assert await asyncio.wait_for(vm.wait(), _SOON_S)

    async def test_stop_is_idempotent_and_final(self, harness: Harness) -> None:
        async with _restored(harness) as (_, vm):
            await vm.stop()
            await vm.stop()
            assert await asyncio.wait_for(vm.wait(), _SOON_S)
            with pytest.raises(SandboxLost):
                await vm.suspend()
            assert await vm.console() is not None

    # capture and restore

    async def test_restore_goes_on_exactly(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            assert await harness.ask(spec, "fill 7 3 40") == "ok"
            assert await harness.ask(spec, "write 0 4711") == "ok"
            digest = await harness.ask(spec, "hash")
            ticks = int(await harness.ask(spec, "count"))
            kept = await _capture(harness, spec, vm)
            await vm.stop()
            again = await harness.spec_on(kept, beside=spec)
            async with _ended(await harness.driver.restore(again, kept.state, kept.manifest)):
                assert ticks <= int(await harness.ask(again, "count")) < ticks + 5000
                assert await harness.ask(again, "hash") == digest
                assert await harness.ask(again, "read 0") == "4711"

    async def test_saving_twice_gives_the_same(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            await harness.ask(spec, "fill 1 0 20")
            await vm.suspend()
            first, second = await vm.save(), await vm.save()
            _give_up(first)
            assert first.state == second.state
            kept = await harness.keep(spec, vm, second)
            assert 20 <= kept.pages < 20 + harness.noise_pages

    async def test_a_running_vm_is_not_saved(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            with pytest.raises(OperationFailed):
                await vm.save()
            assert await harness.ask(spec, "count")

    async def test_a_capture_given_up_loses_nothing(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            await harness.ask(spec, "fill 1 0 20")
            await vm.suspend()
            _give_up(await vm.save())
            await vm.resume()
            await harness.ask(spec, "fill 2 20 20")
            digest = await harness.ask(spec, "hash")
            kept = await _capture(harness, spec, vm)
            await _check_restore(harness, kept, digest)

    async def test_ten_captures_each_hold_what_changed_and_restore_exactly(self, harness: Harness) -> None:
        pages = harness.buffer_pages // 10
        captures = []
        async with _restored(harness) as (spec, vm):
            current, running = spec, vm
            try:
                for number in range(10):
                    await harness.ask(current, f"fill {number} {number * pages} {pages}")
                    digest = await harness.ask(current, "hash")
                    current, running, kept = await _capture_and_continue(harness, current, running)
                    captures.append((kept, digest))
                    assert await harness.ask(current, "hash") == digest
            finally:
                await running.stop()
        for kept, digest in captures:
            assert pages <= kept.pages < pages + harness.noise_pages
            await _check_restore(harness, kept, digest)

    async def test_going_on_after_a_capture_keeps_connections(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            await harness.ask(spec, "count")
            stop = asyncio.Event()
            lost = asyncio.create_task(harness.lost_packets(spec, stop))
            running = vm
            try:
                current = spec
                for _ in range(3):
                    await asyncio.sleep(0.3)
                    current, running, _ = await _capture_and_continue(harness, current, running)
                await asyncio.sleep(0.3)
                stop.set()
                assert await lost <= _LOST_PACKETS
            finally:
                lost.cancel()
                await running.stop()

    async def test_restored_stopped_it_waits_for_resume(self, harness: Harness) -> None:
        kept = await harness.base()
        spec = await harness.spec_on(kept)
        async with _ended(await harness.driver.restore(spec, kept.state, kept.manifest, run=False)) as vm:
            with pytest.raises(TimeoutError):
                await harness.ask(spec, "count", timeout_s=0.3)
            await vm.resume()
            ticks = int(await harness.ask(spec, "count"))
            await vm.suspend()
            await vm.resume()
            assert int(await harness.ask(spec, "count")) >= ticks

    async def test_four_from_one_are_equal_and_independent(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            await harness.ask(spec, "fill 5 0 30")
            digest = await harness.ask(spec, "hash")
            kept = await _capture(harness, spec, vm)
        specs = [await harness.spec_on(kept) for _ in range(4)]
        children = await asyncio.gather(*(harness.driver.restore(s, kept.state, kept.manifest) for s in specs))
        try:
            assert [await harness.ask(child, "hash") for child in specs] == [digest] * 4
            await harness.ask(specs[0], "fill 9 0 10")
            hashes = [await harness.ask(child, "hash") for child in specs]
            assert hashes[0] != digest
            assert hashes[1:] == [digest] * 3
        finally:
            for child in children:
                await child.stop()

    # succession

    async def test_a_discarded_successor_leaves_the_vm_as_it_was(self, harness: Harness) -> None:
        async with _with_successor(harness) as (spec, vm, _, successor):
            await vm.suspend()
            await successor.discard()
            await successor.discard()
            await vm.resume()
            assert await harness.ask(spec, "count")

    async def test_a_successor_that_dies_leaves_the_vm_as_it_was(self, harness: Harness) -> None:
        async with _with_successor(harness) as (spec, vm, pending, successor):
            kept = await _capture(harness, spec, vm)
            await harness.complete(pending, kept)
            harness.kill(successor.record.pid)
            with pytest.raises(OperationFailed):
                await successor.take_over(kept.state)
            await vm.resume()
            assert await harness.ask(spec, "count")

    async def test_a_successor_refuses_a_corrupt_state(self, harness: Harness) -> None:
        async with _with_successor(harness) as (spec, vm, pending, successor):
            kept = await _capture(harness, spec, vm)
            await harness.complete(pending, kept)
            with pytest.raises(CorruptData):
                await successor.take_over(kept.state[: len(kept.state) // 2])
            await vm.resume()
            assert await harness.ask(spec, "count")

    async def test_a_waiting_successor_is_not_adopted(self, harness: Harness) -> None:
        async with _with_successor(harness) as (spec, vm, _, successor):
            driver = await harness.another_driver()
            record = successor.record
            await successor.discard()
            with pytest.raises(SandboxLost):
                await driver.adopt(record)
            assert await harness.ask(spec, "count")
            await vm.stop()

    # adoption

    async def test_another_server_adopts_it_running(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            await harness.ask(spec, "fill 3 0 25")
            digest = await harness.ask(spec, "hash")
            record = VmRecord(**json.loads(json.dumps(asdict(vm.record))))
            await vm.detach()
            await vm.detach()
            async with _ended(await (await harness.another_driver()).adopt(record)) as adopted:
                assert adopted.record == record
                current, running, kept = await _capture_and_continue(harness, spec, adopted)
                async with _ended(running):
                    assert await harness.ask(current, "hash") == digest
        await _check_restore(harness, kept, digest)

    async def test_another_server_adopts_it_suspended(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, vm):
            ticks = int(await harness.ask(spec, "count"))
            await vm.suspend()
            _give_up(await vm.save())
            await vm.detach()
            async with _ended(await (await harness.another_driver()).adopt(vm.record)) as adopted:
                _give_up(await adopted.save())
                await adopted.resume()
                assert int(await harness.ask(spec, "count")) >= ticks

    async def test_what_is_gone_or_another_process_is_not_adopted(self, harness: Harness) -> None:
        async with _restored(harness) as (_, vm):
            record = vm.record
            with pytest.raises(SandboxLost):
                await harness.driver.adopt(replace(record, pid=os.getpid()))
            with pytest.raises(SandboxLost):
                await harness.driver.adopt(replace(record, start_time=record.start_time + 1))
            await vm.stop()
            with pytest.raises(SandboxLost):
                await harness.driver.adopt(record)

    async def test_a_sweep_ends_what_nobody_knows(self, harness: Harness) -> None:
        async with _restored(harness) as (spec, known), _restored(harness) as (_, unknown):
            await unknown.detach()
            assert len(await harness.driver.sweep([known.record])) == 1
            assert await harness.ask(spec, "count")
            with pytest.raises(SandboxLost):
                await harness.driver.adopt(unknown.record)

    # failures

    async def test_a_killed_vm_is_lost(self, harness: Harness) -> None:
        async with _restored(harness) as (_, vm):
            harness.kill(vm.record.pid)
            assert await asyncio.wait_for(vm.wait(), _SOON_S)
            with pytest.raises(SandboxLost):
                await vm.suspend()
            with pytest.raises(SandboxLost):
                vm.stats()

    async def test_a_vm_killed_while_suspended_is_lost(self, harness: Harness) -> None:
        async with _restored(harness) as (_, vm):
            await vm.suspend()
            harness.kill(vm.record.pid)
            await vm.wait()
            with pytest.raises(SandboxLost):
                await vm.save()
            with pytest.raises(SandboxLost):
                await vm.resume()

    async def test_a_vm_killed_after_a_save_is_lost(self, harness: Harness) -> None:
        async with _restored(harness) as (_, vm):
            await vm.suspend()
            _give_up(await vm.save())
            harness.kill(vm.record.pid)
            with pytest.raises(SandboxLost):
                await vm.resume()

    @pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
    async def test_a_corrupt_state_is_refused(self, harness: Harness, damage: str) -> None:
        kept = await harness.base()
        state = {"empty": b"", "cut": kept.state[: len(kept.state) // 2], "garbage": b"garbage " * 1000}[damage]
        with pytest.raises(CorruptData):
            await harness.driver.restore(await harness.spec_on(kept), state, kept.manifest)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("vmm", "other"),
            ("vmm_version", "0.1"),
            ("accelerator", "other"),
            ("machine", "other"),
            ("device_set", 0),
            ("cpu_model", "other"),
            ("architecture", "other"),
            ("tsc_khz", 1000),
        ],
    )
    async def test_a_manifest_of_another_host_is_refused(self, harness: Harness, field: str, value: object) -> None:
        kept = await harness.base()
        harness.driver.check(kept.manifest)
        foreign = Manifest.from_json({**kept.manifest.to_json(), field: value})
        with pytest.raises(IncompatibleSnapshot, match=str(value)):
            harness.driver.check(foreign)
        with pytest.raises(IncompatibleSnapshot):
            await harness.driver.restore(await harness.spec_on(kept), kept.state, foreign)

    @pytest.mark.parametrize(("field", "value"), [("vcpus", 7), ("memory_mib", 7), ("disks", 7)])
    async def test_a_manifest_of_another_shape_is_refused(self, harness: Harness, field: str, value: int) -> None:
        kept = await harness.base()
        foreign = Manifest.from_json({**kept.manifest.to_json(), field: value})
        with pytest.raises(IncompatibleSnapshot, match=str(value)):
            await harness.driver.restore(await harness.spec_on(kept), kept.state, foreign)

    async def test_without_its_memory_image_nothing_starts(self, harness: Harness) -> None:
        kept = await harness.base()
        spec = await harness.spec_on(kept)
        missing = replace(spec, memory=spec.memory.with_name("missing"))
        with pytest.raises(OperationFailed):
            await harness.driver.restore(missing, kept.state, kept.manifest)
        with pytest.raises(OperationFailed):
            await harness.driver.boot(missing, harness.source)


@contextlib.asynccontextmanager
async def _ended(vm: Vm) -> AsyncIterator[Vm]:
    try:
        yield vm
    finally:
        await vm.stop()


@contextlib.asynccontextmanager
async def _restored(harness: Harness) -> AsyncIterator[tuple[VmSpec, Vm]]:
    kept = await harness.base()
    spec = await harness.spec_on(kept)
    async with _ended(await harness.driver.restore(spec, kept.state, kept.manifest)) as vm:
        yield spec, vm


@contextlib.asynccontextmanager
async def _with_successor(harness: Harness) -> AsyncIterator[tuple[VmSpec, Vm, VmSpec, Successor]]:
    if harness.driver.capture_kind is not CaptureKind.SUCCESSION:
        pytest.skip("the driver captures without succession")
    async with _restored(harness) as (spec, vm):
        pending = await harness.pending_spec(spec)
        successor = await harness.driver.prepare_successor(vm, pending)
        try:
            yield spec, vm, pending, successor
        finally:
            await successor.discard()


async def _capture(harness: Harness, spec: VmSpec, vm: Vm) -> Kept:
    await vm.suspend()
    return await harness.keep(spec, vm, await vm.save())


async def _capture_and_continue(harness: Harness, spec: VmSpec, vm: Vm) -> tuple[VmSpec, Vm, Kept]:
    """The VM that goes on, with its spec, and the capture; as the node does it."""
    if harness.driver.capture_kind is CaptureKind.TRACKING:
        kept = await _capture(harness, spec, vm)
        await vm.resume()
        return await harness.spec_on(kept, beside=spec), vm, kept
    pending = await harness.pending_spec(spec)
    successor = await harness.driver.prepare_successor(vm, pending)
    try:
        kept = await _capture(harness, spec, vm)
        await harness.complete(pending, kept)
        running = await successor.take_over(kept.state)
    except BaseException:
        await successor.discard()
        raise
    await vm.stop()
    return pending, running, kept


async def _check_restore(harness: Harness, kept: Kept, digest: str) -> None:
    spec = await harness.spec_on(kept)
    async with _ended(await harness.driver.restore(spec, kept.state, kept.manifest)):
        assert await harness.ask(spec, "hash") == digest


def _give_up(saved: SavedVm) -> None:
    """What a caller does with a capture it does not keep: nothing but closing. A diff is left for the next save to go
    on from.
    """
    if isinstance(saved.memory, ProcessMemory):
        os.close(saved.memory.mem_fd)
        os.close(saved.memory.pagemap_fd)
