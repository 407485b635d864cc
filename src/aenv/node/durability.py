"""From captured to durable: a capture survives the crash of any process at once, and a loss of power once its files are
on stable storage. Here is the way from the one to the other.
"""

import structlog

from aenv.errors import AenvError, CorruptData, NotFound
from aenv.node.services import Services
from aenv.snapshots.records import Kind, SnapshotRecord

log = structlog.get_logger(__name__)


async def make_durable(services: Services, snapshot: SnapshotRecord) -> None:
    """Bring what `snapshot` names to stable storage, then say so in its record. One deleted meanwhile is fine; a
    failure is logged, and the next start tries again.
    """
    layers = services.layers.paths([*snapshot.disk_layers, *snapshot.memory_layers])
    try:
        await services.machines.storage.sync_layers(layers)
        await services.snapshots.mark_durable(snapshot.id)
    except NotFound:
        return
    except AenvError as error:
        log.error("not on stable storage; tried again at the next start", snapshot=snapshot.id, error=str(error))


def not_durable(services: Services) -> list[SnapshotRecord]:
    """Of this boot. What an earlier boot did not make durable before it ended is distrusted: after a loss of power its
    files may be there and hold something else.
    """
    found = []
    for record in services.snapshots.all(*Kind):
        if record.durable:
            continue
        if record.boot_id == services.boot_id:
            found.append(record)
        else:
            message = f"the host went down before snapshot {record.id} was on stable storage"
            services.snapshots.distrust(record, CorruptData(message, hint="delete what needs it"))
    return found
