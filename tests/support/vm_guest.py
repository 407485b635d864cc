"""The kernel and initramfs of the test guest (guest/init.c), built once for a test run."""

import asyncio
import subprocess
from pathlib import Path

from aenv.guest.initramfs import contents, write_archive
from aenv.guest.kernel import ensure_kernel
from aenv.settings import Settings
from aenv.vmm.contract import BootSource

_SOURCE = Path(__file__).parent / "guest" / "init.c"


async def boot_source(directory: Path) -> BootSource:
    """Kernel from the cache of the settings, which is filled when it is empty; initramfs in `directory`.
    Needs a C compiler.
    """
    kernel = await ensure_kernel(Settings().cache, "x86_64", print)
    program = directory / "init"
    command = ["cc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(_SOURCE)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    modules = ((path.name, path.read_bytes()) for path in kernel.modules)
    initramfs = directory / "initramfs"
    initramfs.write_bytes(write_archive(contents(program.read_bytes(), modules)))
    return BootSource(kernel.image, initramfs, "mitigations=off panic=-1", key="test-guest")
