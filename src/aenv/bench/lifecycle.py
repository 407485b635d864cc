"""`aenv bench lifecycle`: create, pause, resume, snapshot and fork through the public port, beside the floor.

Ours and the floor take turns in every round, so whatever else the machine does falls on both. What is read is the
ratio; the times are this machine's.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aenv.bench.exchange import run
from aenv.bench.floor import BareVm, PlainSnapshot, tap_namespace, working_directory
from aenv.bench.node import BenchNode, Box, bench_node
from aenv.bench.report import Comparison, Conditions, Series
from aenv.settings import Settings
from aenv.vmm.qemu.command import Platform
from aenv.vmm.qemu.probe import probe

COMMAND = "true"
MEMORY_MIB = 512
_QUIET_S = 0.5
"""Before something that is measured: what went before has come to rest."""

Progress = Callable[[str], None]


@dataclass
class Times:
    """Of all rounds; keys of forks are numbers of children."""

    create: Series = field(default_factory=Series)
    create_command: Series = field(default_factory=Series)
    warm_create: Series = field(default_factory=Series)
    warm_create_command: Series = field(default_factory=Series)
    pause: Series = field(default_factory=Series)
    resume: Series = field(default_factory=Series)
    resume_command: Series = field(default_factory=Series)
    snapshot: Series = field(default_factory=Series)
    snapshot_stop: Series = field(default_factory=Series)
    snapshot_frozen: Series = field(default_factory=Series)
    fork: dict[int, Series] = field(default_factory=dict)
    fork_stop: dict[int, Series] = field(default_factory=dict)
    fork_frozen: dict[int, Series] = field(default_factory=dict)
    bare_restore: Series = field(default_factory=Series)
    bare_restore_command: Series = field(default_factory=Series)
    bare_save: Series = field(default_factory=Series)
    bare_freeze_save: Series = field(default_factory=Series)

    @classmethod
    def of(cls, forks: Sequence[int]) -> "Times":
        fork, stop, frozen = ({count: Series() for count in forks} for _ in range(3))
        return cls(fork=fork, fork_stop=stop, fork_frozen=frozen)

    def comparisons(self) -> list[Comparison]:
        restore, command = ("restore", self.bare_restore), ("command", self.bare_restore_command)
        save, freeze_save = ("save", self.bare_save), ("freeze, save", self.bare_freeze_save)
        found = [
            Comparison("create", self.create, *restore),
            Comparison("create, first command", self.create_command, *command, 1.5),
            Comparison("warm create", self.warm_create, *restore),
            Comparison("warm create, first command", self.warm_create_command, *command, 0.5),
            Comparison("pause", self.pause, *freeze_save, 2.0),
            Comparison("resume", self.resume, *restore),
            Comparison("resume, first command", self.resume_command, *command),
            Comparison("snapshot", self.snapshot, *freeze_save),
            Comparison("snapshot: VM stopped", self.snapshot_stop, *save),
            Comparison("snapshot: processes stopped", self.snapshot_frozen, *freeze_save),
        ]
        for count in self.fork:
            found += [
                Comparison(f"fork of {count}", self.fork[count], *restore),
                Comparison(f"fork of {count}: VM stopped", self.fork_stop[count], *restore, 2.0),
                Comparison(f"fork of {count}: processes stopped", self.fork_frozen[count], *restore),
            ]
        return found


async def measure(rounds: int, forks: Sequence[int], progress: Progress) -> tuple[Conditions, list[Comparison]]:
    """Run the benchmark. Leaves nothing behind, also when it fails.

    Raises: HostUnsupported, OperationFailed and what a start of a node raises.
    """
    host = await probe(Settings().accelerator)
    conditions = Conditions.here(
        vmm=f"QEMU {host.version}",
        accelerator=str(host.platform.accelerator),
        guest=f"guest of 1 vCPU and {MEMORY_MIB} MiB",
    )
    with ExitStack() as stack:
        directory = working_directory()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        netns = stack.enter_context(tap_namespace())
        shape = {"template_vcpus": 1, "template_memory_mib": MEMORY_MIB, "accelerator": host.platform.accelerator}
        progress("starting a node")
        cold = stack.enter_context(bench_node(**shape))
        progress("starting a node with a warm pool")
        warm = stack.enter_context(bench_node(**shape, warm_pool_size=1))
        progress("copying the template into plain files")
        record, state = cold.template()
        snapshot = await PlainSnapshot.copy(record, state, cold.layers, cold.storage, directory)
        bench = _Rounds(cold, warm, snapshot, host.platform, netns)
        progress("a round whose times are not kept: first uses fill caches, on both sides")
        bench.round(Times.of(forks[:1]), floor_first=True)
        times = Times.of(forks)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            bench.round(times, floor_first=bool(number % 2))
        progress("stopping the nodes")
    return conditions, times.comparisons()


class _Rounds:
    """One round after the other; each begins and ends with no sandbox."""

    def __init__(
        self, cold: BenchNode, warm: BenchNode, snapshot: PlainSnapshot, platform: Platform, netns: Path
    ) -> None:
        self._cold = cold
        self._warm = warm
        self._snapshot = snapshot
        self._platform = platform
        self._netns = netns

    def round(self, times: Times, *, floor_first: bool) -> None:
        bare = BareVm(self._snapshot, self._platform, self._netns)
        try:
            if floor_first:
                self._restore_bare(bare, times)
                box = self._create(self._cold, times.create, times.create_command)
            else:
                box = self._create(self._cold, times.create, times.create_command)
                self._restore_bare(bare, times)
            self._create_warm(times)
            box = self._pause_and_resume(box, bare, times)
        finally:
            bare.end()
        self._take_snapshot(box, times)
        for count in times.fork:
            self._fork(box, count, times)
        self._cold.kill([box])

    def _restore_bare(self, bare: BareVm, times: Times) -> None:
        time.sleep(_QUIET_S)
        began_s = time.perf_counter()
        bare.start()
        times.bare_restore.add(time.perf_counter() - began_s)
        run(bare.connect, COMMAND, {})
        times.bare_restore_command.add(time.perf_counter() - began_s)

    def _create(self, node: BenchNode, created: Series, answered: Series) -> Box:
        time.sleep(_QUIET_S)
        began_s = time.perf_counter()
        box = node.create()
        created.add(time.perf_counter() - began_s)
        node.run(box, COMMAND)
        answered.add(time.perf_counter() - began_s)
        return box

    def _create_warm(self, times: Times) -> None:
        self._warm.wait_for_warm_pool()
        box = self._create(self._warm, times.warm_create, times.warm_create_command)
        self._warm.kill([box])
        self._warm.wait_for_warm_pool()

    def _pause_and_resume(self, box: Box, bare: BareVm, times: Times) -> Box:
        with _timed(times.pause):
            self._cold.pause(box)
        time.sleep(_QUIET_S)
        began_s = time.perf_counter()
        bare.freeze()
        frozen_s = time.perf_counter()
        bare.save()
        times.bare_save.add(time.perf_counter() - frozen_s)
        times.bare_freeze_save.add(time.perf_counter() - began_s)
        time.sleep(_QUIET_S)
        began_s = time.perf_counter()
        box = self._cold.resume(box)
        times.resume.add(time.perf_counter() - began_s)
        self._cold.run(box, COMMAND)
        times.resume_command.add(time.perf_counter() - began_s)
        return box

    def _take_snapshot(self, box: Box, times: Times) -> None:
        with self._cold.captured() as capture, _timed(times.snapshot):
            snapshot = self._cold.snapshot(box)
        times.snapshot_stop.add(capture["stopped_s"])
        times.snapshot_frozen.add(capture["frozen_s"])
        self._cold.delete_snapshot(snapshot)

    def _fork(self, box: Box, count: int, times: Times) -> None:
        with self._cold.captured() as capture, _timed(times.fork[count]):
            children = self._cold.fork(box, count)
        times.fork_stop[count].add(capture["stopped_s"])
        times.fork_frozen[count].add(capture["frozen_s"])
        self._cold.kill(children)


@contextmanager
def _timed(series: Series) -> Iterator[None]:
    time.sleep(_QUIET_S)
    began_s = time.perf_counter()
    yield
    series.add(time.perf_counter() - began_s)
