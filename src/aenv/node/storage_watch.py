"""What the death of blockd means: the VMs that ran on it are lost, nothing else is.

While the server lives it watches over blockd, as node/front_door.py does over edge. One that dies takes the disks and
the memory of every VM with it: their guests would see I/O errors, or stand still, in sandboxes reported as running. So
the VMs are ended, which is what makes their sandboxes known as lost, and a new blockd is started. Paused sandboxes and
snapshots are files. Owns no state.
"""

import asyncio

import structlog

from aenv.errors import AenvError
from aenv.ledger import Ledger
from aenv.settings import Settings
from aenv.storage.client import BlockdClient
from aenv.storage.supervisor import blockd_ended, ensure_blockd
from aenv.vmm.contract import Driver

log = structlog.get_logger(__name__)

_RETRY_S = 5.0


async def watch_storage(settings: Settings, ledger: Ledger, storage: BlockdClient, driver: Driver) -> None:
    """Replace each blockd that dies, until cancelled. `storage` makes its calls wait meanwhile; while none can be
    started they fail.
    """
    while True:
        await blockd_ended(ledger)
        log.error("blockd has ended: sandboxes that run are lost; starting it again")
        with storage.held_back():
            # Before there is a new one, lest a VM of the new one is taken for one of the old.
            for thing in await driver.sweep([]):
                log.info("ended with blockd", thing=thing)
            started = await _start(settings, ledger)
        if not started:
            await asyncio.sleep(_RETRY_S)


async def _start(settings: Settings, ledger: Ledger) -> bool:
    try:
        await ensure_blockd(settings, ledger)
    except AenvError as error:
        log.error("blockd could not be started", error=str(error), hint=error.hint)
        return False
    return True
