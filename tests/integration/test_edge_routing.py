"""Who answers a request through edge, what it carries, and what is said when nobody does."""

import asyncio
import json
import socket
from contextlib import closing

import pytest
from tests.support.edge import Server, raw_to, running_edge, to

DOMAIN = "sbx.test"


@pytest.fixture
async def edge():
    async with running_edge("--domain", f"{DOMAIN}:8443") as edge:
        yield edge


@pytest.fixture
async def sandbox(edge):
    """Sandbox `iaaa` at 127.1.0.1, with a server on the port it says."""
    server = await Server("iaaa").listen("127.1.0.1")
    await edge.route("iaaa", "127.1.0.1")
    yield server
    await server.close()


@pytest.fixture
async def control(edge):
    server = await Server("control").listen_unix(edge.control_socket)
    yield server
    await server.close()


def closed_port(address: str) -> int:
    with closing(socket.socket()) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


async def test_who_answers(edge, sandbox, control):
    other = await Server("ibbb").listen("127.1.0.2", sandbox.port)
    await edge.route("ibbb", "127.1.0.2")

    async def server(host: str = "h", **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return (await edge.client.get("/x", headers={"host": host, **named})).json()["server"]

    port = str(sandbox.port)
    ours = {"e2b_sandbox_id": "iaaa", "e2b_sandbox_port": port}
    native = {"x_agentenv_sandbox_id": "ibbb", "x_agentenv_target_port": port}
    assert await server() == "control"
    assert await server(f"{port}-iaaa.{DOMAIN}") == "iaaa"
    assert await server(f"{port}-IAAA.{DOMAIN.upper()}.:8443") == "iaaa"
    assert await server(f"api.{DOMAIN}") == "control"
    assert await server(f"{port}-iaaa.other.test") == "control"
    assert await server(**ours) == "iaaa"
    assert await server(**native) == "ibbb"
    assert await server(**ours, **native) == "ibbb", "native names win"
    assert await server(f"{port}-iaaa.{DOMAIN}", **native) == "iaaa", "the host wins"
    await other.close()


@pytest.mark.parametrize(
    "headers",
    [
        [("E2b-Sandbox-Id", "iaaa")],
        [("E2b-Sandbox-Port", "80")],
        [("E2b-Sandbox-Id", "../etc"), ("E2b-Sandbox-Port", "80")],
        [("E2b-Sandbox-Id", "iaaa"), ("E2b-Sandbox-Port", "0")],
        [("E2b-Sandbox-Id", "iaaa"), ("E2b-Sandbox-Port", "65536")],
        [("E2b-Sandbox-Id", "iaaa"), ("E2b-Sandbox-Port", "http")],
        [("E2b-Sandbox-Id", "iaaa"), ("E2b-Sandbox-Id", "iaaa"), ("E2b-Sandbox-Port", "80")],
        [("Host", f"0-iaaa.{DOMAIN}")],
        [("Host", f"99999-iaaa.{DOMAIN}")],
        [("Host", f"80-i.aaa-.{DOMAIN}"), ("X-Agentenv-Sandbox-Id", "iaaa")],
    ],
)
async def test_malformed_routing_is_refused(edge, sandbox, control, headers):
    response = await edge.client.get("/", headers=headers)
    assert response.status_code == 400
    assert response.json()["code"] == 400
    assert isinstance(response.json()["message"], str)
    assert not sandbox.requests
    assert not control.requests


async def test_unknown_and_paused_are_not_found(edge, sandbox):
    expected = b'{"sandboxId":"%s","message":"The sandbox was not found","code":502}'
    for sandbox_id in ("inone", "iaaa"):
        if sandbox_id == "iaaa":
            await edge.route("iaaa", None, generation=2, state="paused")
        response = await edge.client.get("/health", headers=to(sandbox_id, 49983))
        assert (response.status_code, response.content) == (502, expected % sandbox_id.encode())
        assert response.headers["content-type"] == "application/json"


async def test_a_closed_port_says_so_at_once(edge, sandbox):
    port = closed_port("127.1.0.1")
    response = await asyncio.wait_for(edge.client.post("/", headers=to("iaaa", port), content=b"x" * 1000), 1)
    assert response.status_code == 502
    assert response.content == (
        b'{"sandboxId":"iaaa","message":"The sandbox is running but port is not open","port":%d,"code":502}' % port
    )


async def test_access_token_guards_envd_only(edge, sandbox):
    await edge.route("iaaa", "127.1.0.1", generation=2, envd_port=sandbox.port, access_token="s3cret")
    headers = to("iaaa", sandbox.port)

    async def status(method: str, path: str, token: str | None = None) -> int:
        given = {} if token is None else {"X-Access-Token": token}
        return (await edge.client.request(method, path, headers=headers | given)).status_code

    assert await status("GET", "/metrics") == 401
    assert await status("POST", "/process.Process/Start", "wrong") == 401
    assert await status("GET", "/metrics", "s3cret") == 200
    assert sandbox.requests[-1].header("x-access-token") == "s3cret"
    assert await status("GET", "/health") == 200
    assert await status("GET", "/files?path=/x&signature=v1_abc") == 200
    assert await status("POST", "/files?path=/x&signature=v1_abc") == 200
    assert await status("POST", "/health") == 401
    refused = await edge.client.get("/envs", headers=headers)
    assert refused.json() == {"code": 401, "message": refused.json()["message"]}


@pytest.mark.parametrize(
    "path", ["/init", "/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse", "/%69nit", "//init/"]
)
async def test_control_calls_never_pass(edge, sandbox, path):
    await edge.route("iaaa", "127.1.0.1", generation=2, envd_port=sandbox.port, access_token="s3cret")
    head = f"POST {path} HTTP/1.1\r\nX-Access-Token: s3cret\r\nContent-Length: 2\r\n".encode()
    answer = await edge.exchange(head + raw_to("iaaa", sandbox.port) + b"\r\n{}")
    assert answer.status == 404
    assert json.loads(answer.body)["code"] == 404
    assert not sandbox.requests


async def test_traffic_token_guards_the_other_ports(edge, sandbox):
    await edge.route("iaaa", "127.1.0.1", generation=2, traffic_token="t0ken")
    headers = to("iaaa", sandbox.port)
    for given in ({}, {"e2b-traffic-access-token": "wrong"}, {"X-Access-Token": "t0ken"}):
        response = await edge.client.get("/", headers=headers | given)
        assert response.status_code == 403
        assert response.json()["code"] == 403
    assert not sandbox.requests
    assert (await edge.client.get("/", headers=headers | {"E2B-Traffic-Access-Token": "t0ken"})).status_code == 200
    assert sandbox.requests[-1].header("e2b-traffic-access-token") is None


async def test_what_a_sandbox_gets(edge, sandbox):
    headers = to("iaaa", sandbox.port) | {
        "Host": "h.example:81",
        "X-API-KEY": "k",
        "X-Access-Token": "a",
        "Connection": "close, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "timeout=5",
        "Authorization": "Basic dXNlcjo=",
        "X-Forwarded-For": "203.0.113.9",
    }
    response = await edge.client.put("/a/%2e%2e/b?c=%20d", headers=headers, content=b"body")
    told = response.json()
    assert told["target"] == "/a/%2e%2e/b?c=%20d"
    assert told["body"] == "body"
    got = dict(told["headers"])
    assert len(got) == len(told["headers"])
    assert got["host"] == "h.example:81"
    assert got["x-forwarded-host"] == "h.example:81"
    assert got["x-forwarded-proto"] == "http"
    assert got["x-forwarded-for"] == "203.0.113.9, 127.0.0.1"
    assert got["authorization"] == "Basic dXNlcjo="
    assert got["content-length"] == "4"
    hidden = {"x-api-key", "x-access-token", "connection", "x-hop", "keep-alive", "e2b-sandbox-id", "e2b-sandbox-port"}
    assert not hidden & got.keys()


async def test_what_the_control_plane_gets(edge, control):
    headers = {"X-API-KEY": "k", "Connection": "keep-alive"}
    response = await edge.client.post("/v2/sandboxes?x=1", headers=headers, json={"templateID": "base"})
    told = response.json()
    assert (told["method"], told["target"], told["body"]) == ("POST", "/v2/sandboxes?x=1", '{"templateID":"base"}')
    got = dict(told["headers"])
    assert got["x-api-key"] == "k"
    assert got["x-forwarded-for"] == "127.0.0.1"
    assert "connection" not in got


async def test_control_plane_not_answering(edge):
    for _ in range(2):
        response = await edge.client.post("/v2/sandboxes", json={})
        assert response.status_code == 503
        assert response.json()["code"] == 503
        assert (response.headers["retry-after"], response.headers["should-retry"]) == ("1", "true")
    control = await Server("control").listen_unix(edge.control_socket)
    assert (await edge.client.get("/")).json()["server"] == "control"
    await control.close()


async def test_control_plane_dying_in_the_middle(edge, control):
    async def hang_up(exchange):
        exchange.writer.close()

    control.handler = hang_up
    response = await edge.client.post("/v2/sandboxes", json={})
    assert (response.status_code, response.headers["should-retry"]) == (503, "false"), "it may have been done"
    response = await edge.client.get("/v2/sandboxes")
    assert (response.status_code, response.headers["should-retry"]) == (503, "true")


async def test_generations(edge):
    ports = {}
    servers = [await Server(address).listen(address) for address in ("127.1.0.1", "127.1.0.2")]
    ports = {server.name: server.port for server in servers}

    async def served_by(sandbox_id: str) -> str | None:
        for name, port in ports.items():
            response = await edge.client.get("/", headers=to(sandbox_id, port))
            if response.status_code == 200:
                assert response.json()["server"] == name
                return name
        return None

    first, second = ports
    assert (await edge.route("iaaa", first, generation=3)).status_code == 204
    assert await served_by("iaaa") == first
    late = await edge.route("iaaa", second, generation=2)
    assert (late.status_code, late.json()["code"]) == (409, 409)
    assert (await edge.unroute("iaaa", 2)).status_code == 409
    assert await served_by("iaaa") == first
    assert (await edge.route("iaaa", second, generation=4)).status_code == 204
    assert await served_by("iaaa") == second
    assert (await edge.unroute("iaaa", 4)).status_code == 204
    assert (await edge.unroute("iaaa", 4)).status_code == 204
    assert await served_by("iaaa") is None
    assert (await edge.route("iaaa", first, generation=3)).status_code == 409, "late, also after the deletion"
    assert (await edge.route("iaaa", first, generation=5)).status_code == 204
    assert (await edge.unroute("iunknown", 1)).status_code == 204
    for server in servers:
        await server.close()


async def test_the_whole_table(edge, sandbox):
    headers = to("iaaa", sandbox.port)
    await edge.client.get("/", headers=headers)
    table = (await edge.admin.get("/routes")).json()
    assert table["routes"]["iaaa"]["address"] == "127.1.0.1"
    other = table["routes"]["iaaa"] | {"generation": 9, "access_token": "s3cret"}
    assert (await edge.admin.put("/routes", json={"routes": {**table["routes"], "ibbb": other}})).status_code == 204
    await edge.client.get("/", headers=headers)
    assert sandbox.connections == 1, "an equal route keeps its connections"
    assert (await edge.admin.put("/routes", json={"routes": {"ibbb": other}})).status_code == 204
    assert (await edge.client.get("/", headers=headers)).status_code == 502
    assert await edge.metric("routes") == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/routes/iaaa", b"{", 400),
        ("PUT", "/routes/iaaa", b'{"generation": -1}', 400),
        ("PUT", "/routes/iaaa", b'{"generation": 1, "state": "running", "address": "somewhere", "envd_port": 1}', 400),
        ("PUT", "/routes/iaaa", b'{"generation": 1, "state": "running", "address": null, "envd_port": 1}', 400),
        ("PUT", "/routes/iaaa", b'{"generation": 1, "state": "asleep", "address": "127.0.0.1", "envd_port": 1}', 400),
        ("PUT", "/routes/iaaa", b'{"generation": 1, "state": "paused", "address": null, "envd_port": 0}', 400),
        ("PUT", "/routes/i-a", b'{"generation": 1, "state": "paused", "address": null, "envd_port": 1}', 400),
        ("PUT", "/routes", b'{"routes": []}', 400),
        ("DELETE", "/routes/iaaa", b"", 400),
        ("DELETE", "/routes/iaaa?generation=x", b"", 400),
        ("GET", "/routes/iaaa", b"", 404),
        ("POST", "/nothing", b"", 404),
    ],
)
async def test_admin_requests_that_make_no_sense(edge, method, path, body, status):
    response = await edge.admin.request(method, path, content=body)
    assert response.status_code == status
    assert response.json()["code"] == status


async def test_health(edge):
    health = (await edge.admin.get("/health")).json()
    assert health == {"version": health["version"], "pid": edge.process.pid, "listen": edge.listen}


async def test_nothing_secret_is_logged(edge, sandbox):
    port = closed_port("127.1.0.1")
    secrets = {"X-API-KEY": "k3y", "X-Access-Token": "t0ken", "e2b-traffic-access-token": "tr4ffic"}
    await edge.client.get("/?signature=s1gned", headers=secrets)
    await edge.client.get("/?signature=s1gned", headers=secrets | to("iaaa", port))
    await edge.route("iaaa", "127.1.0.1", generation=0, access_token="t0ken")
    assert len(edge.log.splitlines()) == 2, "one line per failure"
    assert not [secret for secret in ("k3y", "t0ken", "tr4ffic", "s1gned") if secret in edge.log]
