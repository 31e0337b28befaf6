"""Messages through a stream that takes and gives them in pieces of any size."""

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from tpverify.runtime.connection import HEAD_BYTES, Connection


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_around_the_size_of_what_goes_in_one_piece(ends: tuple[socket.socket, socket.socket]) -> None:
    """The sender's socket takes a few kilobytes at a time, and what has come so far is looked for in between."""
    for end in ends:
        end.setblocking(False)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver, draw = Connection("it", ends[0]), Connection("us", ends[1]), random.Random(0)
    for case in range(300):
        count, around = draw.choice((0, 1, 1, 2, 5, 4096)), draw.choice((0, 100, HEAD_BYTES, 3 * HEAD_BYTES))
        header = draw.randint(0, 1) * 8 * (1 + count)
        total = max(0, around + draw.randint(-3, 3) - header)
        cuts = sorted(draw.randint(0, total) for _ in range(count - 1)) if count else []
        raw = draw.randbytes(total)
        frames = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, total], strict=True)] if count else []
        sender.send(frames)
        while True:
            sender.flush()
            with suppress(BlockingIOError):
                received = receiver.receive()
                break
        assert [bytes(frame) for frame in received] == frames and sender.unsent == [], case
        assert not any(frame.readonly for frame in received)


@pytest.mark.parametrize("size", [10, HEAD_BYTES])
def test_frames_that_do_not_lie_in_one_piece_are_refused(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    """Whole messages go out, or nothing does."""
    connection = Connection("it", ends[0])
    with pytest.raises(TypeError, match="C-contiguous"):
        connection.send([b"first", memoryview(bytes(2 * size))[::2]])
    assert connection.unsent == []
    connection.send([memoryview(np.arange(6, dtype="<i2").reshape(2, 3)), b"", memoryview(np.zeros((0, 3)))])
    received = Connection("us", ends[1]).receive()
    assert [bytes(frame) for frame in received] == [np.arange(6, dtype="<i2").tobytes(), b"", b""]
