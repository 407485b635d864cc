"""A node as a process of its own, the way a user runs it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from aenv.testing.leftovers import held_by

READY_TIMEOUT_S = 300


class NodeProcess:
    """`aenv server` with its own home and runtime directories, which outlive `stop` and `kill`, until `close`."""

    def __init__(self, **settings: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="aenv-t-", dir="/var/tmp"))
        self.directory.chmod(0o711)
        self.home = self.directory / "home"
        self.runtime = self.directory / "run"
        self._env = os.environ | {
            "AENV_HOME": str(self.home),
            "AENV_RUNTIME": str(self.runtime),
            "AENV_TEMPLATE_VCPUS": "1",
            "AENV_TEMPLATE_MEMORY_MIB": "512",
            "AENV_LOG_FORMAT": "json",
            **settings,
        }
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self._listen = "127.0.0.1:0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def api_key(self) -> str:
        return (self.home / "secrets/api-key").read_text().strip()

    def held(self) -> list[str]:
        """What the node holds on the host."""
        return held_by((self.home / "instance-id").read_text().strip(), self.directory)

    def machine_pids(self) -> set[int]:
        """Of the VMM processes."""
        return {int(thing.split()[1]) for thing in self.held() if re.match(r"process: \d+ \S*qemu-system", thing)}

    def blockd_pid(self) -> int:
        """Of the one that serves, which is not root any more; its companion that unmounts is."""
        pids = [int(thing.split()[1]) for thing in self.held() if re.match(r"process: \d+ \S*blockd ", thing)]
        (pid,) = (pid for pid in pids if Path(f"/proc/{pid}").stat().st_uid != 0)
        return pid

    @staticmethod
    def host_addresses() -> list[str]:
        """IPv4 addresses of this machine outside loopback, the slots' included."""
        listing = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
        return [found[1] for found in re.finditer(r"inet (\S+?)/", listing) if not found[1].startswith("127.")]

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments for the SDK's calls."""
        return {"api_url": self.url, "sandbox_url": self.url, "api_key": self.api_key}

    @property
    def log(self) -> str:
        return (self.directory / "server.log").read_text()

    def spawn(self, *arguments: str) -> None:
        """Start, without waiting; a restarted node gets the port it had."""
        with (self.directory / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "aenv.cli.main", "server", "--listen", self._listen, *arguments],
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def start(self, *arguments: str) -> "NodeProcess":
        """Start and wait until it is ready."""
        self.spawn(*arguments)
        assert self._process is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(READY_TIMEOUT_S, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline().split()
        watchdog.cancel()
        if line[:1] != ["ready"]:
            self.kill()
            raise AssertionError(f"the node did not become ready:\n{self.log[-4000:]}")
        self.url = line[1]
        self._listen = self.url.removeprefix("http://")
        return self

    def stop(self, timeout_s: float = 120) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(timeout_s)
        self._end()
        return code

    def kill(self) -> None:
        """SIGKILL to the server alone; VMs, blockd and edge go on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def close(self) -> None:
        """Stop, starting it again first if it was killed, so that nothing is left; then remove its state."""
        if self._process is None and (self.runtime / "ledger").exists():
            self.start()
        if self._process is not None:
            self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
