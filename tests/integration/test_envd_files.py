"""Files through the E2B SDK and through raw requests."""

import asyncio
import gzip
import hashlib
import os
import stat

import pytest
from e2b import FileNotFoundException, FileType
from e2b.exceptions import AuthenticationException, InvalidArgumentException
from tests.support.envd import running_envd

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="envd gives files to other users")
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
async def envd():
    async with running_envd() as envd:
        yield envd


@pytest.fixture
async def sandbox(envd):
    return await envd.sandbox()


async def test_write_and_read(sandbox):
    written = await sandbox.files.write("deep/er/name.txt", "héllo")
    assert (written.path, written.name) == ("/home/user/deep/er/name.txt", "name.txt")
    assert await sandbox.files.read("~/deep/er/name.txt") == "héllo"
    await sandbox.files.write("deep/er/name.txt", "h")
    assert await sandbox.files.read("deep/er/name.txt") == "h"
    owners = await sandbox.commands.run("stat -c '%U %a' deep deep/er deep/er/name.txt", user="root", cwd="/home/user")
    user = (await sandbox.commands.run("id -un")).stdout.strip()
    assert owners.stdout.split("\n")[:3] == [f"{user} 755", f"{user} 755", f"{user} 644"]


@pytest.mark.parametrize("size", [0, 1, 16 << 10, (18 << 10) + 1, 5 << 20])
@pytest.mark.parametrize("form", [True, False])
async def test_sizes(sandbox, size, form):
    content = os.urandom(size)
    await sandbox.files.write("blob", content, use_octet_stream=not form)
    assert bytes(await sandbox.files.read("blob", format="bytes")) == content


async def test_many_files_in_one_form(sandbox):
    names = ["plain", "with space", "emoji-😀", "per%2Fcent", "plus+sign", "-dash", "sub/dir/file", "x" * 255]
    await sandbox.files.write_files([{"path": name, "data": name} for name in names])
    for name in names:
        assert await sandbox.files.read(name) == name


async def test_compressed_upload_and_download(sandbox, envd):
    await sandbox.files.write("packed", "text " * 1000, gzip=True)
    assert await sandbox.files.read("packed") == "text " * 1000
    assert await sandbox.files.read("packed", gzip=True) == "text " * 1000
    cut = gzip.compress(os.urandom(100_000))[:-500]
    response = await envd.http.post("/files?path=/tmp/cut", content=cut, headers=OCTETS | {"content-encoding": "gzip"})
    assert response.status_code == 400, response.text


async def test_large_files_need_little_memory(envd, tmp_path):
    size, piece = 300 << 20, os.urandom(1 << 20)
    path = tmp_path / "large"

    async def pieces():
        for _ in range(size // len(piece)):
            yield piece

    digest = hashlib.sha256()
    response = await envd.http.post(f"/files?path={path}&username=root", content=pieces(), headers=OCTETS, timeout=120)
    assert response.status_code == 200, response.text
    assert path.stat().st_size == size
    async with envd.http.stream("GET", f"/files?path={path}&username=root", timeout=120) as response:
        assert response.headers["content-length"] == str(size)
        async for chunk in response.aiter_raw():
            digest.update(chunk)
    assert digest.hexdigest() == hashlib.sha256(piece * (size // len(piece))).hexdigest()
    assert envd.resident_kib() < 64 << 10


async def test_ranges(envd, tmp_path):
    (tmp_path / "f").write_bytes(b"0123456789")

    async def get(value):
        return await envd.http.get("/files", params={"path": f"{tmp_path}/f"}, headers={"range": value})

    response = await get("bytes=2-4")
    assert (response.status_code, response.content) == (206, b"234")
    assert response.headers["content-range"] == "bytes 2-4/10"
    assert (await get("bytes=-3")).content == b"789"
    response = await get("bytes=10-")
    assert (response.status_code, response.headers["content-range"]) == (416, "bytes */10")
    assert (await get("bytes=0-1,4-5")).status_code == 200


async def test_what_cannot_be_read(sandbox, envd, tmp_path):
    with pytest.raises(FileNotFoundException):
        await sandbox.files.read("/no/such/file")
    with pytest.raises(InvalidArgumentException):
        await sandbox.files.read("/tmp")
    with pytest.raises(AuthenticationException, match="invalid username"):
        await sandbox.files.read("/etc/passwd", user="stranger")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    strange = [tmp_path / "fifo", tmp_path / "loop", "/dev/zero", "/etc/passwd/below", "n\0ul", "x" * 300]
    for path in strange:
        for answer in (
            envd.http.get("/files", params={"path": str(path)}, timeout=5),
            envd.http.post("/files", params={"path": str(path)}, headers=OCTETS, content=b"x", timeout=5),
        ):
            response = await answer
            assert response.status_code in (400, 404), (path, response.text)
            assert response.json()["code"] == response.status_code


async def test_files_of_the_kernel(sandbox):
    assert "MemTotal" in await sandbox.files.read("/proc/meminfo")
    assert await sandbox.files.read("/proc/1/comm") == "envd\n"


async def test_empty_file_says_so(envd, tmp_path):
    (tmp_path / "empty").touch()
    response = await envd.http.get("/files", params={"path": f"{tmp_path}/empty"})
    assert (response.status_code, response.headers["content-length"], response.content) == (200, "0", b"")


async def test_a_full_disk_is_said_to_be_full(sandbox, envd):
    await sandbox.commands.run("mkdir /home/small && mount -t tmpfs -o size=1m none /home/small", user="root")
    response = await envd.http.post("/files?path=/home/small/f", content=os.urandom(4 << 20), headers=OCTETS)
    assert (response.status_code, response.json()["code"]) == (507, 507)
    assert (await envd.http.get("/files?path=/home/small/f")).status_code == 404
    await sandbox.files.write("/home/small/f", "fits")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"--b\r\ngarbage"),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="/tmp/x"\r\n\r\ncut',
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="other"\r\n\r\n1\r\n--b--\r\n',
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n1\r\n--b--\r\n',
        ),
        ("application/octet-stream", b"no path"),
        ("text/plain", b"x"),
    ],
)
async def test_broken_uploads(envd, content_type, body):
    response = await envd.http.post("/files", content=body, headers={"content-type": content_type})
    assert (response.status_code, response.json()["code"]) == (400, 400), response.text


