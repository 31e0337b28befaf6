"""How a driver comes and goes: its own Ray or another's, Ctrl-C, SIGKILL, and an end without close."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

import tpverify
from tpverify.kv.log import KvLog

pytestmark = pytest.mark.ray

START = (
    f"import sys; sys.path.insert(0, {str(Path(tpverify.__file__).parent.parent)!r})"
    + """
import os, signal, sys, tempfile, time
import ray
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import Ping
from tpverify.runtime.ranks import RankGroup
group = RankGroup(2, "cpu", deadline_s=60)
steps = Coordinator(group, "tables", {}, num_slots=8)
print(*group.pids, flush=True)
"""
)
STEP_FOR_EVER = START + "os.kill(group.pids[1], signal.SIGSTOP)\nwhile True: steps.step(Ping())"
IDLE = START + "time.sleep(60)"
LEAVE = START + "sys.exit(3)"
AUTH = (
    START
    + """
file = os.environ["RAY_AUTH_TOKEN_PATH"]
print(os.environ["RAY_AUTH_MODE"], oct(os.stat(file).st_mode & 0o777), len(open(file).read()), os.readlink(file))
group.close()
print(ray.is_initialized(), "RAY_AUTH_MODE" in os.environ, os.path.exists(file), os.listdir(tempfile.gettempdir()))
with RankGroup(1, "cpu") as group:
    print(Coordinator(group, "tables", {}, num_slots=8).digests()[0])
"""
)
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Driver:
    """A script in a process group of its own. Its environment marks every process that it leaves behind.

    Only the script itself knows where the package is.
    """

    def __init__(self, script: str, directory: Path, **environment: str) -> None:
        self.mark = f"TPVERIFY_TEST={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        own = {"TMPDIR": str(directory), name: value}
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHONPATH"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=kept | own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        """The ranks' process ids, once the driver has printed them."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return [int(pid) for pid in line.split()] or pytest.fail(self.process.communicate()[1])

    def left_behind(self) -> list[str]:
        """Command lines of the processes that carry the mark, except Ray's agents, which notice a dead node late."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " ").strip())
            except OSError:  # ended meanwhile
                continue
        return [command for command in found if command not in RAY_AGENTS]


@pytest.fixture
def directory() -> Iterator[Path]:
    """The driver's TMPDIR: shorter than pytest's, since Ray keeps its sockets there."""
    with tempfile.TemporaryDirectory(prefix="tp-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def join(ray_session: None) -> Iterator[dict[str, str]]:
    """Environment of a driver that joins this process's Ray."""
    settings = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    yield settings | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def soon(condition: Callable[[], bool]) -> bool:
    """Ray notices the end of a driver, and cleans up, in its own time."""
    end = time.monotonic() + 15
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def files_left(directory: Path) -> list[str]:
    """Ray keeps its own folder of logs."""
    return [name for name in os.listdir(directory) if name != "ray"]


def placement_groups() -> int:
    return sum(row["state"] != "REMOVED" for row in placement_group_table().values())


def test_ctrl_c_in_mid_step_leaves_nothing(directory: Path) -> None:
    """As a terminal does it: SIGINT to the whole process group, while a rank hangs and the step cannot end."""
    driver = Driver(STEP_FOR_EVER, directory)
    driver.ranks()
    time.sleep(0.5)
    os.killpg(driver.process.pid, signal.SIGINT)
    _, errors = driver.process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors and driver.process.returncode == -signal.SIGINT
    assert soon(lambda: not driver.left_behind()), driver.left_behind()
    assert files_left(directory) == []


def test_ctrl_c_while_ranks_start_leaves_nothing(directory: Path, join: dict[str, str]) -> None:
    before = placement_groups()
    driver = Driver("print(flush=True);" + IDLE, directory, **join)
    assert driver.process.stdout is not None
    driver.process.stdout.readline()
    time.sleep(2.5)  # Ray is imported and the actors are under way, or nearly so: it must be clean at any moment
    os.killpg(driver.process.pid, signal.SIGINT)
    driver.process.communicate(timeout=30)
    assert driver.process.returncode in (-signal.SIGINT, 1)  # 1 where Ray turned the interrupt into an error of its own
    assert soon(lambda: placement_groups() == before)
    assert files_left(directory) == []


def test_killed_driver_leaves_no_rank_and_no_file(directory: Path) -> None:
    driver = Driver(IDLE, directory)
    driver.ranks()
    driver.process.kill()
    assert soon(lambda: not driver.left_behind()), driver.left_behind()
    assert files_left(directory) == []


def test_killed_driver_of_a_shared_ray_leaves_no_rank(directory: Path, join: dict[str, str]) -> None:
    """ray#64035: what a dead driver had placed blocked the next one."""
    before = placement_groups()
    driver = Driver(IDLE, directory, **join)
    pids = driver.ranks()
    assert placement_groups() == before + 1
    driver.process.kill()
    assert soon(lambda: all(map(ended, pids)))
    assert soon(lambda: placement_groups() == before)
    assert files_left(directory) == []


def test_driver_that_leaves_without_close(directory: Path, join: dict[str, str]) -> None:
    """Its exit code is its own, and the Ray that it joined goes on."""
    before = placement_groups()
    driver = Driver(LEAVE, directory, **join)
    pids = driver.ranks()
    driver.process.communicate(timeout=30)
    assert driver.process.returncode == 3
    assert all(map(ended, pids))
    assert soon(lambda: placement_groups() == before)
    assert ray.get(ray.put(1)) == 1


def test_own_ray_has_a_private_token_and_a_second_one_can_start(directory: Path) -> None:
    """Ray's default token file is world-readable; a mode set after Ray's import kept Ray from starting at all.

    Ours is on no disk, so that nothing can leave it there.
    """
    driver = Driver(AUTH, directory)
    output, errors = driver.process.communicate(timeout=100)
    assert output.splitlines()[1:] == [
        "token 0o600 64 /memfd:tpverify-token (deleted)",
        "False False False ['ray']",
        KvLog(8).digest(),
    ], errors
    assert soon(lambda: not driver.left_behind()), driver.left_behind()


def test_unreachable_ray_is_an_error_in_time(directory: Path) -> None:
    driver = Driver(START, directory, RAY_ADDRESS="127.0.0.1:1")
    _, errors = driver.process.communicate(timeout=100)
    assert "ClusterError: cannot reach Ray at 127.0.0.1:1" in errors.splitlines()[-1]
    assert files_left(directory) == []
