"""A node of the benchmark's own: `aenv server` as a process with its own directories, asked through its public port."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.bench.exchange import call, exchange, run
from aenv.errors import OperationFailed
from aenv.guest.client import ENVD_PORT
from aenv.snapshots.records import Kind, SnapshotRecord
from aenv.storage.client import BlockdClient

READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 180.0
_POOL_TIMEOUT_S = 120.0
_POOL_POLL_S = 0.1
_LIFETIME_S = 3600


@dataclass(frozen=True)
class Box:
    """A sandbox of the node, as its client knows it."""

    id: str
    access_token: str | None


class BenchNode:
    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._api = {"X-API-Key": (directory / "home/secrets/api-key").read_text().strip()}

    def connect(self) -> socket.socket:
        return socket.create_connection(self._address)

    # what a client does

    def create(self, template: str = "base") -> Box:
        body = {"templateID": template, "timeout": _LIFETIME_S}
        return _box(call(self.connect, "POST", "/v2/sandboxes", self._api, body))

    def run(self, box: Box, command: str) -> bytes:
        headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(ENVD_PORT)}
        if box.access_token:
            headers["X-Access-Token"] = box.access_token
        return run(self.connect, command, headers)

    def pause(self, box: Box) -> None:
        call(self.connect, "POST", f"/sandboxes/{box.id}/pause", self._api)

    def resume(self, box: Box) -> Box:
        body = {"timeout": _LIFETIME_S}
        return _box(call(self.connect, "POST", f"/v2/sandboxes/{box.id}/connect", self._api, body))

    def snapshot(self, box: Box) -> str:
        return str(call(self.connect, "POST", f"/sandboxes/{box.id}/snapshots", self._api, {})["snapshotID"])

    def fork(self, box: Box, count: int) -> list[Box]:
        body = {"count": count, "timeout": _LIFETIME_S}
        children = call(self.connect, "POST", f"/sandboxes/{box.id}/fork", self._api, body)
        failed = [child["error"] for child in children if child.get("error")]
        if failed:
            raise OperationFailed(f"{len(failed)} of {count} forks failed: {failed[0]}")
        return [_box(child["sandbox"]) for child in children]

    def kill(self, boxes: Sequence[Box]) -> None:
        for box in boxes:
            call(self.connect, "DELETE", f"/sandboxes/{box.id}", self._api)

    def delete_snapshot(self, snapshot: str) -> None:
        call(self.connect, "DELETE", f"/templates/{snapshot}", self._api)

    # what an operator sees

    def wait_for_warm_pool(self) -> None:
        """Return when a machine is ready. Raises: OperationFailed."""
        until_s = time.monotonic() + _POOL_TIMEOUT_S
        while b"\naenv_warm_machines 0.0" in exchange(self.connect, "GET", "/metrics", {})[1]:
            if time.monotonic() > until_s:
                raise OperationFailed(f"the warm pool has no machine after {_POOL_TIMEOUT_S:g} s")
            time.sleep(_POOL_POLL_S)

    @contextmanager
    def captured(self) -> Iterator[dict[str, Any]]:
        """Filled, at the end of the block, with the log entry of the capture that was made in it."""
        log = self._directory / "server.log"
        before = log.stat().st_size
        entry: dict[str, Any] = {}
        yield entry
        with log.open("rb") as file:
            file.seek(before)
            for line in file:
                if b'"captured"' in line:
                    entry.update(json.loads(line))
        if not entry:
            raise OperationFailed(f"no capture in {log}")

    # what lies on disk

    def template(self) -> tuple[SnapshotRecord, bytes]:
        """Record and device state of the built-in template."""
        home = self._directory / "home"
        with closing(sqlite3.connect(f"file:{home}/node.db?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT record FROM snapshots").fetchall()
        records = [SnapshotRecord.from_json(json.loads(row[0])) for row in rows]
        (record,) = (record for record in records if record.kind is Kind.TEMPLATE)
        return record, (home / "states" / record.id).read_bytes()

    @property
    def layers(self) -> Path:
        return self._directory / "home/layers"

    @property
    def storage(self) -> BlockdClient:
        return BlockdClient(self._directory / "run/blockd.sock")


@contextmanager
def bench_node(**settings: object) -> Iterator[BenchNode]:
    """Start a node and wait until it is ready; stop it and remove all it made at the end.

    Raises: OperationFailed with the end of its log.
    """
    directory = Path(tempfile.mkdtemp(prefix="aenv-bench-", dir="/var/tmp"))
    directory.chmod(0o755)
    own = {
        "home": directory / "home",
        "runtime": directory / "run",
        "listen": "127.0.0.1:0",
        "log_format": "json",
        "min_free_disk_mib": 0,
        **settings,
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AENV_") or name in _KEPT}
    environment |= {f"AENV_{name.upper()}": str(value) for name, value in own.items()}
    process: subprocess.Popen[str] | None = None
    try:
        with (directory / "server.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "aenv.cli.main", "server"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        yield BenchNode(directory, _ready(process, directory))
    finally:
        if process is not None:
            _stop(process)
        shutil.rmtree(directory, ignore_errors=True)


_KEPT = {"AENV_CACHE", "AENV_ACCELERATOR", "AENV_ENVD", "AENV_EDGE", "AENV_BLOCKD"}
"""Settings of the caller that choose programs and assets, not behaviour."""


def _ready(process: subprocess.Popen[str], directory: Path) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(READY_TIMEOUT_S, process.terminate)
    watchdog.start()
    try:
        words = process.stdout.readline().split()
    finally:
        watchdog.cancel()
    if words[:1] != ["ready"]:
        raise OperationFailed(f"the node did not become ready: {(directory / 'server.log').read_text()[-2000:]}")
    return words[1]


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _box(answer: dict[str, Any]) -> Box:
    return Box(answer["sandboxID"], answer.get("envdAccessToken"))
