"""The wire: tokens, error shapes, and clients that mean harm."""

import os
import struct

import pytest
from tests.support.envd import frame, running_envd

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="envd starts programs as other users")
START = "process.Process/Start"
STREAM = {"content-type": "application/connect+json", "connect-protocol-version": "1"}


@pytest.fixture
async def envd():
    async with running_envd() as envd:
        yield envd


async def test_health_and_unknown_paths(envd):
    assert (await envd.http.get("/health")).status_code == 204
    response = await envd.http.get("/nothing/here")
    assert (response.status_code, response.json()["code"]) == (404, 404)
    response = await envd.unary("process.Process/NoSuch", {})
    assert response.status_code in (404, 501)
    assert response.json()["code"] == "unimplemented"


async def test_the_token_guards_all_but_what_is_public(envd):
    await envd.http.post("/init", json={"accessToken": "secret", "envVars": {"A": "1"}})
    assert (await envd.http.get("/health")).status_code == 204
    for path in ("/metrics", "/envs"):
        assert (await envd.http.get(path)).status_code == 401
        assert (await envd.http.get(path, headers={"x-access-token": "secret"})).status_code == 200
    for token in ({}, {"x-access-token": "wrong"}, {"x-access-token": ""}):
        assert (await envd.unary("process.Process/List", {}, **token)).status_code == 401
    assert (await envd.unary("process.Process/List", {}, **{"x-access-token": "secret"})).status_code == 200
    files = [
        ({}, 401, "missing signature query parameter"),
        ({"x-access-token": "wrong"}, 401, "access token present in header but does not match"),
    ]
    for headers, status, message in files:
        response = await envd.http.get("/files?path=/etc/hostname", headers=headers)
        assert (response.status_code, response.json()) == (status, {"code": status, "message": message})
    assert (await envd.http.get("/files?path=/etc/hostname&signature=v1_x")).status_code == 501
    await envd.http.post("/init", json={"accessToken": ""})
    assert (await envd.unary("process.Process/List", {})).status_code == 200


async def test_environment_and_defaults(envd):
    settings = {
        "envVars": {"A": "1", "E2B_SANDBOX_ID": "forged"},
        "sandboxId": "iabc",
        "templateId": "base",
        "unknown": [1],
    }
    await envd.http.post("/init", json=settings | {"defaultUser": "root", "defaultWorkdir": "/usr"})
    assert (await envd.http.get("/envs")).json() == {
        "A": "1", "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": "iabc", "E2B_TEMPLATE_ID": "base"
    }  # fmt: skip
    result = await envd.stream(START, {"process": {"cmd": "pwd"}}, user=None)
    assert result[1]["event"]["data"]["stdout"] == "L3Vzcgo="


async def test_control_calls_do_not_exist_for_programs_inside():
    async with running_envd(control=False) as envd:
        for path in ("/init", "/freeze", "/unfreeze"):
            response = await envd.http.post(path, json={"accessToken": "mine", "timeoutMs": 1})
            assert (response.status_code, response.json()["code"]) == (404, 404)
        assert (await envd.http.get("/metrics")).status_code == 200


async def test_control_calls_are_checked(envd):
    assert (await envd.http.post("/unfreeze")).status_code == 204
    response = await envd.http.post("/init", json={"entropy": "AAAA"})
    assert response.status_code == 400
    for body in (b"{", b"5", b'{"timestamp":"yesterday"}', b'{"dnsServers":["x\\ny"]}', b'{"envVars":[1]}'):
        response = await envd.http.post("/init", content=body)
        assert (response.status_code, response.json()["code"]) == (400, 400), body


async def test_liberal_json(envd):
    body = b'{"process": {"pid": "1", "unknown": {"deep": [1]}}, "signal": "SIGNAL_SIGTERM", "more": null}'
    assert (await envd.unary("process.Process/SendSignal", body)).status_code == 404
    response = await envd.unary("filesystem.Filesystem/Stat", {"path": "/"}, **{"content-encoding": "identity"})
    assert response.json()["entry"]["type"] == "FILE_TYPE_DIRECTORY"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"process":',
        b"[]",
        b'{"process": {"cmd": 5}}',
        b'{"process": {"cmd": ""}}',
        b'{"process": {"cmd": "a\\u0000b"}}',
        b'{"process": {"cmd": "true", "args": ["\\u0000"]}}',
        b'{"process": {"cmd": "true", "cwd": "/\\u0000"}}',
        b'{"process": {"cmd": "true", "envs": {"A": "\\u0000"}}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
async def test_start_with_nonsense(envd, body):
    framed = struct.pack(">BI", 0, len(body)) + body
    response = await envd.http.post(f"/{START}", content=framed, headers=STREAM)
    if response.status_code == 200:
        flags, length = struct.unpack_from(">BI", response.content)
        assert (flags, length) == (2, len(response.content) - 5)
    assert b"invalid_argument" in response.content, response.content
    assert (await envd.http.get("/health")).status_code == 204


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        b"\0\0\0\0\x05{}",
        b"\0\xff\xff\xff\xff{}",
        b"\0\x7f\xff\xff\xff" + b"x" * 1000,
        b"\x01\0\0\0\x02{}",
        b"\xfe\0\0\0\x02{}",
        frame({"process": {"cmd": "true"}}) * 2,
    ],
)
@pytest.mark.parametrize("method", [START, "process.Process/StreamInput"])
async def test_bad_frames(envd, method, body):
    before = envd.resident_kib()
    response = await envd.http.post(f"/{method}", content=body, headers=STREAM)
    assert b'"code"' in response.content or response.content == b"\0\0\0\0\2{}\2\0\0\0\2{}", response.content
    assert envd.resident_kib() < before + (16 << 10)
    assert (await envd.http.get("/health")).status_code == 204


@pytest.mark.parametrize(
    "path",
    ["\0", "/tmp/\0x", "/etc/passwd/x", "x" * 5000, "/" + "d/" * 3000, "/proc/self/fd/999", "/dev/full/.."],
)
async def test_paths_that_lead_nowhere(envd, path):
    for method in ("Stat", "ListDir", "MakeDir", "Remove"):
        if method == "MakeDir" and path.startswith("/d/"):
            continue
        response = await envd.unary(f"filesystem.Filesystem/{method}", {"path": path})
        if method != "Remove" or response.status_code != 200:
            assert response.status_code in (400, 403, 404, 409, 500), (method, response.text)
            assert response.json()["code"] in (
                "invalid_argument",
                "not_found",
                "already_exists",
                "permission_denied",
                "internal",
            )


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0\1\2\3\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /init HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"POST /init HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 1000 + b"\r\n",
    ],
)
async def test_broken_http(envd, request_bytes):
    answer = await envd.raw(request_bytes)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    assert (await envd.http.get("/health")).status_code == 204


async def test_browsers_may_ask(envd):
    response = await envd.http.options(
        "/process.Process/List", headers={"origin": "https://x", "access-control-request-method": "POST"}
    )
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "*"
