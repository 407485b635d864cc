"""The benchmark runs, says what it found, and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.timeout(900)
def test_lifecycle() -> None:
    before = _directories()
    command = [sys.executable, "-m", "aenv.cli.main", "bench", "lifecycle", "--rounds", "1", "--forks", "1,2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["conditions"].keys() >= {"cpu", "cpus", "kernel", "vmm", "accelerator", "guest"}
    results = {result["operation"]: result for result in found["results"]}
    assert results.keys() >= {
        "create",
        "create, first command",
        "warm create, first command",
        "pause",
        "resume, first command",
        "snapshot: VM stopped",
        "fork of 1",
        "fork of 2: processes stopped",
    }
    for result in results.values():
        assert result["rounds"] == 1
        assert result["floor"]["name"] in found["floors"]
        assert 0 < result["ours"]["p50_s"] <= result["ours"]["p95_s"]
        assert result["ratio"] == pytest.approx(result["ours"]["p50_s"] / result["floor"]["p50_s"])
    assert _directories() <= before


def _directories() -> set[Path]:
    """What a benchmark keeps its nodes in; it can be removed only when nothing is mounted in it."""
    return set(Path("/var/tmp").glob("aenv-bench-*"))
