"""The routes over a fake node: statuses, bodies and what reaches the node."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from aenv import errors
from aenv.api.app import create_app
from aenv.api.errors import TABLE
from aenv.network.policy import NetworkPolicy
from aenv.node.views import OnTimeout
from aenv.settings import Settings
from aenv.testing.clock import FakeClock, settle
from aenv.testing.fake_node import FakeNode

KEY = "k" * 40
UNKNOWN = "i" + "0" * 19


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def node(clock: FakeClock) -> FakeNode:
    return FakeNode(clock)


@pytest.fixture
def app(node: FakeNode, clock: FakeClock, tmp_path: Path) -> FastAPI:
    return create_app(node, settings=Settings(home=tmp_path, domain="sbx.test"), api_key=KEY, clock=clock)


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://aenv", headers={"X-API-Key": KEY}) as client:
        yield client
    await app.state.context.tasks.close()


async def make(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v2/sandboxes", json={"templateID": "base", **fields})
    assert response.status_code == 201, response.text
    body: dict[str, Any] = response.json()
    return body


def assert_error(response: httpx.Response, status: int, *words: str) -> None:
    body = response.json()
    assert (response.status_code, body["code"]) == (status, status), response.text
    assert body["message"]
    assert all(word in body["message"] for word in words), body["message"]


class TestAuthentication:
    @pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes", "/nowhere", "/openapi.json", "/snapshots"])
    @pytest.mark.parametrize(
        "headers",
        [
            [],
            [("X-API-Key", "")],
            [("X-API-Key", "wrong" * 8)],
            [("X-API-Key", KEY + "x")],
            [("X-API-Key", KEY), ("X-API-Key", KEY)],
            [("Authorization", f"Bearer {KEY}")],
            [("X-API-Key", b"\xff" * 40)],
        ],
    )
    async def test_without_the_key_nothing_is_told(self, app: FastAPI, path: str, headers: Any) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aenv") as stranger:
            assert_error(await stranger.get(path, headers=headers), 401, "API key")

    async def test_the_header_has_no_case(self, app: FastAPI) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aenv") as someone:
            assert (await someone.get("/sandboxes", headers={"x-api-KEY": KEY})).status_code == 200

    async def test_health_and_metrics_need_none(self, app: FastAPI) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://aenv") as stranger:
            health = await stranger.get("/health")
            assert (health.status_code, health.content) == (204, b"")
            metrics = await stranger.get("/metrics")
            assert metrics.headers["content-type"].startswith("text/plain")
            assert 'aenv_sandboxes{state="running"} 0.0' in metrics.text


class TestCreate:
    async def test_the_answer(self, client: httpx.AsyncClient) -> None:
        body = await make(client)
        assert body == {
            "templateID": body["templateID"],
            "sandboxID": body["sandboxID"],
            "clientID": "",
            "envdVersion": "0.6.13",
            "alias": "base",
            "envdAccessToken": f"envd-{body['sandboxID']}",
            "domain": "sbx.test",
        }

    async def test_what_is_left_out_takes_the_settings(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        await make(client, metadata=None, envVars=None, network=None, autoResume=None, timeout=None)
        (request,) = node.requests
        assert (request.timeout_s, request.on_timeout) == (300, OnTimeout.PAUSE)
        assert (request.metadata, request.env, request.secure, request.public_traffic) == ({}, {}, True, True)
        assert request.policy == NetworkPolicy()

    async def test_everything_reaches_the_node(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        body = await make(
            client,
            timeout=60,
            autoPause=False,
            metadata={"run": "7"},
            envVars={"A": "b=c"},
            allow_internet_access=False,
            network={"allowOut": ["1.1.1.1", "10.9.8.7/8"], "denyOut": ["0.0.0.0/0"], "allowPublicTraffic": False},
        )
        (request,) = node.requests
        assert (request.timeout_s, request.on_timeout) == (60, OnTimeout.KILL)
        assert (request.metadata, request.env, request.public_traffic) == ({"run": "7"}, {"A": "b=c"}, False)
        assert request.policy == NetworkPolicy(False, ("1.1.1.1/32", "10.0.0.0/8"), ("0.0.0.0/0",))
        assert body["trafficAccessToken"] == f"traffic-{body['sandboxID']}"

    @pytest.mark.parametrize(("secure", "token"), [(False, False), (True, True), (None, True)])
    async def test_only_the_old_route_may_leave_out_the_token(
        self, client: httpx.AsyncClient, secure: bool | None, token: bool
    ) -> None:
        old = await client.post("/sandboxes", json={"templateID": "base", "secure": secure})
        assert ("envdAccessToken" in old.json()) == token
        assert "envdAccessToken" in await make(client, secure=secure)

    @pytest.mark.parametrize("template", ["base", "base:default", "team/base", "team/base:latest"])
    async def test_names_of_a_template(self, client: httpx.AsyncClient, template: str) -> None:
        await make(client, templateID=template)

    @pytest.mark.parametrize("template", ["nothing", "base:v2", "team/", ":default"])
    async def test_an_unknown_template(self, client: httpx.AsyncClient, template: str) -> None:
        response = await client.post("/v2/sandboxes", json={"templateID": template})
        assert_error(response, 404, "template")

    @pytest.mark.parametrize(
        "fields",
        [
            {"autoPauseMemory": False},
            {"autoResume": {"enabled": True}},
            {"mcp": {"browser": {}}},
            {"iam": {"tokens": {"t": {}}}},
            {"volumeMounts": [{"name": "v", "path": "/v"}]},
            {"network": {"dnsServers": ["1.1.1.1"]}},
            {"network": {"egressProxy": {"address": "p:1"}}},
            {"network": {"maskRequestHost": "x"}},
            {"network": {"httpsPorts": [443]}},
            {"network": {"rules": {"example.org": []}}},
            {"network": {"allowOut": ["example.org"]}},
            {"network": {"denyOut": ["*.example.org"]}},
            {"network": {"allowOut": ["fe80::/10"]}},
        ],
    )
    async def test_what_is_not_supported_is_refused(self, client: httpx.AsyncClient, fields: Any) -> None:
        response = await client.post("/v2/sandboxes", json={"templateID": "base", **fields})
        assert_error(response, 400, "not supported yet")

    @pytest.mark.parametrize(
        "fields",
        [
            {"autoPauseMemory": True, "autoResume": {"enabled": False}, "mcp": None, "volumeMounts": []},
            {"autoResume": {}, "iam": {}, "network": {"rules": {}, "dnsServers": [], "maskRequestHost": ""}},
            {"unknown": {"deep": [1]}},
        ],
    )
    async def test_asking_for_nothing_is_fine(self, client: httpx.AsyncClient, fields: Any) -> None:
        await make(client, **fields)

    async def test_a_repeat_with_the_same_key_gets_the_same_sandbox(
        self, client: httpx.AsyncClient, node: FakeNode, clock: FakeClock
    ) -> None:
        async def create(key: str, **fields: Any) -> httpx.Response:
            headers = {"Idempotency-Key": key}
            return await client.post("/v2/sandboxes", json={"templateID": "base", **fields}, headers=headers)

        node.hold["create"] = asyncio.Event()
        together = [asyncio.create_task(create("a")) for _ in range(3)]
        await settle()
        node.hold["create"].set()
        ids = {(await answer).json()["sandboxID"] for answer in together}
        assert len(ids) == 1
        assert (await create("a")).json()["sandboxID"] in ids
        assert node.calls == ["create"]
        assert_error(await create("a", timeout=9), 409, "Idempotency-Key")
        assert (await create("b")).json()["sandboxID"] not in ids
        assert_error(await create(""), 400, "idempotency-key")
        assert_error(await create("x" * 256), 400, "idempotency-key")
        await clock.advance(3601)
        assert (await create("a")).json()["sandboxID"] not in ids

    async def test_a_create_that_failed_can_be_repeated(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        node.fail["create"] = errors.NoCapacity("full")
        body, headers = {"templateID": "base"}, {"Idempotency-Key": "a"}
        with capture_logs() as logs:
            assert (await client.post("/v2/sandboxes", json=body, headers=headers)).status_code == 503
            assert (await client.post("/v2/sandboxes", json=body, headers=headers)).status_code == 201
        assert not [line for line in logs if line["log_level"] == "error"]


class TestLife:
    async def test_connect(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        path = f"/sandboxes/{(await make(client, timeout=100))['sandboxID']}"

        async def left_s() -> float:
            end_at = (await client.get(path)).json()["endAt"]
            return (datetime.fromisoformat(end_at) - clock.now()).total_seconds()

        assert (await client.post(f"{path}/connect", json={"timeout": 50})).status_code == 200
        assert await left_s() == 100
        assert (await client.post(f"/v2{path}/connect", json={"timeout": 200})).status_code == 200
        assert await left_s() == 200
        assert (await client.post(f"/v2{path}/connect")).status_code == 200
        assert (await client.post(f"{path}/pause")).status_code == 204
        resumed = await client.post(f"/v2{path}/connect", json={})
        assert (resumed.status_code, resumed.json()["sandboxID"]) == (201, path.rpartition("/")[2])
        assert await left_s() == 100
        assert_error(await client.post(f"{path}/connect"), 400, "body")
        assert_error(await client.post(f"{path}/connect", json={}), 400, "timeout")

    async def test_pause(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        path = f"/sandboxes/{(await make(client))['sandboxID']}"
        response = await client.post(f"{path}/pause", json={"memory": True, "requireHealthyGuest": True})
        assert (response.status_code, response.content) == (204, b"")
        assert node.calls[-1] == "pause with healthy guest"
        assert (await client.get(path)).json()["state"] == "paused"
        assert_error(await client.post(f"{path}/pause", json={}), 409)
        assert_error(await client.post(f"{path}/pause", json={"memory": False}), 400, "not supported yet")
        assert_error(await client.post(f"{path}/timeout", json={"timeout": 1}), 409)
        assert_error(await client.post(f"{path}/fork"), 409)
        assert_error(await client.post(f"{path}/snapshots"), 409)

    async def test_resume(self, client: httpx.AsyncClient) -> None:
        path = f"/sandboxes/{(await make(client))['sandboxID']}"
        assert_error(await client.post(f"{path}/resume", json={}), 409, "running")
        await client.post(f"{path}/pause")
        assert_error(await client.post(f"{path}/resume", json={"autoPause": False}), 400, "not supported yet")
        assert (await client.post(f"{path}/resume", json={"timeout": 5, "autoPause": True})).status_code == 201

    async def test_timeout(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        path = f"/sandboxes/{(await make(client, autoPause=False))['sandboxID']}"
        assert (await client.post(f"{path}/timeout", json={"timeout": 10})).status_code == 204
        detail = (await client.get(path)).json()
        assert datetime.fromisoformat(detail["endAt"]) == clock.now() + timedelta(seconds=10)
        assert (await client.post(f"{path}/timeout", json={"timeout": 0})).status_code == 204
        assert_error(await client.get(path), 404)

    async def test_kill(self, client: httpx.AsyncClient) -> None:
        path = f"/sandboxes/{(await make(client))['sandboxID']}-0a1b2c3d"
        assert (await client.get(path)).status_code == 200
        response = await client.delete(path)
        assert (response.status_code, response.content) == (204, b"")
        assert_error(await client.delete(path), 404)
        assert_error(await client.get(path), 404)

    async def test_detail(self, client: httpx.AsyncClient) -> None:
        made = await make(client, metadata={"a": "ä"}, network={"denyOut": ["9.9.9.9"]}, autoPause=False)
        body = (await client.get(f"/sandboxes/{made['sandboxID']}")).json()
        assert body == {
            "templateID": made["templateID"],
            "sandboxID": made["sandboxID"],
            "clientID": "",
            "alias": "base",
            "startedAt": "2026-01-01T00:00:00Z",
            "endAt": "2026-01-01T00:05:00Z",
            "cpuCount": 2,
            "memoryMB": 1024,
            "diskSizeMB": 8192,
            "metadata": {"a": "ä"},
            "state": "running",
            "envdVersion": "0.6.13",
            "envdAccessToken": made["envdAccessToken"],
            "allowInternetAccess": True,
            "domain": "sbx.test",
            "network": {"allowOut": [], "denyOut": ["9.9.9.9/32"], "allowPublicTraffic": True},
            "lifecycle": {"onTimeout": "kill", "autoResume": False},
        }

    async def test_fork(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        path = f"/sandboxes/{(await make(client, metadata={'a': 'b'}))['sandboxID']}"
        node.fork_errors = {1: errors.NoCapacity("no memory left")}
        response = await client.post(f"{path}/fork", json={"count": 3, "timeout": 7})
        assert response.status_code == 201
        first, second, third = response.json()
        assert second == {"error": {"code": 503, "message": "no memory left"}}
        assert first["sandbox"]["sandboxID"] != third["sandbox"]["sandboxID"]
        assert node.requests[-1].timeout_s == 7
        assert len((await client.post(f"{path}/fork")).json()) == 1
        for count in (0, 101, -1, "2", 1.5, True):
            assert_error(await client.post(f"{path}/fork", json={"count": count}), 400, "count")

    @pytest.mark.parametrize(
        ("method", "action", "body"),
        [
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/connect", {"timeout": 1}),
            ("POST", "/resume", {}),
            ("POST", "/pause", {}),
            ("POST", "/timeout", {"timeout": 1}),
            ("POST", "/fork", {}),
            ("POST", "/snapshots", {}),
        ],
    )
    @pytest.mark.parametrize("name", [UNKNOWN, "x", "I" * 20, "%00", "%F0%9F%A6%80", "i" * 500, f"-{UNKNOWN}"])
    async def test_unknown_sandboxes(
        self, client: httpx.AsyncClient, name: str, method: str, action: str, body: Any
    ) -> None:
        assert_error(await client.request(method, f"/sandboxes/{name}{action}", json=body), 404, "sandbox")

    @pytest.mark.parametrize(
        ("method", "path"),
        [("PUT", "network"), ("GET", "metrics"), ("GET", "logs"), ("POST", "refreshes")],
    )
    async def test_routes_to_come_are_refused_by_name(self, client: httpx.AsyncClient, method: str, path: str) -> None:
        assert_error(await client.request(method, f"/sandboxes/{UNKNOWN}/{path}"), 400, "not supported yet")
        assert_error(await client.get("/sandboxes/metrics"), 400, "not supported yet")


class TestLists:
    async def make_some(self, client: httpx.AsyncClient, clock: FakeClock) -> list[str]:
        """Five, oldest first; the second and fourth paused."""
        ids = []
        for number in range(5):
            await clock.advance(1)
            metadata = {"n": str(number), "odd": str(number % 2), "a b": "c=d&e"}
            ids.append((await make(client, metadata=metadata))["sandboxID"])
        for paused in (ids[1], ids[3]):
            await client.post(f"/sandboxes/{paused}/pause")
        return ids

    async def ids(self, client: httpx.AsyncClient, query: str = "", path: str = "/v2/sandboxes") -> list[str]:
        response = await client.get(f"{path}?{query}")
        assert response.status_code == 200, response.text
        return [item["sandboxID"] for item in response.json()]

    async def test_order_states_and_filters(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        a, b, c, d, e = await self.make_some(client, clock)
        assert await self.ids(client) == [e, d, c, b, a]
        assert await self.ids(client, "order=asc") == [a, b, c, d, e]
        assert await self.ids(client, "state=paused") == [d, b]
        assert await self.ids(client, "state=running%2Cpaused") == [e, d, c, b, a]
        assert await self.ids(client, path="/sandboxes") == [e, c, a]
        assert await self.ids(client, "template=base&state=paused") == [d, b]
        assert await self.ids(client, "template=other") == []
        since = quote((await client.get(f"/sandboxes/{d}")).json()["startedAt"])
        assert await self.ids(client, f"startedAfter={since}") == [e, d]
        assert await self.ids(client, "startedAfter=2026-01-01T01:00:04%2B01:00") == [e, d]

    async def test_metadata_is_decoded_thrice(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        ids = await self.make_some(client, clock)

        def query(**pairs: str) -> str:
            quoted = urlencode({quote(key): quote(value) for key, value in pairs.items()})
            return urlencode({"metadata": quoted})

        assert await self.ids(client, query(n="2")) == [ids[2]]
        assert await self.ids(client, query(**{"a b": "c=d&e", "odd": "1"})) == [ids[3], ids[1]]
        assert await self.ids(client, query(odd="1"), "/sandboxes") == []
        assert await self.ids(client, query(odd="1", n="2")) == []

    async def test_pages(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        ids = await self.make_some(client, clock)
        for order, expected in (("desc", ids[::-1]), ("asc", ids)):
            found, token = [], ""
            while True:
                response = await client.get(f"/v2/sandboxes?limit=2&order={order}&nextToken={quote(token)}")
                found.append([item["sandboxID"] for item in response.json()])
                if not (token := response.headers.get("x-next-token", "")):
                    break
            assert found == [expected[:2], expected[2:4], expected[4:]]

    async def test_a_page_is_not_shifted_by_what_goes(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        ids = await self.make_some(client, clock)
        token = (await client.get("/v2/sandboxes?limit=2")).headers["x-next-token"]
        await client.delete(f"/sandboxes/{ids[3]}")
        await client.delete(f"/sandboxes/{ids[4]}")
        assert await self.ids(client, f"limit=2&nextToken={quote(token)}") == [ids[2], ids[1]]

    @pytest.mark.parametrize(
        "query",
        [
            "limit=0",
            "limit=101",
            "limit=x",
            "limit=" + "9" * 5000,
            "nextToken=x",
            "nextToken=%FF",
            "nextToken=bm90IGEgdG9rZW4=",
            "nextToken=fA==",
            "nextToken=" + "A" * 2000,
            "state=killed",
            "state=running,,paused",
            "order=up",
            "startedAfter=yesterday",
            "startedAfter=2026-01-01T00:00:00",
            "startedAfter=0001-01-01T00:00:00%2B23:00",
        ],
    )
    async def test_a_malformed_query(self, client: httpx.AsyncClient, query: str) -> None:
        assert_error(await client.get(f"/v2/sandboxes?{query}"), 400)


class TestSnapshots:
    async def test_life_of_a_snapshot(self, client: httpx.AsyncClient, clock: FakeClock) -> None:
        first, second = await make(client), await make(client)
        taken = await client.post(f"/sandboxes/{first['sandboxID']}/snapshots", json={"name": "set-up"})
        assert taken.status_code == 201
        assert taken.json() == {
            "snapshotID": taken.json()["snapshotID"],
            "names": ["set-up"],
            "cpuCount": 2,
            "memoryMB": 1024,
            "diskSizeMB": 8192,
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": "2026-01-01T00:00:00Z",
        }
        await clock.advance(1)
        unnamed = (await client.post(f"/sandboxes/{second['sandboxID']}/snapshots")).json()
        assert unnamed["names"] == []

        async def found(query: str = "") -> list[str]:
            return [item["snapshotID"] for item in (await client.get(f"/snapshots?{query}")).json()]

        named, other = taken.json()["snapshotID"], unnamed["snapshotID"]
        assert await found() == [other, named]
        assert await found(f"sandboxID={first['sandboxID']}") == [named]
        assert await found("name=set-up") == await found("name=team%2Fset-up:default") == [named]
        assert await found(f"name={other}") == [other]
        token = (await client.get("/snapshots?limit=1")).headers["x-next-token"]
        assert await found(f"limit=1&nextToken={quote(token)}") == [named]
        await make(client, templateID=named)
        await make(client, templateID="set-up")
        again = await client.post(f"/sandboxes/{first['sandboxID']}/snapshots", json={"name": "set-up"})
        assert_error(again, 409, "taken")
        path = f"/templates/{quote('team/set-up:default', safe='')}"
        assert (await client.delete(path)).status_code == 204
        assert_error(await client.delete(path), 404)
        assert (await client.delete(f"/templates/{other}")).status_code == 204
        assert_error(await client.delete("/templates/base"), 409)

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", "-a", "ä", "a" * 129, "a\n", "a\0", 7])
    async def test_a_malformed_name(self, client: httpx.AsyncClient, name: Any) -> None:
        path = f"/sandboxes/{(await make(client))['sandboxID']}/snapshots"
        assert_error(await client.post(path, json={"name": name}), 400, "name")


HOSTILE_BODIES: dict[str, bytes] = {
    "not json": b"{",
    "a number": b"7",
    "a string": b'"x"',
    "a list": b"[]",
    "null": b"null",
    "nothing": b"",
    "blank": b"  ",
    "not utf-8": b'{"templateID": "\xff\xfe"}',
    "half a surrogate": rb'{"templateID": "\ud800"}',
    "half a surrogate as key": rb'{"templateID": "base", "metadata": {"\udfff": "x"}}',
    "half a surrogate as value": rb'{"templateID": "base", "envVars": {"x": "\udfff"}}',
    "nul": rb'{"templateID": "ba\u0000se"}',
    "nul in metadata": rb'{"templateID": "base", "metadata": {"a": "\u0000"}}',
    "nul in a variable": rb'{"templateID": "base", "envVars": {"a\u0000": "b"}}',
    "a variable with =": b'{"templateID": "base", "envVars": {"a=b": "c"}}',
    "a variable without name": b'{"templateID": "base", "envVars": {"": "c"}}',
    "deep list": b"[" * 200_000,
    "deep object": b'{"templateID": "base", "x": ' + b'{"a":' * 100_000,
    "deep and whole": b'{"templateID": "base", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge number": b'{"templateID": "base", "timeout": ' + b"9" * 100_000 + b"}",
    "large number": b'{"templateID": "base", "timeout": 99999999999}',
    "exponent": b'{"templateID": "base", "timeout": 1e999}',
    "not a number": b'{"templateID": "base", "timeout": NaN}',
    "a fraction": b'{"templateID": "base", "timeout": 1.5}',
    "a bool for a number": b'{"templateID": "base", "timeout": true}',
    "a string for a number": b'{"templateID": "base", "timeout": "300"}',
    "zero": b'{"templateID": "base", "timeout": 0}',
    "negative": b'{"templateID": "base", "timeout": -1}',
    "a number for a string": b'{"templateID": 7}',
    "numbers in metadata": b'{"templateID": "base", "metadata": {"a": 1}}',
    "a list for metadata": b'{"templateID": "base", "metadata": ["a"]}',
    "a string for a bool": b'{"templateID": "base", "autoPause": "yes"}',
    "a number for a network": b'{"templateID": "base", "network": 7}',
    "a list for a network": b'{"templateID": "base", "network": [1]}',
    "a network of nonsense": b'{"templateID": "base", "network": {"allowOut": ["1.2.3.4/99"]}}',
    "a network of numbers": b'{"templateID": "base", "network": {"allowOut": [7]}}',
    "a long name": b'{"templateID": "' + b"a" * 300 + b'"}',
    "no template": b"{}",
    "many errors": b'{"envVars": {' + b",".join(b'"=%d": 1' % n for n in range(1000)) + b"}}",
}


class TestHostileInput:
    @pytest.mark.parametrize("name", HOSTILE_BODIES)
    async def test_bodies(self, client: httpx.AsyncClient, node: FakeNode, name: str) -> None:
        headers = {"Content-Type": "application/json"}
        response = await client.post("/v2/sandboxes", content=HOSTILE_BODIES[name], headers=headers)
        assert_error(response, 400)
        assert len(response.content) < 2000
        assert node.calls == []

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
    async def test_content_types(self, client: httpx.AsyncClient, kind: str) -> None:
        body = b'{"templateID": "base"}'
        refused = await client.post("/v2/sandboxes", content=body, headers={"Content-Type": kind})
        assert_error(refused, 415, "application/json")
        sandbox = (await make(client))["sandboxID"]
        empty = await client.post(f"/sandboxes/{sandbox}/pause", content=b"", headers={"Content-Type": kind})
        assert empty.status_code == 204

    @pytest.mark.parametrize("headers", [{}, {"Content-Type": "application/json; charset=utf-8"}])
    async def test_content_types_that_are_fine(self, client: httpx.AsyncClient, headers: dict[str, str]) -> None:
        response = await client.post("/v2/sandboxes", content=b'{"templateID": "base"}', headers=headers)
        assert response.status_code == 201

    async def test_large_bodies(self, client: httpx.AsyncClient) -> None:
        limit = 4 * 2**20

        async def chunks(size: int) -> AsyncIterator[bytes]:
            yield b'{"templateID": "base"}'
            for _ in range(size // 2**16):
                yield b" " * 2**16

        assert_error(await client.post("/v2/sandboxes", content=b"[" * (limit + 1)), 413)
        assert_error(await client.post("/v2/sandboxes", content=chunks(limit)), 413)
        assert (await client.post("/v2/sandboxes", content=chunks(limit // 2))).status_code == 201

    async def test_a_declared_size_is_enough_to_refuse(self, client: httpx.AsyncClient) -> None:
        headers = {"Content-Length": "9" * 400}
        assert_error(await client.post("/v2/sandboxes", content=b"{}", headers=headers), 413)

    @pytest.mark.parametrize(
        ("method", "path", "status", "words"),
        [
            ("GET", "/", 404, ["GET", "/"]),
            ("POST", "/v9/sandboxes", 404, ["POST", "/v9/sandboxes"]),
            ("GET", "/sandboxes/", 404, ["/sandboxes/"]),
            ("GET", "/docs", 404, []),
            ("GET", "/%ff%00%0a", 404, []),
            ("GET", "/" + "a" * 10_000, 404, []),
            ("PATCH", "/sandboxes", 405, ["PATCH"]),
            ("PUT", "/health", 405, []),
            ("BREW", "/sandboxes", 405, ["BREW"]),
            ("DELETE", "/templates/", 404, []),
            ("DELETE", "/templates/%00", 404, []),
            ("DELETE", "/templates/..%2F..%2Fetc%2Fpasswd", 404, []),
        ],
    )
    async def test_paths(
        self, client: httpx.AsyncClient, method: str, path: str, status: int, words: list[str]
    ) -> None:
        assert_error(await client.request(method, path), status, *words)

    async def test_every_route_survives_every_body(self, client: httpx.AsyncClient) -> None:
        sandbox = (await make(client))["sandboxID"]
        actions = ["connect", "resume", "pause", "timeout", "fork", "snapshots"]
        for path in [f"/sandboxes/{sandbox}/{action}" for action in actions] + ["/sandboxes"]:
            for body in HOSTILE_BODIES.values():
                response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
                assert response.status_code < 500, (path, body[:50])
                if response.status_code >= 400:
                    assert_error(response, response.status_code)


def leaves(kind: type[errors.AenvError]) -> Iterator[type[errors.AenvError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from leaves(child)


class TestErrors:
    @pytest.mark.parametrize("kind", list(leaves(errors.AenvError)))
    async def test_every_class_has_a_row_and_a_body(
        self, client: httpx.AsyncClient, node: FakeNode, kind: type[errors.AenvError]
    ) -> None:
        assert kind in TABLE
        path = f"/sandboxes/{(await make(client))['sandboxID']}/pause"
        node.fail["pause"] = kind("it broke \ud800", hint="mend it")
        response = await client.post(path)
        assert_error(response, TABLE[kind].status, "it broke", "mend it")
        if response.status_code in (429, 503):
            assert response.headers["should-retry"] in ("true", "false")

    @pytest.mark.parametrize(
        ("error", "status", "headers"),
        [
            (errors.TooManyStarts("x", retry_after_s=7), 429, {"Retry-After": "7", "Should-Retry": "true"}),
            (errors.NoCapacity("x", retry_after_s=9), 503, {"Retry-After": "9", "Should-Retry": "false"}),
            (errors.ShuttingDown("x"), 503, {"Retry-After": "1", "Should-Retry": "true"}),
            (errors.GuestUnresponsive("x"), 503, {"Should-Retry": "false"}),
            (errors.StorageFull("x"), 507, {}),
            (errors.SandboxLost("x"), 500, {}),
        ],
    )
    async def test_what_clients_branch_on(
        self, client: httpx.AsyncClient, node: FakeNode, error: errors.AenvError, status: int, headers: dict[str, str]
    ) -> None:
        node.fail["create"] = error
        response = await client.post("/v2/sandboxes", json={"templateID": "base"})
        assert_error(response, status)
        assert headers.items() <= {key.title(): value for key, value in response.headers.items()}.items()

    async def test_the_unresponsive_guests_code(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        path = f"/sandboxes/{(await make(client))['sandboxID']}/pause"
        node.fail["pause with healthy guest"] = errors.GuestUnresponsive("no answer")
        response = await client.post(path, json={"requireHealthyGuest": True})
        assert response.json()["error_code"] == "sandbox_snapshot_guest_agent_unresponsive"

    async def test_a_defect_is_logged_and_not_told(
        self, client: httpx.AsyncClient, node: FakeNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken() -> None:
            raise RuntimeError("secret detail")

        monkeypatch.setattr(node, "sandboxes", broken)
        with capture_logs() as logs:
            response = await client.get("/sandboxes")
        assert_error(response, 500, "internal error")
        assert "secret detail" not in response.text
        assert [line["event"] for line in logs] == ["request failed by a defect", "request"]


class TestHangingUp:
    async def test_work_goes_on(self, client: httpx.AsyncClient, node: FakeNode) -> None:
        sandbox = (await make(client))["sandboxID"]
        node.hold["pause"] = asyncio.Event()
        caller = asyncio.create_task(client.post(f"/sandboxes/{sandbox}/pause"))
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        node.hold["pause"].set()
        await settle()
        assert node.calls[-1] == "pause"
        assert (await client.get(f"/sandboxes/{sandbox}")).json()["state"] == "paused"

    async def test_hanging_up_while_sending(self, app: FastAPI) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v2/sandboxes",
            "raw_path": b"/v2/sandboxes",
            "query_string": b"",
            "headers": [(b"x-api-key", KEY.encode())],
        }
        received: Iterator[dict[str, Any]] = iter(
            [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        )

        async def receive() -> dict[str, Any]:
            return next(received)

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        assert sent == []


async def test_the_schema_describes_bodies(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/openapi.json")).json()
    assert "templateID" in schema["components"]["schemas"]["NewSandboxV2"]["required"]
    assert "/sandboxes/{sandbox_id}/fork" in schema["paths"]


class TestObservation:
    async def test_one_line_an_operation_without_secrets(self, client: httpx.AsyncClient) -> None:
        with capture_logs() as logs:
            made = await make(client, envVars={"TOKEN": "hush"}, metadata={"a": "hush"})
            await client.post(f"/sandboxes/{made['sandboxID']}/pause")
            await client.get("/health")
            await client.get("/nowhere?key=hush")
        told = [(line["operation"], line.get("sandbox"), line["status"]) for line in logs]
        assert told == [
            ("create_sandbox", made["sandboxID"], 201),
            ("pause_sandbox", made["sandboxID"], 204),
            ("unknown", None, 404),
        ]
        text = json.dumps(logs)
        assert not any(secret in text for secret in ("hush", KEY, made["envdAccessToken"]))

    async def test_metrics_count_by_operation(self, client: httpx.AsyncClient) -> None:
        made = await make(client)
        await client.post(f"/sandboxes/{made['sandboxID']}/pause")
        await client.get(f"/{'x' * 50}")
        text = (await client.get("/metrics")).text
        assert 'aenv_api_requests_total{operation="create_sandbox",status="201"} 1.0' in text
        assert 'aenv_api_requests_total{operation="unknown",status="404"} 1.0' in text
        assert 'aenv_sandboxes{state="paused"} 1.0' in text
        assert "aenv_creates_total 1.0" in text
        assert "xxx" not in text
