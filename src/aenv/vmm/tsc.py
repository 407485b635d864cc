"""The rate of this host's time stamp counter, which a saved VM's clock depends on.

The kernel publishes it nowhere for certain, so it is measured: `rdtsc`, as ten bytes of machine code, against
CLOCK_MONOTONIC_RAW.
"""

import ctypes
import mmap
import time
from collections.abc import Callable

_RDTSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
_PERIOD_S = 0.1
_SAMPLES = 16


def measure_tsc_khz() -> int:
    """Takes 0.1 s and blocks; exact to about ten parts in a million."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        code.write(_RDTSC)
        start = ctypes.c_char.from_buffer(code)
        try:
            read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(start))
            ticks_before, ns_before = _sample(read)
            time.sleep(_PERIOD_S)
            ticks_after, ns_after = _sample(read)
        finally:
            del start
    return round((ticks_after - ticks_before) * 1_000_000 / (ns_after - ns_before))


def _sample(read: Callable[[], int]) -> tuple[int, int]:
    """Counter and nanoseconds of the same moment: the pair that took the shortest time of several."""
    pairs = []
    for _ in range(_SAMPLES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        ticks = read()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        pairs.append((after - before, ticks, (before + after) // 2))
    _, ticks, moment = min(pairs)
    return ticks, moment
