"""The real guest assets of this machine: what they hold, and that they boot. `make setup` has built them."""

import asyncio
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

from aenv.guest.assets import Assets, asset_status, ensure_assets
from aenv.guest.commands import run
from aenv.guest.kernel import ARGUMENTS
from aenv.settings import Settings
from aenv.vmm.tsc import measure_tsc_khz

pytestmark = pytest.mark.vm

BOOT_DEADLINE_S = 120


@pytest.fixture(scope="module")
def assets() -> Assets:
    return asyncio.run(ensure_assets(Settings(), print))


async def debugfs(image: Path, command: str) -> str:
    return (await run("debugfs", "-R", command, image)).decode()


async def test_second_time_builds_nothing(assets: Assets) -> None:
    said: list[str] = []
    assert await ensure_assets(Settings(), said.append) == assets
    assert said == []
    assert all(status.present for status in asset_status(Settings()))


def test_kernel(assets: Assets) -> None:
    assert assets.kernel.read_bytes()[:4] == b"\x7fELF"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*-cloud-amd64", assets.kernel_version)
    assert re.fullmatch(r"\d+\.\d+\.\d+", assets.envd_version)


def test_unprivileged_programs_can_read_them(assets: Assets) -> None:
    for path in (assets.kernel, assets.initramfs, assets.base_image):
        assert path.stat().st_mode & 0o444 == 0o444
        assert path.parent.stat().st_mode & 0o555 == 0o555


async def test_base_image_is_sound_and_sparse(assets: Assets) -> None:
    await run("e2fsck", "-f", "-n", assets.base_image)
    assert assets.base_size_bytes == Settings().template_disk_mib << 20
    assert assets.base_image.stat().st_blocks * 512 < 400 << 20


async def test_base_image_contents(assets: Assets) -> None:
    image = assets.base_image
    assert "user:x:1000:1000::/home/user:/bin/bash" in await debugfs(image, "cat /etc/passwd")
    assert await debugfs(image, "cat /etc/sudoers.d/user") == "user ALL=(ALL:ALL) NOPASSWD: ALL\n"
    assert re.search(r"Mode: +0440 .*\nGeneration.*\nUser: +0 ", await debugfs(image, "stat /etc/sudoers.d/user"))
    assert re.search(r"User: +1000 +Group: +1000 ", await debugfs(image, "stat /home/user"))
    assert await debugfs(image, "cat /etc/hostname") == "sandbox\n"
    for program in ("python3", "python", "pip", "git", "curl", "sudo", "ps", "ip", "clear"):
        assert "Inode:" in await debugfs(image, f"stat /usr/bin/{program}"), program
    for empty in ("/etc/machine-id", "/etc/resolv.conf"):
        assert re.search(r"Size: +0$", await debugfs(image, f"stat {empty}"), re.MULTILINE), empty


@pytest.mark.parametrize("directory", ["/var/lib/apt/lists", "/var/log", "/tmp", "/usr/share/man/man1"])
async def test_nothing_useless_inside(assets: Assets, directory: str) -> None:
    names = re.findall(r"^/\d+/\d+/\d+/\d+/([^/]*)/", await debugfs(assets.base_image, f"ls -p {directory}"), re.M)
    assert set(names) <= {".", ".."}


@pytest.mark.slow
async def test_equal_packages_make_equal_bytes(assets: Assets, tmp_path: Path) -> None:
    again = await ensure_assets(Settings(cache=tmp_path), print)
    if again.base_key != assets.base_key:
        pytest.skip("the distribution has newer packages than the cached image")
    await run("cmp", again.base_image, assets.base_image)
    assert again.boot_key == assets.boot_key


def test_boots_to_envd(assets: Assets, tmp_path: Path) -> None:
    """Kernel, modules, root disk and agent fit together, without a line of ours between them and QEMU."""
    disk = tmp_path / "disk"
    subprocess.run(["cp", "--sparse=always", assets.base_image, disk], check=True)
    clock = f"no_timer_check lpj=1000000 tsc_early_khz={measure_tsc_khz()}"
    network = "aenv.root=/dev/vda aenv.address=169.254.0.21/30 aenv.gateway=169.254.0.22"
    command = [
        *("qemu-system-x86_64", "-M", "microvm", "-accel", "tcg,thread=multi", "-cpu", "Haswell-v4,-cx16"),
        *("-m", "512", "-smp", "2", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-serial", "stdio", "-kernel", str(assets.kernel), "-initrd", str(assets.initramfs)),
        *("-append", f"console=ttyS0 reboot=t {clock} {ARGUMENTS} {network}"),
        *("-netdev", "user,id=network,restrict=on", "-device", "virtio-net-device,netdev=network"),
        *("-blockdev", f"driver=raw,node-name=root,file.driver=file,file.filename={disk}"),
        *("-device", "virtio-blk-device,drive=root"),
    ]
    console = b""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as vm:
        assert vm.stdout
        deadline = threading.Timer(BOOT_DEADLINE_S, vm.kill)
        deadline.start()
        try:
            while b"envd: booted in" not in console and (some := os.read(vm.stdout.fileno(), 65536)):
                console += some
        finally:
            deadline.cancel()
            vm.kill()
    assert b"envd: booted in" in console, console[-2000:].decode(errors="replace")
