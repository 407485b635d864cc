"""blockd's API (docs/protocols/blockd.md) as typed calls.

Each call is one request on a connection of its own. A call that is cancelled or times out goes on in blockd;
repeating it is safe.
"""

import asyncio
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from aenv.errors import AenvError, Conflict, CorruptData, NotFound, OperationFailed, SandboxLost, StorageFull

DEFAULT_TIMEOUT_S = 300.0
_MAX_ANSWER = 64 << 20
_ERRORS: dict[str, type[AenvError]] = {
    "not_found": NotFound,
    "conflict": Conflict,
    "corrupt": CorruptData,
    "no_space": StorageFull,
    "terminal": SandboxLost,
}


class MemoryRange(Protocol):
    """Where a part of the guest's memory is in its process. Bytes, multiples of 4096."""

    @property
    def guest_offset(self) -> int: ...
    @property
    def host_address(self) -> int: ...
    @property
    def length(self) -> int: ...


@dataclass(frozen=True)
class Health:
    version: str
    pid: int
    images: int


@dataclass(frozen=True)
class Image:
    """An open image. Sizes in bytes."""

    id: str
    path: Path
    """The exported file."""
    size: int
    kind: Literal["disk", "memory"]
    layers: tuple[Path, ...]
    """Bottom to top."""
    pending: bool
    upper_bytes: int
    """Of the upper's data file, dead data included; 0 without an upper."""
    failed: str | None
    """Why it answers only errors; None while it works."""


@dataclass(frozen=True)
class SealedDisk:
    path: Path
    size_bytes: int
    live_bytes: int
    """Data that the layer's entries refer to; the rest was overwritten before."""
    uuid: str


@dataclass(frozen=True)
class MemoryLayer:
    path: Path
    size_bytes: int
    pages: int
    """Pages of 4096 bytes stored."""
    zero_pages: int
    """Pages stored as zeroed mappings."""
    uuid: str


@dataclass(frozen=True)
class BaseLayer:
    path: Path
    size_bytes: int
    virtual_size: int
    uuid: str


@dataclass(frozen=True)
class LayerFacts:
    virtual_size: int
    extents: int
    data_bytes: int
    uuid: str | None


