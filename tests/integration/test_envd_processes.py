"""Processes through the E2B SDK and through raw Connect streams."""

import asyncio
import base64
import os
import time

import pytest
from e2b import CommandExitException, NotFoundException, TimeoutException
from e2b.exceptions import AuthenticationException, InvalidArgumentException
from e2b.sandbox.commands.command_handle import PtySize
from tests.support.envd import frame, running_envd

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="envd starts programs as other users")
START = "process.Process/Start"


@pytest.fixture
async def envd():
    async with running_envd() as envd:
        yield envd


@pytest.fixture
async def sandbox(envd):
    return await envd.sandbox()


def shell(command, **fields):
    return {"process": {"cmd": "/bin/sh", "args": ["-c", command], **fields}}


def output(messages, stream="stdout"):
    data = [message["event"]["data"].get(stream, "") for message in messages if "data" in message.get("event", {})]
    return b"".join(base64.b64decode(piece) for piece in data)


def ends(messages):
    return [message["event"]["end"] for message in messages if "end" in message.get("event", {})]


async def test_output_and_exit_code(sandbox):
    result = await sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failure:
        await sandbox.commands.run("echo partly; exit 3")
    assert (failure.value.exit_code, failure.value.stdout, failure.value.error) == (3, "partly\n", "exit status 3")


async def test_user_home_and_environment(sandbox):
    await sandbox.commands.run("true")
    result = await sandbox.commands.run("id -u; pwd; echo $HOME $USER $LOGNAME $E2B_SANDBOX; umask")
    assert result.stdout.split("\n")[:4] == ["1000", "/home/user", "/home/user user user true", "0022"]
    result = await sandbox.commands.run("id -u; pwd", user="root", cwd="/usr/bin/../lib")
    assert result.stdout == "0\n/usr/lib\n"
    result = await sandbox.commands.run("echo $MINE", envs={"MINE": "a b"})
    assert result.stdout == "a b\n"
    assert (await sandbox.commands.run("echo $MINE")).stdout == "\n"
    assert (await sandbox.commands.run("echo $E2B_SANDBOX")).stdout == "true\n"


async def test_strangers_and_missing_directories_are_refused(sandbox, envd):
    with pytest.raises(AuthenticationException, match="invalid username: 'nobody-here'"):
        await sandbox.commands.run("true", user="nobody-here")
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such' does not exist"):
        await sandbox.commands.run("true", cwd="/no/such")
    [answer] = await envd.stream(START, {"process": {"cmd": "/no/such/program"}})
    assert answer["error"]["code"] == "invalid_argument"
    assert "No such file" in answer["error"]["message"]
    [answer] = await envd.stream(START, {"process": {"cmd": "/etc/passwd"}})
    assert "Permission denied" in answer["error"]["message"]


async def test_exact_events(envd):
    start, *rest, end = await envd.stream(START, shell("printf x; exit 7"))
    assert start["event"]["start"]["pid"] > 1
    assert rest[0] == {"event": {"data": {"stdout": "eA=="}}}
    assert ends(rest) == [{"exitCode": 7, "exited": True, "status": "exit status 7", "error": "exit status 7"}]
    assert end == {}
    assert ends(await envd.stream(START, shell("kill -KILL $$"))) == [
        {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}
    ]
    assert ends(await envd.stream(START, shell("true"))) == [{"exited": True, "status": "exit status 0"}]


async def test_bytes_pass_unchanged(envd):
    """One line of 8 MB, with NUL and broken UTF-8, on both streams at once."""
    script = (
        "import os;d=bytes(range(256))*32768;[os.write(f,d[i:i+9999]) for i in range(0,len(d),9999) for f in (1,2)]"
    )
    request = {"process": {"cmd": "python3", "args": ["-c", script]}, "stdin": False}
    messages = await envd.stream(START, request)
    expected = bytes(range(256)) * 32768
    assert output(messages) == expected
    assert output(messages, "stderr") == expected
    largest = max(len(output([message])) for message in messages)
    assert largest <= 32 << 10


async def test_deadline_kills_the_whole_group(sandbox, envd):
    started = time.monotonic()
    messages = await envd.stream(START, shell("sleep 300 & echo $!; wait"), **{"connect-timeout-ms": "500"})
    assert time.monotonic() - started < 5
    assert messages[-1]["error"]["code"] == "deadline_exceeded"
    grandchild = int(output(messages))
    alive = await sandbox.commands.run(
        f"kill -0 {grandchild} && grep -c Z /proc/{grandchild}/stat || echo gone", user="root"
    )
    assert alive.stdout != "0\n"
    with pytest.raises(TimeoutException):
        await sandbox.commands.run("sleep 300", timeout=1)


async def test_a_process_left_behind_does_not_hold_up_the_end(sandbox):
    started = time.monotonic()
    result = await sandbox.commands.run("echo first; (sleep 30; echo never) & true", timeout=20)
    assert result.stdout == "first\n"
    assert time.monotonic() - started < 5
    result = await sandbox.commands.run("yes & echo first", timeout=20)
    assert "first\n" in result.stdout
    assert time.monotonic() - started < 10
    await sandbox.commands.run("pkill -x yes; pkill -x sleep", user="root")


