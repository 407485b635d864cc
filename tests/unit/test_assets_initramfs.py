"""The initramfs, read back by a parser of its own."""

import stat
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aenv.guest.initramfs import Entry, build_initramfs, contents, write_archive

MODULES = [("virtio_ring.ko", b"ring"), ("virtio.ko", b"virtio!")]


def parse(archive: bytes) -> Iterator[tuple[Entry, list[int]]]:
    """Entries of a newc archive with their 13 header fields."""
    position = 0
    while True:
        assert archive[position : position + 6] == b"070701"
        header = archive[position + 6 : position + 110]
        fields = [int(header[start : start + 8], 16) for start in range(0, 104, 8)]
        size, name_size = fields[6], fields[11]
        name = archive[position + 110 : position + 110 + name_size]
        assert name.endswith(b"\0")
        start = -(-(position + 110 + name_size) // 4) * 4
        data = archive[start : start + size]
        position = -(-(start + size) // 4) * 4
        if name == b"TRAILER!!!\0":
            assert not archive[position:].strip(b"\0")
            return
        yield Entry(name[:-1].decode(), fields[1], data, (fields[9], fields[10])), fields


def test_layout() -> None:
    entries = {entry.name: entry for entry, _ in parse(write_archive(contents(b"agent", MODULES)))}
    assert entries["init"] == Entry("init", stat.S_IFREG | 0o755, b"agent")
    assert entries["modules/order"].data == b"virtio_ring.ko\nvirtio.ko\n"
    assert entries["modules/virtio.ko"].data == b"virtio!"
    assert entries["dev/console"] == Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    for directory in ("dev", "modules", "proc", "run", "sys", "sysroot"):
        assert stat.S_ISDIR(entries[directory].mode)


def test_directories_come_first_and_root_owns_all() -> None:
    seen: set[str] = set()
    inodes = []
    for entry, fields in parse(write_archive(contents(b"agent", MODULES))):
        parent = str(Path(entry.name).parent)
        assert parent == "." or parent in seen
        seen.add(entry.name)
        inodes.append(fields[0])
        assert fields[2:4] == [0, 0]
        assert fields[5] == 0
    assert len(set(inodes)) == len(inodes)


def test_same_bytes_for_same_contents(tmp_path: Path) -> None:
    (tmp_path / "init").write_bytes(b"agent")
    module = tmp_path / "a.ko"
    for name, mode in (("one", 0o600), ("two", 0o644)):
        module.write_bytes(b"module")
        module.chmod(mode)
        build_initramfs(tmp_path / name, tmp_path / "init", [module])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@given(
    st.dictionaries(st.text("abc/", min_size=1, max_size=9), st.binary(max_size=40), max_size=8),
)
def test_any_files_come_back(files: dict[str, bytes]) -> None:
    entries = [Entry(name, stat.S_IFREG | 0o644, data) for name, data in files.items()]
    archive = write_archive(entries)
    assert len(archive) % 512 == 0
    assert {entry.name: entry.data for entry, _ in parse(archive)} == files
