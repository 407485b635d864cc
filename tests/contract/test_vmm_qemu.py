"""QEMU with real guests does what every driver has to do, and what only QEMU's has to."""

import asyncio
import os
import pickle
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.vmm_harness import QemuBench, QemuHarness, open_directory
from tests.support.vmm_orphans import Order

from aenv.errors import AenvError, OperationFailed, SandboxLost
from aenv.testing.vmm_conformance import Kept, VmmConformance
from aenv.vmm.contract import Vm, VmSpec
from aenv.vmm.qemu import command, machine
from aenv.vmm.qemu.selftest import run_kvm_guest

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def bench() -> Iterator[QemuBench]:
    with open_directory() as directory:
        yield QemuBench(directory)


@pytest.fixture
async def harness(bench: QemuBench) -> AsyncIterator[QemuHarness]:
    driver, source = await bench.prepare()
    with open_directory() as directory:
        harness = QemuHarness(directory, bench, driver, source)
        try:
            await harness.base()
            yield harness
        finally:
            harness.close()


@pytest.fixture
async def kept(harness: QemuHarness) -> Kept:
    return await harness.base()


@pytest.fixture
async def spec(harness: QemuHarness, kept: Kept) -> VmSpec:
    return await harness.spec_on(kept)


@pytest.fixture
async def vm(harness: QemuHarness, kept: Kept, spec: VmSpec) -> AsyncIterator[Vm]:
    vm = await harness.driver.restore(spec, kept.state, kept.manifest)
    try:
        yield vm
    finally:
        await vm.stop()


class TestQemuDriver(VmmConformance):
    pass


async def test_the_process_is_confined(harness: QemuHarness, spec: VmSpec, vm: Vm) -> None:
    proc = Path(f"/proc/{vm.record.pid}")
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines())
    uid = str(spec.confinement.uid)
    assert status["Uid"].split() == status["Gid"].split() == [uid] * 4
    assert status["Groups"].split() == []
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert (proc / "oom_score_adj").read_text() == "1000\n"
    assert os.getsid(vm.record.pid) == vm.record.pid
    assert (proc / "ns/net").stat().st_ino == spec.network.netns.stat().st_ino
    if not harness.driver_warnings:
        groups = (proc / "cgroup").read_text()
        assert groups.count(f"/{spec.vm_id}-") == 3


async def test_disks_keep_their_order_and_the_kernel_may_be_in_a_closed_directory(harness: QemuHarness) -> None:
    closed = harness.directory / "closed"
    closed.mkdir(mode=0o700)
    source = replace(harness.source, kernel=closed / "kernel")
    shutil.copy(harness.source.kernel, source.kernel)
    spec = await harness.fresh_spec()
    disks = [*spec.disks, (await harness.fresh_spec()).disks[0], (await harness.fresh_spec()).disks[0]]
    for number, disk in enumerate(disks):
        with disk.open("r+b") as file:
            file.write((100 + number).to_bytes(8, "little"))
    spec = replace(spec, disks=disks)
    vm = await harness.driver.boot(spec, source)
    try:
        answers = [await harness.ask(spec, f"read {number}", timeout_s=120) for number in range(3)]
        assert answers == ["100", "101", "102"]
    finally:
        await vm.stop()


async def test_clones_draw_different_random_numbers(harness: QemuHarness, kept: Kept, spec: VmSpec, vm: Vm) -> None:
    other = await harness.spec_on(kept)
    clone = await harness.driver.restore(other, kept.state, kept.manifest)
    try:
        # What the kernel had drawn before the capture is equal; a few numbers later they differ.
        drawn = [[await harness.ask(one, "random") for _ in range(20)] for one in (spec, other)]
        assert "error" not in drawn[0]
        assert drawn[0][-1] != drawn[1][-1]
    finally:
        await clone.stop()


async def test_reading_the_console_loses_nothing(harness: QemuHarness) -> None:
    spec = await harness.fresh_spec()
    vm = await harness.driver.boot(spec, harness.source)
    try:
        await harness.ask(spec, "count", timeout_s=120)
        first = await vm.console()
        assert "test guest ready" in first
        assert await vm.console() == first
    finally:
        await vm.stop()


async def test_a_hanging_process_is_killed(vm: Vm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "COMMAND_TIMEOUT_S", 0.5)
    os.kill(vm.record.pid, signal.SIGSTOP)
    with pytest.raises(SandboxLost, match="did not answer stop"):
        await vm.suspend()
    await asyncio.wait_for(vm.wait(), 10)


