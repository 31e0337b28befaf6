"""Messages over sockets: whole, kept, never waited for without a deadline, and what becomes of peers that misbehave.

Ranks are threads or processes here without Ray; what is sent comes back as it was.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tpverify
from tpverify.runtime.connection import MOST_BYTES, MOST_FRAMES
from tpverify.runtime.transport import SocketTransport, serve

LONG_S = 30.0  # a deadline that nothing here comes near
BIG = os.urandom(10 << 20)
MESSAGES = {
    "no frame": [],
    "one": [b"step"],
    "empty": [b""],
    "empty ones among others": [b"", b"a", b"", b"", b"bc", b""],
    "many": [bytes([i % 251]) * (i % 9) for i in range(MOST_FRAMES)],
    "as long as the buffer": [bytes(range(256)) * 256],
    "large": [BIG, b"between", memoryview(BIG)[1:], bytearray(b"end")],
    "wide items": [memoryview(struct.pack("<6d", *range(6))).cast("d"), b"x"],
}


class Rank:
    """What `start` takes for an actor: a thread that does `run` with its endpoint."""

    def __init__(self, run: Callable[[str], None]) -> None:
        self._run = run
        self.run, self.errors = SimpleNamespace(remote=self.remote), list[Exception]()

    def remote(self, endpoint: str, spin_s: float) -> "Rank":
        self.endpoint, self.spin_s = endpoint, spin_s
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()
        return self

    def _main(self) -> None:
        try:
            self._run(self.endpoint)
        except Exception as error:
            self.errors.append(error)

    def error(self) -> Exception:
        """That the thread ended with."""
        self.thread.join(LONG_S)
        (error,) = self.errors
        return error


def echo(endpoint: str) -> None:
    serve(endpoint, 0.0, list)


def connected(endpoint: str) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(endpoint)
    return stream


def header(*sizes: int) -> bytes:
    return struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)


def received(message: list[memoryview] | None) -> list[bytes]:
    assert message is not None
    return [bytes(frame) for frame in message]


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files', shorter than pytest's."""
    with tempfile.TemporaryDirectory(prefix="tp-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., tuple[SocketTransport, list[Rank]]]]:
    """Transports of ranks that run these functions. At their end no file is left."""
    transports = []

    def start(*runs: Callable[[str], None], spin_s: float = 0.0) -> tuple[SocketTransport, list[Rank]]:
        transports.append(SocketTransport(len(runs), spin_s))
        return transports[-1], [transports[-1].start(rank, Rank(run)) for rank, run in enumerate(runs)]

    yield start
    for transport in transports:
        transport.close()
    assert os.listdir(directory) == []


@pytest.mark.parametrize("spin_s", [0.0, 0.02])
@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES.keys())
def test_a_message_comes_back(start: Any, message: list, spin_s: float) -> None:
    """Of two ranks at once, twice: the second finds nothing of the first."""
    transport, _ = start(echo, echo, spin_s=spin_s)
    expected = [bytes(frame) for frame in message]
    for _ in range(2):
        for rank in range(2):
            transport.send(rank, message)
        for rank in (1, 0):
            assert received(transport.receive(rank, LONG_S)) == expected
        transport.send(0, [b"next"])
        assert received(transport.receive(0, LONG_S)) == [b"next"]


def test_large_messages_both_ways_at_once(start: Any) -> None:
    """Ranks that do not read on before their answer is through: the driver has to send to others as it receives."""
    size = 4

    def eager(endpoint: str) -> None:
        with connected(endpoint) as stream:
            answer = threading.Thread(target=stream.sendall, args=(header(len(BIG)) + BIG,))
            answer.start()
            left = len(header(0)) + len(BIG)
            while left:
                left -= len(stream.recv(1 << 20))
            answer.join()

    transport, ranks = start(*[eager] * size)
    for rank in range(size):
        transport.send(rank, [BIG])
    assert all(received(transport.receive(rank, LONG_S)) == [BIG] for rank in range(size))
    for rank in range(size):
        while ranks[rank].thread.is_alive():
            assert transport.receive(rank, 0.01) is None


def test_ranks_that_wait_for_each_other(start: Any) -> None:
    """No rank answers before all have their messages, of which each is more than a socket takes at once."""
    size = 4
    meeting = threading.Barrier(size)

    def answer(message: list[memoryview]) -> list:
        meeting.wait(LONG_S)
        return [bytes(message[0][-3:])]

    transport, _ = start(*[lambda endpoint: serve(endpoint, 0.0, answer)] * size)
    for rank in range(size):
        transport.send(rank, [BIG, b"ignored"])
    assert all(received(transport.receive(rank, LONG_S)) == [BIG[-3:]] for rank in range(size))


