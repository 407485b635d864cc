"""The main job, end to end, through the official E2B SDK: only E2B_API_URL, E2B_SANDBOX_URL and E2B_API_KEY point it
here.

Starts a node of its own (fresh state, free port), runs the scenario, stops the node, and looks for what it may have
left on the host. Ends 0 only if every check held. Run it with `make demo`.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aenv.testing.leftovers import held_by

console = Console(highlight=False)


class Timeline:
    """Prints what happens, checks what must hold, and remembers how long things took."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self.times: list[tuple[str, float]] = []
        self.failures: list[str] = []

    def say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self._start:7.2f}s[/dim]  {text}")

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.times.append((name, time.monotonic() - start))

    def check(self, what: str, held: bool, detail: object = "") -> None:
        self.say(
            f"{'[green]✓[/green]' if held else '[red]✗[/red]'} {what}{f'  [dim]{detail}[/dim]' if detail != '' else ''}"
        )
        if not held:
            self.failures.append(what)

    def table(self) -> Table:
        table = Table("operation", "ms", title="Times, as the client saw them")
        for name, seconds in self.times:
            table.add_row(name, f"{seconds * 1000:.0f}")
        return table


@contextmanager
def node(timeline: Timeline, directory: Path) -> Iterator[dict[str, str]]:
    """A node with its own state; yields the environment that points the SDK at it."""
    env = os.environ | {
        "AENV_HOME": str(directory / "home"),
        "AENV_RUNTIME": str(directory / "run"),
        "AENV_TEMPLATE_VCPUS": "1",
        "AENV_TEMPLATE_MEMORY_MIB": "512",
    }
    timeline.say("starting a node: boots the template `base` (some ten seconds)")
    command = [sys.executable, "-m", "aenv.cli.main", "server", "--listen", "127.0.0.1:0"]
    with (directory / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    assert server.stdout is not None
    try:
        ready = server.stdout.readline().split()
        if not ready or ready[0] != "ready":
            raise SystemExit("the node did not start:\n" + (directory / "log").read_text())
        url = ready[1]
        key = (directory / "home/secrets/api-key").read_text().strip()
        yield {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": key}
    finally:
        timeline.say("stopping the node")
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            timeline.check("the node stops on SIGTERM", held=False)


def scenario(t: Timeline) -> None:  # noqa: PLR0915 — one story, told from top to bottom
    from e2b import Sandbox, SandboxException  # noqa: PLC0415 — reads the environment

    with t.timed("create"):
        sandbox = Sandbox.create("base", timeout=600, metadata={"job": "demo"}, envs={"GREETING": "hello"})
    t.say(f"created {sandbox.sandbox_id}")
    with t.timed("first command"):
        result = sandbox.commands.run("true")
    t.check("a command runs", result.exit_code == 0)

    lines: list[tuple[str, float]] = []
    sandbox.commands.run(
        "for i in 1 2 3; do echo out $i; echo err $i >&2; sleep 0.3; done",
        on_stdout=lambda text: lines.append(("stdout", time.monotonic())),
        on_stderr=lambda text: lines.append(("stderr", time.monotonic())),
    )
    spread = lines[-1][1] - lines[0][1] if lines else 0.0
    t.check(
        "stdout and stderr arrive live",
        {s for s, _ in lines} == {"stdout", "stderr"} and spread > 0.4,
        f"over {spread:.1f} s",
    )
    t.check("environment variables are set", sandbox.commands.run("echo $GREETING").stdout == "hello\n")
    t.check("python runs", sandbox.commands.run("python -c 'print(6 * 7)'").stdout == "42\n")

    sandbox.files.write("/home/user/notes/a.txt", "first\n")
    sandbox.files.write("/home/user/notes/b.bin", bytes(range(256)) * 64)
    t.check(
        "files read back",
        sandbox.files.read("/home/user/notes/b.bin", format="bytes") == bytes(range(256)) * 64,
    )
    t.check("files are listed", [e.name for e in sandbox.files.list("/home/user/notes")] == ["a.txt", "b.bin"])

    counter = sandbox.commands.run(
        "i=0; while true; do i=$((i+1)); echo $i > /tmp/counter; sleep 0.05; done", background=True, timeout=0
    )
    time.sleep(0.5)

    def count(box: Sandbox) -> int:
        return int(box.commands.run("cat /tmp/counter").stdout or 0)

    def boot_id(box: Sandbox) -> str:
        return box.commands.run("cat /proc/sys/kernel/random/boot_id").stdout

    before, boot = count(sandbox), boot_id(sandbox)
    with t.timed("pause"):
        sandbox.pause()
    t.check("it is listed as paused", sandbox.get_info().state.value == "paused")
    with t.timed("resume"):
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600)
    after = count(sandbox)
    t.check(
        "the same process is alive",
        counter.pid in [p.pid for p in sandbox.commands.list()],
        f"pid {counter.pid}",
    )
    t.check("it is the same boot", boot_id(sandbox) == boot)
    time.sleep(0.3)
    t.check("the counter went on from where it was", before <= after < count(sandbox), f"{before} → {after} → …")

    with t.timed("fork into 4"):
        forked = sandbox.fork(count=4, timeout=600)
    children = [child for child in forked if isinstance(child, Sandbox)]
    t.check("four children", len(children) == 4, [str(f) for f in forked if not isinstance(f, Sandbox)] or "")
    with ThreadPoolExecutor(4) as pool:
        randoms = list(pool.map(lambda c: c.commands.run("head -c 16 /dev/urandom | od -An -tx1").stdout, children))
        hostnames = list(pool.map(lambda c: c.commands.run("hostname").stdout.strip(), children))
        list(pool.map(lambda c: c.files.write("/home/user/notes/mine.txt", c.sandbox_id), children))
        contents = list(pool.map(lambda c: c.files.read("/home/user/notes/mine.txt"), children))
        inherited = list(pool.map(lambda c: c.files.read("/home/user/notes/a.txt"), children))
    t.check("they have what the source had", inherited == ["first\n"] * len(children))
    t.check("their files diverge", contents == [c.sandbox_id for c in children])
    t.check("their /dev/urandom differ", len(set(randoms)) == len(children))
    t.check("their hostnames differ", len(set(hostnames)) == len(children), ", ".join(hostnames))
    t.check("the source has none of their files", not sandbox.files.exists("/home/user/notes/mine.txt"))

    with t.timed("snapshot"):
        snapshot = sandbox.create_snapshot()
    t.check("the source runs on after the snapshot", sandbox.commands.run("true").exit_code == 0)
    at_snapshot = count(sandbox)
    sandbox.kill()
    t.say(f"killed the source; snapshot {snapshot.snapshot_id}")
    with t.timed("two sandboxes from the snapshot"):
        copies = [Sandbox.create(snapshot.snapshot_id, timeout=600) for _ in range(2)]
    t.check("both go on counting", all(count(c) > 0 for c in copies), f"at snapshot {at_snapshot}")
    t.check("both have the files", all(c.files.read("/home/user/notes/a.txt") == "first\n" for c in copies))

    listed = {info.sandbox_id for info in Sandbox.list().next_items()}
    t.check(
        "list shows exactly what runs",
        listed == {b.sandbox_id for b in [*children, *copies]},
        f"{len(listed)} sandboxes",
    )
    brief = Sandbox.create("base", timeout=2, lifecycle={"on_timeout": "kill"})
    deadline = time.monotonic() + 20
    while brief.is_running() and time.monotonic() < deadline:
        time.sleep(0.25)
    t.check("one expires", not brief.is_running())
    try:
        brief.get_info()
        gone = False
    except SandboxException:
        gone = True
    t.check("and is gone", gone)
    killed = [box.kill() for box in [*children, *copies]]
    t.check("the rest are killed", all(killed) and not Sandbox.list().next_items())
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def main() -> int:
    timeline = Timeline()
    directory = Path(tempfile.mkdtemp(prefix="aenv-demo-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        with node(timeline, directory) as env:
            os.environ.update(env)
            scenario(timeline)
        left = held_by((directory / "home/instance-id").read_text().strip(), directory)
        timeline.check("nothing is left on the host", held=not left, detail="; ".join(left))
        if timeline.failures:
            console.print("The node's log:", (directory / "log").read_text(), sep="\n", markup=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    console.print(timeline.table())
    if timeline.failures:
        console.print(f"[red]{len(timeline.failures)} checks failed:[/red] " + "; ".join(timeline.failures))
        return 1
    console.print("[green]every check held[/green]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