async def test_over_its_memory_limit_it_is_lost_and_says_why(
    harness: QemuHarness, kept: Kept, spec: VmSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if harness.driver_warnings:
        pytest.skip("no memory control group")
    monkeypatch.setattr(command, "OVERHEAD_MIB", 32)
    small = replace(spec, confinement=replace(spec.confinement, memory_mib=16))
    vm = await harness.driver.restore(small, kept.state, kept.manifest)
    try:
        with pytest.raises(TimeoutError):
            await harness.ask(small, "fill 1 0 8192", timeout_s=5)
        assert "memory limit" in await asyncio.wait_for(vm.wait(), 10)
    finally:
        await vm.stop()


async def test_a_killed_server_leaves_the_vm_and_takes_the_successor(
    harness: QemuHarness, bench: QemuBench, kept: Kept, spec: VmSpec
) -> None:
    order = Order(bench.instance_id, kept, spec, await harness.pending_spec(spec))
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.vmm_orphans"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(pickle.dumps(order))
    server.stdin.close()
    record, successor = pickle.loads(await asyncio.wait_for(server.stdout.read(65536), 60))
    server.kill()
    await server.wait()
    vm = await harness.driver.adopt(record)
    try:
        with pytest.raises(SandboxLost):
            await harness.driver.adopt(successor)
        assert await harness.ask(spec, "count")
    finally:
        await vm.stop()


@pytest.mark.parametrize("missing", ["namespace", "tap", "workdir", "disk", "permission", "size", "binary", "kernel"])
async def test_what_cannot_start_leaves_nothing(harness: QemuHarness, bench: QemuBench, missing: str) -> None:
    spec, source, driver = await harness.fresh_spec(), harness.source, await bench.new_driver()
    match missing:
        case "namespace":
            spec = replace(spec, network=replace(spec.network, netns=Path("/run/netns/missing")))
        case "tap":
            spec = replace(spec, network=replace(spec.network, tap="tap9"))
        case "workdir":
            spec = replace(spec, workdir=spec.workdir / "missing")
        case "disk":
            spec = replace(spec, disks=[spec.disks[0].with_name("missing")])
        case "permission":
            spec.disks[0].chmod(0)
        case "size":
            os.truncate(spec.memory, 4096)
        case "binary":
            driver.host = replace(driver.host, platform=replace(driver.host.platform, binary="missing"))
        case _:
            source = replace(source, kernel=Path("missing"))
    before = harness.holdings()
    with pytest.raises(OperationFailed):
        await driver.boot(spec, source)
    assert harness.holdings() == before


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.01, 0.03, 0.06, 0.1])
async def test_a_cancelled_start_leaves_nothing(harness: QemuHarness, kept: Kept, spec: VmSpec, delay_s: float) -> None:
    before = harness.holdings()
    start = asyncio.create_task(harness.driver.restore(spec, kept.state, kept.manifest))
    await asyncio.sleep(delay_s)
    start.cancel()
    try:
        vm = await start
    except asyncio.CancelledError:
        pass
    else:
        await vm.stop()
    assert harness.holdings() == before


async def test_a_second_successor_is_refused(harness: QemuHarness, spec: VmSpec, vm: Vm) -> None:
    successor = await harness.driver.prepare_successor(vm, await harness.pending_spec(spec))
    try:
        with pytest.raises(OperationFailed, match="already"):
            await harness.driver.prepare_successor(vm, await harness.pending_spec(spec))
    finally:
        await successor.discard()
    another = await harness.driver.prepare_successor(vm, await harness.pending_spec(spec))
    await another.discard()
    assert await harness.ask(spec, "count")


@pytest.mark.parametrize("content", ["link", "fifo", "directory"])
async def test_what_the_process_puts_in_place_of_its_state_is_not_followed(
    harness: QemuHarness, spec: VmSpec, vm: Vm, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """QEMU writes the state into a directory that is its own: it may be somebody else's program by then."""
    await vm.suspend()
    state = vm._machine.place.state_file  # type: ignore[attr-defined]
    secret = spec.workdir.parent / "secret"
    secret.write_text("secret")

    async def replace_state(*_: object, **__: object) -> None:
        match content:
            case "link":
                state.symlink_to(secret)
            case "fifo":
                os.mkfifo(state)
            case _:
                state.mkdir()

    monkeypatch.setattr(vm._machine, "execute", replace_state)  # type: ignore[attr-defined]
    with pytest.raises(AenvError):
        await vm.save()
    monkeypatch.undo()
    await vm.resume()
    assert await harness.ask(spec, "count")


async def test_the_self_test_guest_runs_and_reports() -> None:
    binary = shutil.which("qemu-system-x86_64")
    assert binary is not None
    assert await run_kvm_guest(binary, "tcg", "Haswell-v4") == ""
    assert "did not run" in await run_kvm_guest(binary, "nonsense")
