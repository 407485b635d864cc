"""The built-in template `base`: boot the base image once, let it settle, capture it; every sandbox of it is a restore.

It is made again when what it is made of changes (image, kernel, agent, sizes) or when this host cannot restore it.
The one before is deleted then; sandboxes that stand on its layers go on.
"""

import asyncio
from collections.abc import Callable

import structlog

from aenv.clock import Clock
from aenv.errors import CorruptData, IncompatibleSnapshot, NotFound
from aenv.guest.assets import Assets
from aenv.guest.cache import content_key
from aenv.guest.kernel import ARGUMENTS
from aenv.ids import new_snapshot_id
from aenv.network.slot import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_PREFIX_LENGTH
from aenv.node.capture import Capturer
from aenv.node.machine import Capture, Machine, Shape
from aenv.node.machines import Machines
from aenv.settings import Settings
from aenv.snapshots.records import Kind, SnapshotRecord
from aenv.snapshots.store import SnapshotStore
from aenv.vmm.contract import BootSource

log = structlog.get_logger(__name__)

NAME = "base"
_OWNER = "template-base"
_SETTLE = (
    # What first commands touch is then in the guest's page cache, so in the capture, so shared by all sandboxes.
    "for i in 1 2 3; do bash -l -c 'ls / && id && hostname' ; done; "
    "sudo -n true; python3 -c 'import json, os, sys'; git --version; sync"
)


class BaseTemplate:
    def __init__(
        self,
        *,
        settings: Settings,
        machines: Machines,
        capturer: Capturer,
        snapshots: SnapshotStore,
        clock: Clock,
        boot_id: str,
    ) -> None:
        self._settings = settings
        self._machines = machines
        self._capturer = capturer
        self._snapshots = snapshots
        self._clock = clock
        self._boot_id = boot_id

    async def ensure(self, assets: Assets, progress: Callable[[str], None]) -> SnapshotRecord:
        """The template, built if there is none that fits. Raises: any AenvError; what was there before is still there
        then.
        """
        shape = Shape(
            self._settings.template_vcpus,
            self._settings.template_memory_mib,
            self._settings.template_disk_mib,
        )
        key = content_key(assets.base_key, assets.boot_key, str(shape), _command_line(), _SETTLE)
        found = self._current()
        if found is not None and found.source_key == key:
            try:
                self._machines.driver.check(found.manifest)
                self._snapshots.check(found)
                return found
            except (IncompatibleSnapshot, CorruptData) as error:
                progress(f"template {NAME}: building again, {error.message}")
        return await self._build(assets, shape, key, found, progress)

    def _current(self) -> SnapshotRecord | None:
        try:
            return self._snapshots.find(NAME)
        except NotFound:
            return None

    async def _build(
        self,
        assets: Assets,
        shape: Shape,
        key: str,
        replaced: SnapshotRecord | None,
        progress: Callable[[str], None],
    ) -> SnapshotRecord:
        layers, snapshot_id = self._machines.layers, new_snapshot_id()
        holder = f"build-{snapshot_id}"
        base = layers.new()
        layers.hold(holder, [base])
        try:
            progress(f"template {NAME}: importing the base image")
            await self._machines.storage.import_raw(assets.base_image, layers.path(base))
            progress(f"template {NAME}: booting")
            source = BootSource(assets.kernel, assets.initramfs, _command_line(), assets.boot_key)
            machine = await self._machines.boot(shape, [base], source, owner=_OWNER)
            try:
                progress(f"template {NAME}: settling and capturing")
                capture = await self._settle_and_capture(machine, holder)
            finally:
                await self._machines.release(machine)
            record = SnapshotRecord(
                id=snapshot_id,
                kind=Kind.TEMPLATE,
                created_at=self._clock.now(),
                manifest=capture.manifest,
                disk_layers=capture.disk_layers,
                memory_layers=capture.memory_layers,
                state_sha256=self._snapshots.write_state(snapshot_id, capture.state),
                vcpus=shape.vcpus,
                memory_mib=shape.memory_mib,
                disk_mib=shape.disk_mib,
                envd_version=assets.envd_version,
                boot_id=self._boot_id,
                names=(NAME,),
                source_key=key,
                user_frozen=capture.user_frozen,
            )
            await self._machines.storage.sync_layers(layers.paths([*record.disk_layers, *record.memory_layers]))
            await self._snapshots.commit(record, replaces=[replaced.id] if replaced else ())
            await self._snapshots.mark_durable(snapshot_id)
        except asyncio.CancelledError:
            raise  # the record may be on its way into the database; what nobody needs goes at the next start
        except BaseException:
            self._snapshots.discard_state(snapshot_id)
            layers.release(holder)
            raise
        layers.release(holder)
        progress(f"template {NAME}: ready")
        return self._snapshots.get(snapshot_id)

    async def _settle_and_capture(self, machine: Machine, holder: str) -> Capture:
        result = await machine.ask(machine.guest.run(_SETTLE, user="root"))
        if result.exit_code != 0:
            log.warning(
                "settling ended with an error",
                exit_code=result.exit_code,
                stderr=result.stderr[-500:].decode(errors="replace"),
            )
        return await self._capturer.capture_and_stop(machine, holder=holder)


def _command_line() -> str:
    """What envd expects (docs/protocols/envd.md), and what makes the kernel come up fast."""
    address = f"{GUEST_ADDRESS}/{GUEST_PREFIX_LENGTH}"
    return f"{ARGUMENTS} aenv.root=/dev/vda aenv.address={address} aenv.gateway={GATEWAY_ADDRESS}"