async def test_a_process_outlives_its_client(sandbox, envd):
    handle = await sandbox.commands.run("echo $$; exec sleep 300", background=True)
    await handle.disconnect()
    listed = [info for info in await sandbox.commands.list() if info.pid == handle.pid]
    assert listed[0].args[-1].endswith("exec sleep 300")
    again = await sandbox.commands.connect(handle.pid)
    assert await sandbox.commands.kill(handle.pid)
    with pytest.raises(CommandExitException) as failure:
        await again.wait()
    assert (failure.value.exit_code, failure.value.error) == (-1, "signal: killed")
    assert not await sandbox.commands.kill(handle.pid)
    assert handle.pid not in [info.pid for info in await sandbox.commands.list()]
    late = await envd.stream("process.Process/Connect", {"process": {"pid": handle.pid}})
    assert ends(late)[0]["exitCode"] == -1


async def test_unknown_processes(sandbox, envd):
    with pytest.raises(NotFoundException):
        await sandbox.commands.connect(999_999)
    [answer] = await envd.stream("process.Process/Connect", {"process": {"pid": 999_999}})
    assert answer == {"error": {"code": "not_found", "message": "process with pid 999999 not found"}}
    for method in ("SendSignal", "SendInput", "CloseStdin", "Update"):
        request = {"process": {"tag": "none"}, "signal": "SIGNAL_SIGTERM", "input": {"stdin": ""}}
        response = await envd.unary(f"process.Process/{method}", request)
        assert (response.status_code, response.json()["code"]) == (404, "not_found")


async def test_standard_input(sandbox, envd):
    handle = await sandbox.commands.run("cat; echo end; sleep 1", background=True, stdin=True)
    await sandbox.commands.send_stdin(handle.pid, "héllo\n")
    large = "x" * (1 << 20)
    await sandbox.commands.send_stdin(handle.pid, large)
    for _ in range(2):
        await sandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == f"héllo\n{large}end\n"
    quiet = await sandbox.commands.run("cat; sleep 300", background=True, stdin=False)
    response = await envd.unary(
        "process.Process/SendInput", {"process": {"pid": quiet.pid}, "input": {"stdin": "eA=="}}
    )
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    await quiet.kill()


async def test_streamed_input(envd):
    reading = envd.messages(START, frame(shell("cat") | {"tag": "reader"}))
    await anext(reading)
    frames = [{"start": {"process": {"tag": "reader"}}}, *({"data": {"input": {"stdin": "YWI="}}} for _ in range(3))]
    body = b"".join(map(frame, [*frames, {"keepalive": {}}]))
    answers = [answer async for answer in envd.messages("process.Process/StreamInput", body)]
    assert answers == [{}, {}]
    await envd.unary("process.Process/CloseStdin", {"process": {"tag": "reader"}})
    assert output([message async for message in reading]) == b"ababab"


async def test_terminal(sandbox):
    seen, marked = bytearray(), asyncio.Event()

    def see(data):
        seen.extend(data)
        if b"mark-42" in seen:
            marked.set()

    handle = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=see, timeout=30)
    await sandbox.pty.send_stdin(handle.pid, b"stty size; tty; PS1=; echo mark-$((40+2))\n")
    await marked.wait()
    assert b"24 80" in seen
    await sandbox.pty.resize(handle.pid, PtySize(rows=50, cols=132))
    await sandbox.pty.send_stdin(handle.pid, b"stty size; exit\n")
    result = await handle.wait()
    assert result.exit_code == 0
    assert b"50 132" in seen


async def test_killing_a_terminal(sandbox):
    handle = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=lambda _: None)
    assert await sandbox.pty.kill(handle.pid)
    with pytest.raises(CommandExitException) as failure:
        await handle.wait()
    assert failure.value.error == "signal: killed"


async def test_keepalive(envd):
    messages = await envd.stream(START, shell("sleep 2.5"), **{"keepalive-ping-interval": "1"})
    assert [message for message in messages if "keepalive" in message.get("event", {})]


async def test_a_reader_that_is_gone_blocks_nobody(sandbox, envd):
    """A client that opened the stream and never reads: another one sees the output flow."""
    reader, writer = await asyncio.open_connection("127.0.0.1", envd.port, limit=1)
    body = frame(shell("exec yes") | {"tag": "chatty"})
    head = f"POST /{START} HTTP/1.1\r\nhost: x\r\ncontent-type: application/connect+json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readexactly(12)
    received = 0
    started = time.monotonic()
    async for message in envd.messages("process.Process/Connect", frame({"process": {"tag": "chatty"}})):
        received += len(output([message]))
        if received > 10 << 20:
            break
    assert time.monotonic() - started < 45
    assert envd.resident_kib() < 64 << 10
    await envd.unary("process.Process/SendSignal", {"process": {"tag": "chatty"}, "signal": "SIGNAL_SIGKILL"})
    writer.transport.abort()


async def test_a_new_life_ends_the_streams_of_the_old(envd):
    stream = envd.messages(START, frame(shell("sleep 300") | {"tag": "survivor"}))
    await anext(stream)
    response = await envd.http.post("/init", json={"lifecycleID": "second"})
    assert response.status_code == 204
    last = [message async for message in stream][-1]
    assert last["error"]["code"] == "unavailable"
    listed = (await envd.unary("process.Process/List", {})).json()["processes"]
    assert listed[0]["tag"] == "survivor"


async def test_orphans_are_reaped_and_exit_codes_kept(sandbox):
    """Many short-lived children and orphans at once: every command still gets its own exit code."""

    async def exits(code):
        with pytest.raises(CommandExitException) as failure:
            await sandbox.commands.run(f"for i in 1 2 3; do (true &) ; done; exit {code}")
        return failure.value.exit_code

    codes = list(range(1, 25))
    assert await asyncio.gather(*map(exits, codes)) == codes
