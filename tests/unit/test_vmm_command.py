"""The command line is part of every saved state: places and order of devices do not move."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

from aenv.vmm.contract import BootSource, Confinement, NetworkAttachment, VmSpec
from aenv.vmm.qemu.command import Accelerator, Platform, arguments, confined

PLATFORM = Platform("qemu", Accelerator.TCG, "cpu", 2_000_000)
SPEC = VmSpec(
    vm_id="i1",
    workdir=Path("/work"),
    vcpus=2,
    memory_mib=64,
    memory=Path("/images/memory,1"),
    disks=[Path("/images/disk,1")],
    network=NetworkAttachment(Path("/run/netns/a"), "tap0", "02:00:00:00:00:01"),
    confinement=Confinement(7, 8, 64),
)
SOURCE = BootSource(Path("/kernel"), Path("/initramfs"), "a=b", key="k")


def values(command: list[str], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(command) if name == option]


def buses(command: list[str]) -> dict[str, str]:
    devices = [json.loads(device) for device in values(command, "-device")]
    return {device.get("drive", device["driver"]): device["bus"] for device in devices}


def test_a_disk_more_moves_no_other_device() -> None:
    one = buses(arguments(PLATFORM, "n", SPEC, SOURCE))
    two = buses(arguments(PLATFORM, "n", replace(SPEC, disks=[*SPEC.disks, Path("/d")]), SOURCE))
    assert two == {**one, "disk1": "virtio-mmio-bus.22"}
    assert one == {
        "virtio-rng-device": "virtio-mmio-bus.1",
        "virtio-balloon-device": "virtio-mmio-bus.2",
        "virtio-net-device": "virtio-mmio-bus.3",
        "disk0": "virtio-mmio-bus.23",
    }


def test_boot_and_restore_have_the_same_devices() -> None:
    boot, restore = arguments(PLATFORM, "n", SPEC, SOURCE), arguments(PLATFORM, "n", SPEC, None)
    for option in ("-M", "-cpu", "-smp", "-m", "-object", "-device", "-blockdev", "-netdev", "-chardev"):
        assert values(boot, option) == values(restore, option)
    assert values(boot, "-kernel") == ["/proc/self/fd/6"]
    assert values(restore, "-kernel") == []
    assert values(restore, "-incoming") == ["fd:5"]
    assert "-S" in boot
    assert "-S" in restore


def test_paths_with_commas_stay_whole() -> None:
    command = arguments(PLATFORM, "n", SPEC, SOURCE)
    assert json.loads(values(command, "-object")[0])["mem-path"] == "/images/memory,1"
    assert json.loads(values(command, "-blockdev")[0])["file"]["filename"] == "/images/disk,1"


def test_memory_is_private_and_disks_bypass_the_page_cache() -> None:
    command = arguments(PLATFORM, "n", SPEC, SOURCE)
    assert json.loads(values(command, "-object")[0])["share"] is False
    disk = json.loads(values(command, "-blockdev")[0])
    assert disk["cache"] == disk["file"]["cache"] == {"direct": True}


def test_an_emulated_guest_is_told_the_clock_rate() -> None:
    (kernel_arguments,) = values(arguments(PLATFORM, "n", SPEC, SOURCE), "-append")
    assert "tsc_early_khz=2000000" in kernel_arguments
    assert kernel_arguments.endswith(" a=b")
    kvm = replace(PLATFORM, accelerator=Accelerator.KVM)
    assert "tsc_early_khz" not in values(arguments(kvm, "n", SPEC, SOURCE), "-append")[0]


def test_confinement() -> None:
    assert confined(["x"], 7, 8, ()) == [
        *("setpriv", "--reuid=7", "--regid=8", "--clear-groups"),
        *("--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--", "x"),
    ]
    assert "--groups" in confined(["x"], 7, 8, (9,))
