"""blockd as a process: privileges, hostile requests, death, and the supervisor that starts and adopts it."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from tests.support.blockd import UID, ExportedFile, blockd_program, needs_fuse, read_disk, running_blockd, until

from aenv.errors import HostUnsupported, OperationFailed
from aenv.ledger import Ledger
from aenv.settings import Settings
from aenv.storage import supervisor
from aenv.storage.supervisor import ensure_blockd, stop_blockd

pytestmark = needs_fuse
MIB = 1 << 20


@pytest.fixture
async def blockd():
    async with running_blockd() as blockd:
        yield blockd


async def test_it_has_no_privileges_and_its_socket_is_private(blockd):
    pid = (await blockd.client.health()).pid
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["Uid"].split() == status["Gid"].split() == [str(UID)] * 4
    assert status["Groups"].strip() == ""
    assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert blockd.socket.stat().st_mode & 0o777 == 0o600
    assert blockd.socket.stat().st_uid == os.getuid()
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(blockd.mount) in line]
    assert len(mounts) == 1
    assert "nosuid,nodev" in mounts[0]


@pytest.mark.parametrize("by_signal", [True, False])
async def test_it_ignores_hangups_and_ends_clean(blockd, by_signal):
    pid = (await blockd.client.health()).pid
    os.kill(pid, signal.SIGHUP)
    image = await blockd.client.open_disk("disk", layers=[], upper=blockd.new_upper(), uid=0, size=MIB)
    with ExportedFile(image.path) as disk:
        await asyncio.to_thread(disk.write, 0, b"k" * 512)
    if by_signal:
        os.kill(pid, signal.SIGTERM)
    else:
        await blockd.client.shutdown()
    assert await blockd.ended() == 0
    assert not blockd.mounted()
    await blockd.start()
    again = await blockd.client.open_disk("disk", layers=[], upper=blockd.directory / "upper1", uid=0)
    assert (await asyncio.to_thread(read_disk, again.path, MIB))[:512] == b"k" * 512


async def test_a_second_one_is_refused(blockd):
    second = await asyncio.create_subprocess_exec(
        blockd_program(),
        *("--socket", str(blockd.socket), "--mount", str(blockd.mount), "--uid", str(UID)),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await second.communicate()
    assert second.returncode == 1
    assert b"already serves" in said
    assert (await blockd.client.health()).images == 0


async def test_one_killed_and_started_at_once_keeps_its_mount(blockd):
    """What the dead one left to unmount must not take the new one's mount."""
    upper = blockd.new_upper()
    for _ in range(30):
        await blockd.kill()
        await blockd.start()
        image = await blockd.client.open_disk("disk", layers=[], upper=upper, uid=0, size=MIB)
        await asyncio.sleep(0.03)
        assert image.path.exists()
    mounts = Path("/proc/self/mountinfo").read_text().count(str(blockd.mount))
    assert mounts == 1


def hammer(disk: ExportedFile, acknowledged: dict[int, bytes], lane: int, stop: threading.Event) -> None:
    """Write numbered blocks in a lane of our own, noting each only once it was acknowledged, until I/O fails."""
    source = random.Random(lane)
    with disk, contextlib.suppress(OSError):
        while not stop.is_set():
            block = lane + 4 * source.randrange(512)
            data = source.randbytes(4096)
            acknowledged.pop(block, None)  # until this write is acknowledged too, either may be there
            disk.write(block * 4096, data)
            acknowledged[block] = data


async def test_acknowledged_writes_survive_its_death(blockd):
    upper = blockd.new_upper()
    acknowledged: dict[int, bytes] = {}
    layers: list[Path] = []
    for death in range(4):
        image = await blockd.client.open_disk("disk", layers=layers, upper=upper, uid=0, size=8 * MIB)
        content = await asyncio.to_thread(read_disk, image.path, 8 * MIB)
        for block, data in acknowledged.items():
            assert content[block * 4096 : (block + 1) * 4096] == data, f"block {block} after death {death}"
        stop = threading.Event()
        lanes: list[dict[int, bytes]] = [{} for _ in range(4)]
        for block, data in acknowledged.items():
            lanes[block % 4][block] = data
        disks = [await asyncio.to_thread(ExportedFile, image.path) for _ in lanes]
        writers = [
            asyncio.to_thread(hammer, disk, lane, number, stop)
            for number, (disk, lane) in enumerate(zip(disks, lanes, strict=True))
        ]
        running = asyncio.gather(*writers)
        await asyncio.sleep(0.4)
        if death == 1:
            layers.append((await blockd.client.snapshot("disk", blockd.layer("sealed"))).path)
            await asyncio.sleep(0.2)
        await blockd.kill()
        stop.set()
        await running
        acknowledged = {block: data for lane in lanes for block, data in lane.items()}
        await blockd.start()
    assert len(acknowledged) > 500