class BlockdClient:
    """All calls raise OperationFailed when blockd cannot be reached, does not answer in time or refuses the
    request as malformed, and what their docstrings add.
    """

    def __init__(self, socket_path: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._socket_path = socket_path
        self._timeout_s = timeout_s
        self._open = asyncio.Event()
        self._open.set()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """While blockd is replaced: calls that begin meanwhile wait for the end of this, in their own time."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    # images

    async def open_disk(
        self, image_id: str, *, layers: Sequence[Path], upper: Path | None, uid: int, size: int = 0
    ) -> Image:
        """Export a disk for `uid`. `upper` is an existing directory that blockd may write to; `size` 0 inherits.

        Raises: CorruptData, StorageFull; NotFound (a layer); Conflict: the id is open with another request,
        the upper belongs on another layer or has another size. The image is not open then.
        """
        body = {
            "kind": "disk",
            "layers": _texts(layers),
            "size": size,
            "upper": None if upper is None else str(upper),
            "uid": uid,
        }
        return _image(await self._call("PUT", _image_path(image_id), body))

    async def open_memory(self, image_id: str, *, layers: Sequence[Path], uid: int, size: int = 0) -> Image:
        """Export memory, readable by all who know its path, to be mapped privately. Equal layers share cached
        pages.

        Raises: CorruptData; NotFound (a layer); Conflict. The image is not open then.
        """
        body = {"kind": "memory", "layers": _texts(layers), "size": size, "uid": uid}
        return _image(await self._call("PUT", _image_path(image_id), body))

    async def open_pending_memory(self, image_id: str, *, size: int, uid: int) -> Image:
        """Export memory whose reads wait for `complete`. Raises: Conflict."""
        body = {"kind": "memory", "size": size, "uid": uid, "pending": True}
        return _image(await self._call("PUT", _image_path(image_id), body))

    async def complete(self, image_id: str, layers: Sequence[Path]) -> Image:
        """Give pending memory its layers.

        Raises: NotFound, CorruptData (it stays pending), Conflict (it has others).
        """
        return _image(await self._call("POST", _image_path(image_id, "complete"), {"layers": _texts(layers)}))

    async def snapshot(self, image_id: str, layer: Path) -> SealedDisk:
        """Seal the disk's upper as `layer` and go on above it. Not durable before `sync_layers` or a flush.

        Raises: SandboxLost: the disk cannot go on. Anything else (StorageFull, Conflict when `layer` exists,
        NotFound …): it goes on as it was.
        """
        answer = await self._call("POST", _image_path(image_id, "snapshot"), {"layer": str(layer)})
        return SealedDisk(Path(answer["path"]), answer["size_bytes"], answer["live_bytes"], answer["uuid"])

    async def flush(self, image_id: str) -> None:
        """Everything written so far, layers included, is on stable storage.

        Raises: NotFound; SandboxLost and OperationFailed are final.
        """
        await self._call("POST", _image_path(image_id, "flush"))

    async def image(self, image_id: str) -> Image:
        """Raises: NotFound."""
        return _image(await self._call("GET", _image_path(image_id)))

    async def images(self) -> list[Image]:
        """In order of their ids."""
        return [_image(answer) for answer in await self._call("GET", "/images")]

    async def close(self, image_id: str, *, discard: bool = False) -> None:
        """Flush and close; with `discard` remove the upper's files instead.

        An unknown id is fine. It is closed even when this raises.
        """
        try:
            await self._call("DELETE", _image_path(image_id) + ("?discard=1" if discard else ""))
        except NotFound:
            return

    # layers

    async def capture_memory(
        self, layer: Path, *, size: int, ranges: Sequence[MemoryRange], mem_fd: int, pagemap_fd: int
    ) -> MemoryLayer:
        """Write the private pages of a stopped process as a layer. The descriptors, of its /proc/PID/mem and
        pagemap, stay the caller's.

        Raises: StorageFull, Conflict when `layer` exists. No file is left then.
        """
        body = {
            "layer": str(layer),
            "size": size,
            "ranges": [
                {"guest_offset": part.guest_offset, "host_address": part.host_address, "length": part.length}
                for part in ranges
            ],
        }
        return _memory_layer(await self._call("POST", "/memory/capture", body, fds=(mem_fd, pagemap_fd)))

    async def import_memory(self, diff: Path, layer: Path, *, size: int) -> MemoryLayer:
        """Write the data extents of a sparse file, which this process can read, as a layer.

        Raises: as `capture_memory`; NotFound (`diff`).
        """
        with _opened(diff) as descriptor:
            return _memory_layer(
                await self._call("POST", "/memory/import", {"layer": str(layer), "size": size}, fds=(descriptor,))
            )

    async def import_raw(self, raw: Path, layer: Path) -> BaseLayer:
        """Write a raw disk image, which this process can read, as a base layer. Raises: as `import_memory`."""
        with _opened(raw) as descriptor:
            answer = await self._call("POST", "/layers/import", {"layer": str(layer)}, fds=(descriptor,))
        return BaseLayer(Path(answer["path"]), answer["size_bytes"], answer["virtual_size"], answer["uuid"])

    async def sync_layers(self, layers: Sequence[Path]) -> None:
        """The layers and their names are on stable storage. Raises: NotFound, CorruptData."""
        await self._call("POST", "/layers/sync", {"layers": _texts(layers)})

    async def verify_layer(self, layer: Path) -> LayerFacts:
        """Raises: NotFound; CorruptData, saying what is wrong."""
        answer = await self._call("POST", "/layers/verify", {"layer": str(layer)})
        return LayerFacts(answer["virtual_size"], answer["extents"], answer["data_bytes"], answer["uuid"])

    # process

    async def health(self) -> Health:
        answer = await self._call("GET", "/health")
        return Health(answer["version"], answer["pid"], answer["images"])

    async def metrics(self) -> str:
        """Prometheus text."""
        return (await self._exchange("GET", "/metrics", None, ())).decode()

    async def shutdown(self) -> None:
        """Ask blockd to flush, unmount and end; it answers before it does."""
        await self._call("POST", "/shutdown")

    async def _call(self, method: str, target: str, body: object = None, *, fds: Sequence[int] = ()) -> Any:
        answer = await self._exchange(method, target, body, fds)
        return json.loads(answer) if answer else None

    async def _exchange(self, method: str, target: str, body: object, fds: Sequence[int]) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        head = (
            f"{method} {target} HTTP/1.1\r\nHost: blockd\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._open.wait()
                status, answer = await self._send(head.encode() + content, fds)
        except TimeoutError as error:
            raise OperationFailed(f"blockd did not answer {method} {target} in {self._timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            raise OperationFailed(f"no answer from blockd on {self._socket_path}", hint="is it running?") from error
        if status >= 400:
            raise _error(answer)
        return answer

    async def _send(self, request: bytes, fds: Sequence[int]) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, str(self._socket_path))
            if fds:
                # The buffer of a new socket takes at least the first byte, and the descriptors go with that.
                sent = socket.send_fds(connection, [request[:1]], list(fds))
                request = request[sent:]
            await loop.sock_sendall(connection, request)
            answer = bytearray()
            while part := await loop.sock_recv(connection, 1 << 16):
                answer += part
                if len(answer) > _MAX_ANSWER:
                    raise ValueError("answer too long")
        return _parse_answer(bytes(answer))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor to pass on: blockd, unprivileged, may not be able to open the file itself."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        raise OperationFailed(f"open {path}: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _parse_answer(answer: bytes) -> tuple[int, bytes]:
    """Status and body of a whole HTTP answer that ended with its connection. Raises: ValueError."""
    head, separator, content = answer.partition(b"\r\n\r\n")
    status_line, *fields = head.decode("latin-1").split("\r\n")
    version, _, status = status_line.partition(" ")
    if not separator or not version.startswith("HTTP/1."):
        raise ValueError("not an HTTP answer")
    for name, _, value in (field.partition(":") for field in fields):
        if name.lower() == "content-length" and int(value) != len(content):
            raise ValueError("the answer was cut off")
    return int(status[:3]), content


def _error(answer: bytes) -> AenvError:
    try:
        fields = json.loads(answer)
        code, message, hint = fields["code"], fields["message"], fields["hint"]
    except (ValueError, KeyError, TypeError):
        return OperationFailed(f"blockd refused the request: {answer[:200]!r}")
    return _ERRORS.get(code, OperationFailed)(message, hint=hint)


def _image_path(image_id: str, *more: str) -> str:
    return "/".join(["/images", quote(image_id, safe=""), *more])


def _texts(paths: Sequence[Path]) -> list[str]:
    return [str(path) for path in paths]


def _image(answer: dict[str, Any]) -> Image:
    fields = dict(answer)
    fields["path"] = Path(answer["path"])
    fields["layers"] = tuple(Path(layer) for layer in answer["layers"])
    return Image(**fields)


def _memory_layer(answer: dict[str, Any]) -> MemoryLayer:
    return MemoryLayer(
        Path(answer["path"]), answer["size_bytes"], answer["pages"], answer["zero_pages"], answer["uuid"]
    )
