"""Control groups of either version; what the host lacks is said, not fatal."""

from dataclasses import replace
from pathlib import Path

import pytest

from aenv.vmm.cgroup import ControlGroups, Limits

LIMITS = Limits(memory_mib=100, pids=64, vcpus=2)


def mountinfo(tmp_path: Path, *mounts: tuple[Path, str, str]) -> Path:
    file = tmp_path / "mountinfo"
    lines = [f"1 2 0:3 / {path} rw - {kind} {kind} {options}\n" for path, kind, options in mounts]
    file.write_text("4 5 0:6 / / rw - ext4 /dev/x rw\n" + "".join(lines))
    return file


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    root = tmp_path / "unified"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu io memory pids\n")
    return root


def test_version_2(tmp_path: Path, version_2: Path) -> None:
    groups = ControlGroups("ab12", mountinfo(tmp_path, (version_2, "cgroup2", "rw")))
    assert groups.problems == []
    assert (version_2 / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    group = groups.create("vm", LIMITS)
    group.add(42)
    directory = version_2 / "aenv-ab12" / "vm"
    written = {file.name: file.read_text() for file in directory.iterdir()}
    assert written == {
        "memory.max": str(100 << 20),
        "memory.oom.group": "1",
        "pids.max": "64",
        "cpu.weight": "200",
        "cgroup.procs": "42",
    }


def test_version_1_where_version_2_has_no_controllers(tmp_path: Path, version_2: Path) -> None:
    (version_2 / "cgroup.controllers").write_text("\n")
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    memory.mkdir()
    cpu.mkdir()
    mounts = [(version_2, "cgroup2", "rw"), (memory, "cgroup", "rw,memory"), (cpu, "cgroup", "rw,cpu,cpuacct")]
    groups = ControlGroups("ab12", mountinfo(tmp_path, *mounts))
    assert groups.problems == ["no usable pids control group: sandboxes are not limited by it"]
    group = groups.create("vm", LIMITS)
    assert (memory / "aenv-ab12/vm/memory.limit_in_bytes").read_text() == str(100 << 20)
    assert (cpu / "aenv-ab12/vm/cpu.shares").read_text() == "2048"
    assert groups.named("vm").directories == group.directories


def test_without_any(tmp_path: Path) -> None:
    groups = ControlGroups("ab12", mountinfo(tmp_path))
    assert len(groups.problems) == 3
    group = groups.create("vm", LIMITS)
    group.add(42)
    assert not group.ran_out_of_memory
    group.remove()


def test_removal_is_idempotent_and_leaves_other_nodes_alone(tmp_path: Path, version_2: Path) -> None:
    file = mountinfo(tmp_path, (version_2, "cgroup2", "rw"))
    (version_2 / "aenv-zz99" / "vm").mkdir(parents=True)
    groups = ControlGroups("ab12", file)
    for name in ("one", "two", "left"):
        (version_2 / "aenv-ab12" / name).mkdir(parents=True)
    groups.named("one").remove()
    groups.named("one").remove()
    assert (version_2 / "aenv-ab12" / "two").exists()
    groups.remove_empty()
    assert not (version_2 / "aenv-ab12").exists()
    assert (version_2 / "aenv-zz99" / "vm").exists()


def test_an_out_of_memory_kill_is_seen(tmp_path: Path, version_2: Path) -> None:
    group = ControlGroups("ab12", mountinfo(tmp_path, (version_2, "cgroup2", "rw"))).create("vm", LIMITS)
    events = version_2 / "aenv-ab12/vm/memory.events"
    events.write_text("oom 0\noom_kill 0\noom_group_kill 0\n")
    assert not group.ran_out_of_memory
    events.write_text("oom 1\noom_kill 1\noom_group_kill 1\n")
    assert group.ran_out_of_memory


def test_background(tmp_path: Path, version_2: Path) -> None:
    groups = ControlGroups("ab12", mountinfo(tmp_path, (version_2, "cgroup2", "rw")))
    group = groups.create("vm", replace(LIMITS, background=True))
    weight = version_2 / "aenv-ab12/vm/cpu.weight"
    assert weight.read_text() == "20"
    group.promote(LIMITS.vcpus)
    assert weight.read_text() == "200"
    assert not (weight.parent / "cpu.shares").exists()
