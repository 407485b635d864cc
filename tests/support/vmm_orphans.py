"""A server that starts a VM and a successor for it, says so, and waits to be killed.

Reads a pickled `Order` from standard input, writes the two pickled records to standard output.
"""

import asyncio
import pickle
import sys
from dataclasses import dataclass

from aenv.settings import Settings
from aenv.testing.vmm_conformance import Kept
from aenv.vmm.contract import VmSpec
from aenv.vmm.qemu.driver import QemuDriver


@dataclass(frozen=True)
class Order:
    instance_id: str
    kept: Kept
    spec: VmSpec
    pending: VmSpec


async def main() -> None:
    order: Order = pickle.load(sys.stdin.buffer)
    driver = await QemuDriver.create(Settings(), order.instance_id)
    vm = await driver.restore(order.spec, order.kept.state, order.kept.manifest)
    successor = await driver.prepare_successor(vm, order.pending)
    pickle.dump((vm.record, successor.record), sys.stdout.buffer)
    sys.stdout.buffer.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