async def request(path: Path, raw: bytes, descriptors: list[int] | None = None, *, hang_up: bool = False) -> bytes:
    """Send bytes as they are, then perhaps hang up; the answer up to the connection's end."""

    def exchange() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(path))
            answer = b""
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                sent = socket.send_fds(connection, [raw[:1]], descriptors or [])
                connection.sendall(raw[sent:])
                if hang_up:
                    connection.shutdown(socket.SHUT_WR)
                while part := connection.recv(1 << 16):
                    answer += part
            return answer

    return await asyncio.to_thread(exchange)


def http(method: str, target: str, body: bytes = b"") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nhost: b\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (http("PUT", "/images/a", b"{"), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"disk","uid":0,"surprise":1}'), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"disk","uid":-1}'), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"disk","uid":0}'), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"disk","uid":0,"size":513}'), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"memory","uid":0,"size":512}'), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"disk","uid":0,"layers":["relative"]}'), 400, "invalid"),
        (http("PUT", "/images/a", b'{"kind":"disk","uid":0,"layers":["/dev/zero"]}'), 500, "io"),
        (http("PUT", "/images/..%2f", b"{}"), 400, "invalid"),
        (http("PUT", "/images/" + "a" * 129, b"{}"), 400, "invalid"),
        (http("DELETE", "/images/none"), 404, "not_found"),
        (http("DELETE", "/images/none?discard=2"), 400, "invalid"),
        (http("POST", "/images/none/snapshot", b'{"layer":"/x"}'), 404, "not_found"),
        (http("POST", "/memory/capture", b'{"layer":"/x","size":4096,"ranges":[]}'), 400, "invalid"),
        (http("POST", "/layers/verify", b'{"layer":"/no/such"}'), 404, "not_found"),
        (http("GET", "/nothing"), 404, "not_found"),
    ],
)
async def test_bad_requests_get_their_code(blockd, raw, status, code):
    head, _, body = (await request(blockd.socket, raw)).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    answer = json.loads(body)
    assert set(answer) == {"code", "message", "hint"}
    assert answer["code"] == code


async def test_noise_and_stray_descriptors_leave_nothing_behind(blockd):
    pid = (await blockd.client.health()).pid
    source = random.Random(4)
    before = len(os.listdir(f"/proc/{pid}/fd"))
    null = os.open("/dev/null", os.O_RDONLY)
    for _ in range(20):
        await request(blockd.socket, source.randbytes(source.randrange(1, 3000)), hang_up=True)
        await request(blockd.socket, http("GET", "/health"), [null] * 3)
        await request(blockd.socket, http("POST", "/memory/capture", b"{}"), [null] * 60)
        await request(blockd.socket, b"G", [null] * 4, hang_up=True)
    await request(blockd.socket, http("POST", "/layers/sync", b" " * (8 << 20)))
    os.close(null)
    await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before + 1)
    assert (await blockd.client.health()).pid == pid


@pytest.fixture
def node(monkeypatch):
    """Settings and ledger of a node in directories of its own."""
    directory = Path(tempfile.mkdtemp(prefix="blockd-", dir="/tmp"))
    directory.chmod(0o711)
    (directory / "home" / "logs").mkdir(parents=True)
    (directory / "run").mkdir()
    monkeypatch.setattr(supervisor, "program", lambda _: Path(blockd_program()))
    yield (
        Settings(home=directory / "home", runtime=directory / "run", uid_base=UID),
        Ledger(directory / "run" / "ledger"),
    )
    shutil.rmtree(directory)


async def test_the_supervisor_starts_adopts_and_stops(node):
    settings, ledger = node
    client = await ensure_blockd(settings, ledger)
    try:
        pid = (await client.health()).pid
        assert os.getsid(pid) == pid, "in a session of its own"
        again = await ensure_blockd(settings, Ledger(settings.runtime / "ledger"))
        assert (await again.health()).pid == pid
        ledger.erase("blockd", "daemon")
        assert (await (await ensure_blockd(settings, ledger)).health()).pid == pid, "adopted without its entry too"
        os.kill(pid, signal.SIGKILL)
        client = await ensure_blockd(settings, ledger)
        assert (await client.health()).pid != pid, "a dead one is replaced"
    finally:
        await stop_blockd(settings, ledger)
    assert ledger.entries("blockd") == []
    assert str(settings.runtime) not in Path("/proc/self/mountinfo").read_text()
    with pytest.raises(OperationFailed):
        await client.health()
    await stop_blockd(settings, ledger)


async def test_the_supervisor_says_why_it_cannot(node, monkeypatch):
    settings, ledger = node
    (settings.runtime / "images").write_text("in the way")
    with pytest.raises(HostUnsupported, match="images"):
        await ensure_blockd(settings, ledger)
    (settings.runtime / "images").unlink()
    (settings.runtime / "blockd.sock").mkdir()
    with pytest.raises(OperationFailed, match=r"bind .*blockd\.sock"):
        await ensure_blockd(settings, ledger)
    monkeypatch.setattr(supervisor, "program", lambda _: (_ for _ in ()).throw(FileNotFoundError("no program")))
    with pytest.raises(HostUnsupported, match="no program"):
        await ensure_blockd(settings, ledger)
    assert ledger.entries("blockd") == []
