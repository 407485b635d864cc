"""QEMU's command line: device set 1 on the microvm machine. Pure; the order and places of devices are part of
every saved state.

Each device has its own place on the bus, by number, so one disk more moves no other device.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from aenv.vmm.contract import BootSource, VmSpec

MONITOR_FD = 3
QUEUE_FD = 4
STATE_FD = 5
KERNEL_FD = 6
INITRAMFS_FD = 7

CONSOLE_BYTES = 65536
_MIB = 1 << 20
_TRANSLATION_MIB = 128
"""Cache of translated code. The default grows to 1 GiB a VM."""
OVERHEAD_MIB = 384
"""What QEMU may need beyond the guest's memory: kernel image at first boot, translated code, threads, and
buffers of disk requests.
"""
_THREAD_POOL_MAX = 16
"""QEMU's default of 64 threads for disk I/O would run into the process limit, and it aborts when it cannot
make one.
"""
_RNG_BUS, _BALLOON_BUS, _NETWORK_BUS = 1, 2, 3
"""Place 0 is left empty: QEMU's interrupt controller takes its line for the old timer's, and no interrupt arrives."""
_FIRST_DISK_BUS = 23
"""And down from there: a guest numbers its disks from the last place on the bus to the first."""


class Accelerator(StrEnum):
    KVM = "kvm"
    TCG = "tcg"


@dataclass(frozen=True)
class Platform:
    """What all VMs of a driver have in common."""

    binary: str
    accelerator: Accelerator
    cpu: str
    """Argument of -cpu."""
    tsc_khz: int

    @property
    def arguments(self) -> list[str]:
        # Without the last, QEMU warns at each restore that a bare device state lacks a description of itself.
        options = "memory-backend=m0,mem-merge=off,dump-guest-core=off,suppress-vmdesc=on"
        if self.accelerator is Accelerator.KVM:
            return ["-M", f"microvm,pit=off,pic=off,rtc=on,{options}", "-accel", "kvm", "-cpu", self.cpu]
        # Emulated, the guest hangs without the legacy timers.
        return [
            "-M",
            f"microvm,{options}",
            "-accel",
            f"tcg,thread=multi,tb-size={_TRANSLATION_MIB}",
            "-cpu",
            self.cpu,
        ]

    @property
    def guest_arguments(self) -> str:
        """For the guest kernel's command line.

        A restart by triple fault ends QEMU; by other ways a restored VM would run into firmware that has no kernel to
        start. Calibration against emulated timers fails on a busy host, so the kernel is told the clock's rate.
        """
        if self.accelerator is Accelerator.KVM:
            return "console=ttyS0 reboot=t tsc=reliable no_timer_check"
        return f"console=ttyS0 reboot=t no_timer_check lpj=1000000 tsc_early_khz={self.tsc_khz}"


def arguments(platform: Platform, name: str, spec: VmSpec, source: BootSource | None) -> list[str]:
    """The whole command: with `source` a first boot, else one that waits for a state on STATE_FD. The vCPUs
    stand still either way.
    """
    command = [
        platform.binary,
        *("-name", name),
        *platform.arguments,
        *("-smp", str(spec.vcpus), "-m", str(spec.memory_mib)),
        *("-object", _json(_memory(spec))),
        *(
            "-object",
            _json({"qom-type": "main-loop", "id": "main-loop", "thread-pool-max": _THREAD_POOL_MAX}),
        ),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-S"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *(
            "-chardev",
            f"socket,id=monitor,fd={MONITOR_FD},server=on,wait=off",
            "-mon",
            "chardev=monitor,mode=control",
        ),
        # A ring in memory: a guest that floods its console costs nothing but its own older output.
        *("-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}", "-serial", "chardev:console"),
        *_device(_RNG_BUS, driver="virtio-rng-device", rng="rng"),
        *("-object", _json({"qom-type": "rng-random", "id": "rng", "filename": "/dev/urandom"})),
        *_device(
            _BALLOON_BUS,
            driver="virtio-balloon-device",
            **{"free-page-reporting": True, "deflate-on-oom": True},
        ),
        *_network(spec.network.mac),
    ]
    for number, disk in enumerate(spec.disks):
        command += _disk(number, disk)
    if source is None:
        # The state is a bare device state: no configuration section before it, no announcement of a moved
        # host after it.
        command += ["-global", "migration.send-configuration=off", "-global", "migration.announce-rounds=0"]
        command += ["-global", "migration.x-events=on", "-incoming", f"fd:{STATE_FD}"]
    else:
        # By descriptor: the directories they are in may be closed to the VM's user.
        command += ["-kernel", f"/proc/self/fd/{KERNEL_FD}", "-initrd", f"/proc/self/fd/{INITRAMFS_FD}"]
        command += ["-append", f"{platform.guest_arguments} {source.command_line}".strip()]
    return command


def confined(command: list[str], uid: int, gid: int, groups: Sequence[int]) -> list[str]:
    """`command` run as `uid` and `gid` without a capability or a way to get one."""
    membership = ["--groups", ",".join(str(group) for group in groups)] if groups else ["--clear-groups"]
    identity = [f"--reuid={uid}", f"--regid={gid}", *membership]
    return ["setpriv", *identity, "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--", *command]


def _memory(spec: VmSpec) -> dict[str, object]:
    return {
        "qom-type": "memory-backend-file",
        "id": "m0",
        "size": spec.memory_mib * _MIB,
        "mem-path": str(spec.memory),
        "share": False,
        "merge": False,
    }


def _network(mac: str) -> list[str]:
    """Small receive buffers: with guest segmentation offload and no merging, the guest would keep 17 MiB of
    them.

    Merging would change the header's size, which belongs to the tap and not to the queue: a successor's start
    would deafen its predecessor.
    """
    offloads = dict.fromkeys(
        ["mrg_rxbuf", "guest_tso4", "guest_tso6", "guest_ecn", "guest_ufo", "guest_announce"], False
    )
    netdev: dict[str, object] = {"type": "tap", "id": "network", "fd": str(QUEUE_FD), "vhost": False}
    device = _device(_NETWORK_BUS, driver="virtio-net-device", netdev="network", mac=mac, **offloads)
    return ["-netdev", _json(netdev), *device]


def _disk(number: int, path: Path) -> list[str]:
    node = f"disk{number}"
    file: dict[str, object] = {
        "driver": "host_device" if path.is_block_device() else "file",
        "filename": str(path),
        "aio": "threads",
        "locking": "off",  # a successor opens the disk while its predecessor still has it
        "cache": {"direct": True},
        "discard": "unmap",
    }
    blockdev: dict[str, object] = {
        "driver": "raw",
        "node-name": node,
        "cache": {"direct": True},
        "discard": "unmap",
        "detect-zeroes": "off",
        "file": file,
    }
    # Errors go to the guest: a VM stopped by a full disk would look like a hanging one.
    device = _device(_FIRST_DISK_BUS - number, driver="virtio-blk-device", drive=node, werror="report", rerror="report")
    return ["-blockdev", _json(blockdev), *device]


def _device(bus: int, **properties: object) -> list[str]:
    return ["-device", _json({**properties, "bus": f"virtio-mmio-bus.{bus}"})]


def _json(value: dict[str, object]) -> str:
    return json.dumps(value, separators=(",", ":"))
