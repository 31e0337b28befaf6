"""The steps of cluster/README.md: a head with a token, a job that checks parity, and nothing left behind."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
DEADLINE_S = 120

pytestmark = pytest.mark.ray


class Head(NamedTuple):
    address: str
    environment: dict[str, str]
    token: Path

    def ray(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ray", *arguments], env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
        )


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="tpv"))  # short: sockets lie in it
    token = folder / "auth" / "token"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean | {"PATH": path, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    command = ["cluster/start_head.sh", f"--temp-dir={folder}", "--num-cpus=2", f"--object-store-memory={100 << 20}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    try:
        subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, timeout=DEADLINE_S)
        yield Head(f"http://127.0.0.1:{ports['dashboard-port']}", environment, token)
    finally:
        end_processes_with(f"RAY_AUTH_TOKEN_PATH={token}")
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports


def processes_with(variable: str) -> list[int]:
    """Processes started with this environment variable. `ray stop` would end those of others too."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # ended, or another user's
            continue
    return found


def end_processes_with(variable: str) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + 10
        for pid in processes_with(variable):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        while processes_with(variable) and time.monotonic() < end:
            time.sleep(0.1)


def test_the_token_file_is_private(head: Head) -> None:
    assert stat.S_IMODE(head.token.stat().st_mode) == 0o600 and len(head.token.read_text()) == 64


def test_the_job_interface_wants_the_token(head: Head) -> None:
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{head.address}/api/jobs/", timeout=30)


def test_parity_as_a_job(head: Head) -> None:
    job = "tpverify-parity"
    submit = ["job", "submit", "--address", head.address, "--submission-id", job, "--working-dir", "."]
    done = head.ray(*submit, "--", "python", "-m", "tpverify.jobs.parity", "--tp", "2", "--cases", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks against 1 rank and against float64" in done.stdout
    assert "4 of 4 ok; bits equal to one rank's in 4 (seed 0)" in done.stdout
    assert "SUCCEEDED" in head.ray("job", "status", "--address", head.address, job).stdout.upper()


def test_a_bad_argument_fails_the_job(head: Head) -> None:
    submit = ["job", "submit", "--address", head.address, "--submission-id", "bad", "--working-dir", "."]
    done = head.ray(*submit, "--", "python", "-m", "tpverify.jobs.parity", "--tp", "7")
    assert done.returncode != 0 and "tpverify: --tp: expected a divisor of 64 heads, got 7" in done.stdout
    assert "FAILED" in head.ray("job", "status", "--address", head.address, "bad").stdout.upper()