def test_a_rank_that_stops_reading_keeps_nobody(start: Any) -> None:
    wake = threading.Event()

    def slow(endpoint: str) -> None:
        with connected(endpoint) as stream:
            stream.recv(1000)
            wake.wait(LONG_S)

    transport, _ = start(slow, echo, echo)
    for rank in range(3):
        transport.send(rank, [BIG, BIG])
    assert all(received(transport.receive(rank, LONG_S)) == [BIG, BIG] for rank in (1, 2))
    assert transport.receive(0, 0.05) is None
    transport.send(2, [b"on"])
    assert received(transport.receive(2, LONG_S)) == [b"on"]
    wake.set()


@pytest.mark.parametrize(
    "sent",
    [b"", header(8)[:5], header(8)[:12], header(8) + b"1234", header(1 << 20) + bytes(1 << 17)],
    ids=["nothing", "half a count", "half a header", "half a frame", "half a large frame"],
)
def test_a_rank_that_dies_is_silent(start: Any, sent: bytes) -> None:
    """Before or while it answers, with or without having read its message. No exception, no rest of an answer."""

    def die(endpoint: str) -> None:
        with connected(endpoint) as stream:
            stream.recv(3)
            stream.sendall(sent)

    transport, ranks = start(die, echo)
    transport.send(0, [BIG])
    transport.send(1, [b"alive"])
    assert transport.receive(0, 0.2) is None
    assert received(transport.receive(1, LONG_S)) == [b"alive"]
    begin = time.monotonic()
    ranks[0].thread.join(LONG_S)
    assert transport.receive(0, 0.2) is None and time.monotonic() - begin >= 0.2, "it is waited for all the same"
    transport.send(0, [b"to nobody"])
    assert transport.receive(0, 0.0) is None


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (struct.pack("<Q", MOST_FRAMES + 1), f"at most {MOST_FRAMES} frames, got {MOST_FRAMES + 1}"),
        (b"\xff" * 8, f"at most {MOST_FRAMES} frames, got {2**64 - 1}"),
        (header(MOST_BYTES, 1), f"at most {MOST_BYTES} bytes, got {MOST_BYTES + 1}"),
        (header(2**64 - 1), f"at most {MOST_BYTES} bytes, got {2**64 - 1}"),
        (header(2) + b"123", "expected 2 bytes, got 3 or more"),
    ],
)
def test_a_header_that_is_none_is_one_error(start: Any, sent: bytes, error: str) -> None:
    """On either side, and before memory is asked for."""

    def wrong(endpoint: str) -> None:
        with connected(endpoint) as stream:
            stream.sendall(sent)
            stream.recv(1)

    transport, _ = start(wrong)
    with pytest.raises(ValueError, match=f"^message from rank 0: .*{error}$"):
        transport.receive(0, LONG_S)

    path = os.path.join(tempfile.gettempdir(), "listener")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        rank = Rank(echo).remote(path, 0.0)
        stream, _ = listener.accept()
        with stream:
            stream.sendall(sent)
            assert str(rank.error()).startswith("message from the driver: ") and error in str(rank.error())
    os.unlink(path)


def test_frames_that_are_kept_stay_as_they_were(start: Any) -> None:
    transport, _ = start(echo)
    messages = [[bytes([n]) * size for size in (5, 0, 1000, 100_000)] for n in range(4)]
    kept = []
    for message in messages:
        transport.send(0, message)
        kept.append(transport.receive(0, LONG_S))
    assert [received(message) for message in kept] == messages
    assert all(frame.readonly is False for message in kept for frame in message)


def test_what_is_sent_before_a_rank_has_come_waits_for_it(start: Any, directory: Path) -> None:
    """Its directory is open to nobody else, and gone when it has come."""
    may_come = threading.Event()

    def late(endpoint: str) -> None:
        may_come.wait(LONG_S)
        echo(endpoint)

    transport, ranks = start(late, echo)
    for rank in range(2):
        transport.send(rank, [b"early", BIG])
    assert received(transport.receive(1, LONG_S)) == [b"early", BIG]
    assert transport.receive(0, 0.05) is None
    (left,) = directory.iterdir()
    assert left == Path(ranks[0].endpoint).parent and left.stat().st_mode & 0o777 == 0o700
    may_come.set()
    assert received(transport.receive(0, LONG_S)) == [b"early", BIG]
    assert list(directory.iterdir()) == []


def test_a_rank_started_anew_gets_nothing_of_what_was(start: Any) -> None:
    """The old one learns that the driver is gone, in a message or between two; one that never came finds no driver."""
    may_come, never = threading.Event(), threading.Event()

    def late(endpoint: str) -> None:
        may_come.wait(LONG_S)
        echo(endpoint)

    def silent(endpoint: str) -> None:
        serve(endpoint, 0.0, lambda message: [b"", b""][: never.wait(LONG_S)])

    transport, (first, second, third) = start(echo, late, silent)
    for rank in range(3):
        transport.send(rank, [BIG])
    assert transport.receive(0, LONG_S) is not None
    assert transport.receive(2, 0.05) is None
    for rank in range(3):
        transport.start(rank, Rank(echo))
        transport.send(rank, [b"anew"])
        assert received(transport.receive(rank, LONG_S)) == [b"anew"]
    may_come.set()
    never.set()
    assert str(first.error()) == "the driver has closed its connection"
    assert str(second.error()).startswith(f"no driver listens at {second.endpoint}: ")
    assert isinstance(third.error(), ConnectionError)


