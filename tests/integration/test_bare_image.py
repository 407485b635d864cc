"""The guest agent needs nothing of the image it runs in: no shell, no C library, no /etc."""

import asyncio
import base64
import json
import struct
import tempfile
from pathlib import Path

import httpx
import pytest

from aenv.guest.assets import ensure_assets
from aenv.node.machine import Shape
from aenv.server import running_node
from aenv.settings import Settings
from aenv.vmm.contract import BootSource
from aenv_native import program

pytestmark = pytest.mark.vm

COMMAND_LINE = "aenv.root=/dev/vda aenv.address=169.254.0.21/30 aenv.gateway=169.254.0.22 quiet"


async def test_an_image_of_one_static_program() -> None:
    with tempfile.TemporaryDirectory(prefix="aenv-t-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o711)
        settings = Settings(
            home=directory / "home",
            runtime=directory / "run",
            listen="127.0.0.1:0",
            template_vcpus=1,
            template_memory_mib=256,
        )
        image = await _image(directory)
        async with running_node(settings, lambda _: None, keep_running=lambda: False) as node:
            machines, assets = node.services.machines, await ensure_assets(settings, lambda _: None)
            layer = machines.layers.new()
            machines.layers.hold("test", [layer])
            await machines.storage.import_raw(image, machines.layers.path(layer))
            source = BootSource(assets.kernel, assets.initramfs, COMMAND_LINE, assets.boot_key)
            machine = await machines.boot(Shape(1, 256, 64), [layer], source, owner="test")
            try:
                url = f"http://{machine.slot.host_address}:49983"
                async with httpx.AsyncClient(base_url=url, timeout=60) as guest:
                    await _check(guest)
            finally:
                await machines.release(machine)
                machines.layers.release("test")


async def _image(directory: Path) -> Path:
    """ext4 with one file, a static program."""
    root, image = directory / "root", directory / "image.ext4"
    root.mkdir()
    (root / "program").write_bytes(program("envd").read_bytes())
    (root / "program").chmod(0o755)
    made = await asyncio.create_subprocess_exec("mke2fs", "-q", "-t", "ext4", "-d", root, image, "64M")
    assert await made.wait() == 0
    return image


async def _check(guest: httpx.AsyncClient) -> None:
    # A command, as the default user, whom the image does not have.
    exit_code, output = await _run(guest, "/program", ["--version"])
    assert exit_code == 0
    assert b"0.6" in output
    # Files, below that user's home directory.
    written = await guest.post("/files", params={"path": "a/b.txt"}, files={"file": ("b.txt", b"content")})
    assert written.status_code == 200, written.text
    assert written.json()[0]["path"] == "/home/user/a/b.txt"
    assert (await guest.get("/files", params={"path": "/home/user/a/b.txt"})).content == b"content"
    listed = await guest.post("/filesystem.Filesystem/ListDir", json={"path": "/home/user/a"})
    assert [entry["name"] for entry in listed.json()["entries"]] == ["b.txt"]
    assert (await guest.post("/freeze", json={"timeoutMs": 5000})).json()["frozen"]
    assert (await guest.post("/unfreeze", json={})).status_code == 204


async def _run(guest: httpx.AsyncClient, command: str, arguments: list[str]) -> tuple[int, bytes]:
    message = json.dumps({"process": {"cmd": command, "args": arguments}, "stdin": False}).encode()
    answer = await guest.post(
        "/process.Process/Start",
        content=struct.pack(">BI", 0, len(message)) + message,
        headers={"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"},
    )
    output, data, exit_code = b"", answer.content, -1
    while data:
        length = struct.unpack(">BI", data[:5])[1]
        event = json.loads(data[5 : 5 + length]).get("event", {})
        output += base64.b64decode(event.get("data", {}).get("stdout", ""))
        if "end" in event:
            exit_code = int(event["end"].get("exitCode", 0))
        data = data[5 + length :]
    return exit_code, output
