"""What a hostile guest can reach and do, on real VMs."""

import time
from pathlib import Path

import pytest
from e2b import CommandExitException, Sandbox
from tests.support.node import NodeProcess

pytestmark = pytest.mark.vm

CONNECT = "timeout 5 bash -c 'exec 3<>/dev/tcp/{0}/{1}' 2>&1; echo $?"


def reaches(sandbox: Sandbox, address: str, port: int) -> bool:
    return sandbox.commands.run(CONNECT.format(address, port)).stdout.splitlines()[-1] == "0"


def test_the_guest_reaches_nothing_of_the_host(node: NodeProcess, sandbox: Sandbox) -> None:
    port = int(node.url.rsplit(":", 1)[1])
    other = Sandbox.create("base", timeout=120, **node.options)
    addresses = node.host_addresses()
    assert addresses
    for address in [*addresses[:4], "169.254.0.22", "169.254.169.254"]:
        assert not reaches(sandbox, address, port), address
    for held in node.held():
        if held.startswith("route: 10.11."):
            assert not reaches(sandbox, held.split()[1], 49983), held
    assert reaches(sandbox, "127.0.0.1", 49983), "the probe itself works"
    other.kill()


def test_the_agent_takes_no_orders_from_inside(sandbox: Sandbox) -> None:
    answer = "curl -s -o /dev/null -w '%{{http_code}}' -X POST http://{0}:49983/{1} -d '{{}}'"
    for address in ("127.0.0.1", "169.254.0.21"):
        for call in ("init", "freeze", "unfreeze"):
            assert sandbox.commands.run(answer.format(address, call), user="root").stdout == "404"


def test_a_fork_bomb_does_not_take_the_sandbox_away(node: NodeProcess, sandbox: Sandbox) -> None:
    sandbox.commands.run("bash -c ':(){ :|:& };:' >/dev/null 2>&1 &", background=True)
    time.sleep(5)
    assert sandbox.is_running()
    sandbox.pause()
    again = Sandbox.connect(sandbox.sandbox_id, timeout=120, **node.options)
    assert again.is_running()
    assert again.kill()


def test_a_memory_hog_does_not_take_the_sandbox_away(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException):
        sandbox.commands.run("python -c 'x = bytearray(2 << 30)'", timeout=120)
    assert sandbox.commands.run("echo alive").stdout == "alive\n"


def test_a_full_disk_is_said(sandbox: Sandbox) -> None:
    sandbox.commands.run("fallocate -l 7G big || true; dd if=/dev/zero of=rest bs=1M 2>/dev/null || true", timeout=200)
    with pytest.raises(Exception, match=r"(?i)space"):
        sandbox.files.write("more.bin", b"x" * (4 << 20))
    sandbox.commands.run("rm big rest")
    sandbox.files.write("more.bin", b"x" * (4 << 20))


def test_vmms_are_confined(node: NodeProcess, sandbox: Sandbox) -> None:
    """Own uid, no capability, no new privileges, seccomp, first to go when memory is short."""
    uids = []
    for pid in node.machine_pids():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        uids.append(status["Uid"].split()[0])
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    assert uids
    assert "0" not in uids
    assert len(set(uids)) == len(uids)