def test_close_ends_the_ranks(start: Any) -> None:
    transport, ranks = start(echo, echo, echo, spin_s=0.02)
    transport.send(0, [b"x"])
    assert transport.receive(0, LONG_S) is not None
    transport.close()
    transport.close()
    assert all(isinstance(rank.error(), ConnectionError) for rank in ranks)


def test_timeouts(start: Any) -> None:
    """0.0 looks whether an answer is there; one that comes while `receive` waits is returned then."""
    go = threading.Event()

    def answer(message: list[memoryview]) -> list:
        go.wait(LONG_S)
        return [b"late"]

    transport, _ = start(lambda endpoint: serve(endpoint, 0.0, answer))
    transport.send(0, [b"x"])
    assert transport.receive(0, 0.0) is None and transport.receive(0, 1e-9) is None
    begin = time.monotonic()
    assert transport.receive(0, 0.1) is None and time.monotonic() - begin >= 0.1
    threading.Timer(0.1, go.set).start()
    assert received(transport.receive(0, LONG_S)) == [b"late"]
    go.clear()
    transport.send(0, [b"x"])
    go.set()
    end = time.monotonic() + LONG_S
    while (message := transport.receive(0, 0.0)) is None:
        assert time.monotonic() < end
    assert received(message) == [b"late"]


@pytest.mark.parametrize("spin_s", [0.0, 0.05, LONG_S])
def test_meanwhile(start: Any, spin_s: float) -> None:
    """Called between looks, while it does not sleep, with the time since the send; an answer ends it."""
    go = threading.Event()

    def answer(message: list[memoryview]) -> list:
        go.wait(LONG_S)
        return list(message)

    transport, (rank,) = start(lambda endpoint: serve(endpoint, 0.0, answer), spin_s=spin_s)
    assert (rank.spin_s > 0) == (spin_s > 0)
    calls: list[float] = []
    transport.meanwhile = calls.append
    transport.send(0, [b"x"])
    assert transport.receive(0, 0.0) is None and calls == []
    assert transport.receive(0, 0.1) is None
    assert len(calls) >= 2 if spin_s else calls == []
    assert calls == sorted(calls) and all(0 <= waited_s < spin_s for waited_s in calls)
    threading.Timer(0.1, go.set).start()
    assert received(transport.receive(0, LONG_S)) == [b"x"]


def test_a_dead_rank_is_not_the_end_of_a_script_that_sigpipe_ends(start: Any) -> None:
    transport, (rank,) = start(lambda endpoint: connected(endpoint).close())
    rank.thread.join(LONG_S)
    signals: list[object] = []
    before = signal.signal(signal.SIGPIPE, lambda *sent: signals.append(sent))
    transport.send(0, [BIG])
    signal.signal(signal.SIGPIPE, before)
    assert signals == [] and transport.receive(0, 0.0) is None


DRIVER = f"""
import sys, time
sys.path.insert(0, {str(Path(tpverify.__file__).parents[1])!r})
import subprocess
from types import SimpleNamespace
from tpverify.runtime.transport import SocketTransport

RANK = '''
import sys
sys.path.insert(0, {str(Path(tpverify.__file__).parents[1])!r})
from tpverify.runtime.transport import serve
serve(sys.argv[1], 0.0, list)
'''
def remote(endpoint, spin_s):
    return subprocess.Popen([sys.executable, "-c", RANK, endpoint], stdin=subprocess.DEVNULL)

transport = SocketTransport(2)
ranks = [transport.start(rank, SimpleNamespace(run=SimpleNamespace(remote=remote))) for rank in range(2)]
for rank in range(2):
    transport.send(rank, [b"x"])
    assert transport.receive(rank, 60) is not None
print(*(rank.pid for rank in ranks), flush=True)
transport.send(0, [bytes(1 << 24)])
time.sleep(60)
"""


def test_a_killed_driver_leaves_no_file_and_its_ranks_end(directory: Path) -> None:
    """In the middle of a message and between two: by themselves, without Ray to end them."""
    environment = os.environ | {"TMPDIR": str(directory)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2, driver.communicate()[1]
    assert os.listdir(directory) == []
    os.kill(driver.pid, signal.SIGKILL)
    _, errors = driver.communicate(timeout=60)  # returns when the ranks have closed what they inherited
    assert errors.count("ConnectionResetError: ") == 2, errors
    assert not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
