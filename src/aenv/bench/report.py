"""What a benchmark found: series of times, compared, as a table for people and as plain data for machines."""

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FLOORS = {
    "restore": "bare QEMU on plain files, from its spawn to the agent's answer to init",
    "command": "the same, then to the end of the first command",
    "save": "bare QEMU: stop, save the devices' state, copy the dirty pages into a plain file",
    "freeze, save": "the same after the agent's answer to freeze, which ours waits for too",
}
_TABLE_WIDTH = 112


@dataclass
class Series:
    """Times of one operation, in seconds."""

    times_s: list[float] = field(default_factory=list)

    def add(self, time_s: float) -> None:
        self.times_s.append(time_s)

    @property
    def p50_s(self) -> float:
        return statistics.median(self.times_s)

    @property
    def p95_s(self) -> float:
        """By nearest rank: a time that was measured."""
        return sorted(self.times_s)[math.ceil(0.95 * len(self.times_s)) - 1]


@dataclass(frozen=True)
class Comparison:
    operation: str
    ours: Series
    floor_name: str
    """A key of FLOORS."""
    floor: Series
    target: float | None = None
    """Largest ratio to the floor that is good enough; None where none is set."""

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return self.ours.p50_s / self.floor.p50_s

    def to_json(self) -> dict[str, Any]:
        return {
            "operation": self.operation,
            "rounds": len(self.ours.times_s),
            "ours": {"p50_s": self.ours.p50_s, "p95_s": self.ours.p95_s},
            "floor": {"name": self.floor_name, "p50_s": self.floor.p50_s, "p95_s": self.floor.p95_s},
            "ratio": self.ratio,
            "target": self.target,
        }


@dataclass(frozen=True)
class Conditions:
    """Of a run: what the figures are to be read with."""

    cpu: str
    cpus: int
    kernel: str
    vmm: str
    accelerator: str
    guest: str
    load: float
    """One-minute load average at the start."""

    @classmethod
    def here(cls, *, vmm: str, accelerator: str, guest: str) -> "Conditions":
        return cls(
            cpu=_cpu(),
            cpus=os.cpu_count() or 1,
            kernel=platform.release(),
            vmm=vmm,
            accelerator=accelerator,
            guest=guest,
            load=os.getloadavg()[0],
        )


def as_json(conditions: Conditions, comparisons: Sequence[Comparison]) -> str:
    """Times in seconds."""
    results = [found.to_json() for found in comparisons]
    return json.dumps({"conditions": asdict(conditions), "floors": FLOORS, "results": results}, indent=2)


def print_table(conditions: Conditions, comparisons: Sequence[Comparison]) -> None:
    table = Table(title="Lifecycle: times in ms", title_justify="left")
    table.add_column("operation", no_wrap=True)
    table.add_column("floor", no_wrap=True)
    for heading in ("p50", "p95", "floor p50", "floor p95", "ratio", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in comparisons:
        table.add_row(
            found.operation,
            found.floor_name,
            *(_ms(found.ours.p50_s), _ms(found.ours.p95_s), _ms(found.floor.p50_s), _ms(found.floor.p95_s)),
            f"{found.ratio:.2f}",
            "" if found.target is None else f"≤ {found.target:g}",
        )
    console = Console(width=max(Console().width, _TABLE_WIDTH))
    console.print(table)
    for name, meaning in FLOORS.items():
        console.print(f"{name}: {meaning}", soft_wrap=True)
    host = f"{conditions.cpu} × {conditions.cpus}, Linux {conditions.kernel}"
    vmm = f"{conditions.vmm} ({conditions.accelerator}), {conditions.guest}"
    console.print(f"{host}; {vmm}; load {conditions.load:.1f} at the start", soft_wrap=True)


def _ms(time_s: float) -> str:
    return f"{time_s * 1000:.1f}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
