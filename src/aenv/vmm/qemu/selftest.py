"""Does a guest run on this host's KVM? /dev/kvm being there does not say: some hosts' KVM emulates what guest
kernels need, and fails at it.

The guest is a firmware of a few dozen instructions that enters 64-bit mode, uses what such hosts are known to
lack (extended state, 16-byte compare and exchange), and reports through QEMU's debug exit port.
"""

import asyncio
import tempfile
from pathlib import Path

_TIMEOUT_S = 10.0
_FIRMWARE_BYTES = 0x10000
_RESET_VECTOR = 0xFFF0
_SUCCESS = 0x2A
_EXIT_STATUS = _SUCCESS << 1 | 1
"""How isa-debug-exit reports a byte."""

_PROGRAM = bytes.fromhex(
    # 16-bit code at F000:0000. Page tables at 0x1000: one 2 MiB page, so that the firmware lies at 0xf0000
    # for 64-bit code too.
    "fa 31c0 8ed8 8ed0 bc0070"  # cli; ax = ds = ss = 0; sp = 0x7000
    "66c706001003200000"  # [0x1000] = 0x2003
    "66c706002003300000"  # [0x2000] = 0x3003
    "66c706003083000000"  # [0x3000] = 0x83
    "0f20e0 660d20060400 0f22e0"  # cr4 |= PAE | OSFXSR | OSXMMEXCPT | OSXSAVE
    "66b800100000 0f22d8"  # cr3 = 0x1000
    "66b9800000c0 0f32 660d00010000 0f30"  # EFER |= LME
    "0f20c0 6683e0fb 660d03000080 0f22c0"  # cr0 = cr0 & ~EM | PG | MP | PE
    "2e660f0116d000"  # lgdt [cs:0xd0]
    "66ea69000f000800"  # jmp 8:0xf0069, the next instruction
    # 64-bit code.
    "bf00600000 31c9"  # edi = 0x6000; ecx = 0
    "0f01d0 0f01d1"  # xgetbv; xsetbv
    "b807000000 31d2 be00500000 0fae26 0fae2e"  # xsave [0x5000]; xrstor [0x5000]
    "31c0 31d2 bb44330000 b922110000 f0480fc70f"  # lock cmpxchg16b [rdi]: 0 becomes 0x1122:0x3344
    "751e 813f44330000 7516 817f0822110000 750d"  # unless that is so: fail
    "b940420f00 ffc9 75fc"  # a million rounds
    "b02a e6f4"  # out 0xf4, 0x2a
    "b001 e6f4 f4"  # fail: out 0xf4, 1; hlt
    # 0xc0: GDT with a 64-bit code segment; 0xd0: its size and address.
    "0000000000000000 00000000009a2000 0f00c0000f00"
)


async def run_kvm_guest(binary: str, accelerator: str = "kvm", cpu: str = "host") -> str:
    """Run the test guest once. Returns "" when it ran to its end, else what went wrong. Takes 0.1 s, or 10 s
    on a host where it hangs.

    Args:
        binary: path of qemu-system-x86_64.
    """
    with tempfile.TemporaryDirectory(prefix="aenv-kvm-") as directory:
        firmware = Path(directory, "firmware")
        firmware.write_bytes(_firmware())
        process = await asyncio.create_subprocess_exec(
            *(
                binary,
                "-M",
                "microvm",
                "-accel",
                accelerator,
                "-cpu",
                cpu,
                "-m",
                "16",
                "-bios",
                str(firmware),
            ),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
            *("-device", "isa-debug-exit,iobase=0xf4,iosize=4"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        complaint = ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async for line in process.stderr:
                    text = line.decode(errors="replace").strip()
                    if "warning:" not in text:
                        complaint = complaint or text
                    if "internal error" in text:
                        break  # QEMU keeps the dead guest for a debugger
                else:
                    await process.wait()
        except TimeoutError:
            complaint = complaint or f"it did not end in {_TIMEOUT_S:.0f} s"
        finally:
            if process.returncode is None:
                process.kill()
            status = await process.wait()
    if status == _EXIT_STATUS:
        return ""
    return f"a test guest did not run on it: {complaint or f'QEMU ended with status {status}'}"


def _firmware() -> bytes:
    jump = bytes.fromhex("ea000000f0")  # jmp F000:0000
    return (_PROGRAM.ljust(_RESET_VECTOR, b"\0") + jump).ljust(_FIRMWARE_BYTES, b"\0")