async def test_one_path_twice_in_a_form(envd, tmp_path):
    files = [("file", (f"{tmp_path}/a", b"1")), ("file", (f"{tmp_path}/a", b"2"))]
    response = await envd.http.post("/files", files=files)
    assert response.status_code == 400
    response = await envd.http.post(
        "/files", params={"path": f"{tmp_path}/b"}, files=[("file", ("x", b"1")), ("file", ("y", b"2"))]
    )
    assert response.status_code == 400


async def test_an_upload_that_breaks_off_leaves_nothing(envd, tmp_path):
    path = tmp_path / "partial"
    head = f"POST /files?path={path} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n"
    head += "content-type: application/octet-stream\r\n\r\n"
    await envd.raw(head.encode() + b"x" * 1000)
    for _ in range(100):
        if not path.exists():
            return
        await asyncio.sleep(0.05)
    pytest.fail("the partial file is still there")


async def test_entries(sandbox, tmp_path):
    os.chmod(tmp_path, 0o755)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "inner").write_text("12345")
    (tmp_path / "file1.txt").write_text("x")
    (tmp_path / "link").symlink_to("dir/inner")
    (tmp_path / "broken").symlink_to("nowhere")
    entries = await sandbox.files.list(str(tmp_path), depth=2)
    assert [entry.path.removeprefix(f"{tmp_path}/") for entry in entries] == ["dir", "dir/inner", "file1.txt", "link"]
    info = await sandbox.files.get_info(f"{tmp_path}/dir/inner")
    assert (info.name, info.type, info.size, info.mode, info.permissions) == (
        "inner",
        FileType.FILE,
        5,
        0o644,
        "-rw-r--r--",
    )
    assert (info.owner, info.group) == ("root", "root")
    link = await sandbox.files.get_info(f"{tmp_path}/link")
    assert (link.type, link.symlink_target) == (FileType.FILE, f"{tmp_path}/dir/inner")
    assert not await sandbox.files.exists(f"{tmp_path}/nothing")
    with pytest.raises(FileNotFoundException):
        await sandbox.files.list(f"{tmp_path}/nothing")
    with pytest.raises(InvalidArgumentException):
        await sandbox.files.list(f"{tmp_path}/file1.txt")


async def test_directories_moves_and_removal(sandbox, tmp_path):
    root = f"{tmp_path}/made/by/us"
    assert await sandbox.files.make_dir(root)
    assert not await sandbox.files.make_dir(root)
    await sandbox.files.write(f"{root}/f", "content")
    with pytest.raises(InvalidArgumentException):
        await sandbox.files.make_dir(f"{root}/f")
    moved = await sandbox.files.rename(f"{root}/f", f"{tmp_path}/else/where/g")
    assert moved.path == f"{tmp_path}/else/where/g"
    with pytest.raises(FileNotFoundException):
        await sandbox.files.rename(f"{root}/f", f"{tmp_path}/h")
    for _ in range(2):
        await sandbox.files.remove(f"{tmp_path}/made")
    assert not (tmp_path / "made").exists()


async def test_moving_across_file_systems(sandbox, tmp_path):
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "tool").write_bytes(b"#!/bin/sh\n")
    os.chmod(tree / "sub" / "tool", 0o4751)
    (tree / "link").symlink_to("sub/tool")
    os.mkfifo(tree / "fifo")
    await sandbox.files.rename(str(tree), "/home/arrived/tree")
    assert not tree.exists()
    assert (await sandbox.files.read("/home/arrived/tree/link")) == "#!/bin/sh\n"
    moved = (await sandbox.commands.run("stat -c '%a %F' sub/tool fifo", user="root", cwd="/home/arrived/tree")).stdout
    assert moved == "4751 regular file\n644 fifo\n"
    assert stat.S_ISDIR(tmp_path.stat().st_mode)


async def test_not_supported_is_said(sandbox, envd):
    for method, body in [("CreateWatcher", {"path": "/tmp"}), ("GetWatcherEvents", {}), ("RemoveWatcher", {})]:
        response = await envd.unary(f"filesystem.Filesystem/{method}", body)
        assert (response.status_code, response.json()["code"]) == (501, "unimplemented")
    [answer] = await envd.stream("filesystem.Filesystem/WatchDir", {"path": "/tmp"})
    assert answer["error"]["code"] == "unimplemented"
    assert (await envd.http.post("/files/compose", json={})).status_code == 501
    response = await envd.http.post("/files?path=/tmp/x", headers=OCTETS | {"x-metadata-a": "1"}, content=b"")
    assert response.status_code == 501
