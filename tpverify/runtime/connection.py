"""Messages of several frames over a stream socket, in few system calls and without copies of what is large. What is
small goes and comes in one piece: a list of buffers costs Python more than the copy.

A message is the number of frames and the size of each, as little-endian uint64, then the frames.
"""

import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence

from tpverify.runtime.messages import Frame

HEAD_BYTES = 1 << 16  # what is received, or copied to be sent, at once: most messages whole
SIZE = struct.Struct("<Q")
MOST_FRAMES, MOST_BYTES = 4096, 1 << 34  # of a message; its header fits into HEAD_BYTES
BUFFERS_AT_ONCE = 1024  # what the kernel takes in one call
ECHOES = ConnectionResetError, BrokenPipeError  # of a rank whose peer has left, for reasons of its own


class Connection:
    """One end. It waits, or raises BlockingIOError, as its socket does; OSError when the peer is gone."""

    def __init__(self, peer: str, stream: socket.socket) -> None:
        """peer: who that is, for error texts."""
        self.peer, self.socket = peer, stream
        self.unsent: list[memoryview] = []
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._expect_header()

    def _expect_header(self) -> None:
        self._frames: list[memoryview] | None = None
        self._missing: list[memoryview] = []  # parts of the frames
        self._got = 0  # bytes in the head

    def send(self, message: Sequence[Frame]) -> None:
        """What a socket that does not wait refuses is left in `unsent`, for `flush`."""
        views = [memoryview(frame) for frame in message]
        sizes = [view.nbytes for view in views]
        header = struct.pack(f"<{1 + len(views)}Q", len(views), *sizes)
        frames = [view.cast("B") for view in views if view.nbytes]
        if sum(sizes) < HEAD_BYTES:
            self.unsent.append(memoryview(b"".join((header, *frames))))
        else:
            self.unsent += [memoryview(header), *frames]
        self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                # A driver that lets SIGPIPE end it, as scripts whose output is cut off do, is not to end with a rank.
                if len(self.unsent) == 1:
                    sent = self.socket.send(self.unsent[0], socket.MSG_NOSIGNAL)
                else:
                    sent = self.socket.sendmsg(self.unsent[:BUFFERS_AT_ONCE], [], socket.MSG_NOSIGNAL)
                self.unsent = _after(self.unsent, sent)
        except BlockingIOError:
            pass

    def receive(self, flags: int = 0) -> list[memoryview]:
        """The next message, in memory of its own. It comes after an answer to the one before, never with it.

        flags: of the socket's call. ValueError for a header that is none: nothing is allocated for it.
        """
        while self._frames is None:
            self._got += self._some(self.socket.recv_into(self._head[self._got :], 0, flags))
            self._begin(self._got)
        while self._missing:
            count = self._some(self.socket.recvmsg_into(self._missing[:BUFFERS_AT_ONCE], 0, flags)[0])
            self._missing = _after(self._missing, count)
        frames = self._frames
        self._expect_header()
        return frames

    def _some(self, count: int) -> int:
        if count == 0:
            raise ConnectionResetError(f"{self.peer} has closed its connection")
        return count

    def _begin(self, got: int) -> None:
        """Once the header is whole, make the frames, of which some or all have come with it."""
        if got < SIZE.size:
            return
        (count,) = SIZE.unpack_from(self._head)
        begin = SIZE.size * (1 + count)
        if count > MOST_FRAMES:
            raise ValueError(f"message from {self.peer}: expected at most {MOST_FRAMES} frames, got {count}")
        if got < begin:
            return
        sizes = struct.unpack_from(f"<{count}Q", self._head, SIZE.size)
        if sum(sizes) > MOST_BYTES:
            raise ValueError(f"message from {self.peer}: expected at most {MOST_BYTES} bytes, got {sum(sizes)}")
        if got - begin > sum(sizes):
            raise ValueError(f"message from {self.peer}: expected {sum(sizes)} bytes, got {got - begin} or more")
        if sizes == (got - begin,):  # most messages
            self._frames = [memoryview(bytearray(self._head[begin:got]))]
            return
        self._frames = [memoryview(bytearray(size)) for size in sizes]
        self._missing = _after(self._frames, got - begin)
        for frame in self._frames:
            part = self._head[begin : min(begin + len(frame), got)]
            frame[: len(part)] = part
            begin += len(part)


class Link(Connection):
    """The driver's end of a connection. It listens in a directory of its own until the rank has come, never waits, and
    is silent when the rank is gone."""

    def __init__(self, peer: str) -> None:
        super().__init__(peer, socket.socket(socket.AF_UNIX))
        self._directory: str | None = tempfile.mkdtemp(prefix="tpverify-")  # mode 0700
        self.endpoint = os.path.join(self._directory, "rank")
        try:
            self.socket.setblocking(False)
            self.socket.bind(self.endpoint)
            self.socket.listen(1)
        except BaseException:
            self.close()
            raise

    @property
    def listening(self) -> bool:
        return self._directory is not None

    @property
    def gone(self) -> bool:
        return self.socket.fileno() < 0

    def send(self, message: Sequence[Frame]) -> None:
        if not self.gone:
            super().send(message)

    def flush(self) -> None:
        if self._connected():
            try:
                super().flush()
            except OSError:
                self.close()

    def look(self) -> list[memoryview] | None:
        """The next message, if all of it is there."""
        if self._connected():
            try:
                return self.receive()
            except BlockingIOError:
                pass
            except OSError:
                self.close()
        return None

    def close(self) -> None:
        self.socket.close()
        self._remove_directory()
        self.unsent = []

    def _connected(self) -> bool:
        if self.listening:
            try:
                stream, _ = self.socket.accept()
            except BlockingIOError:
                return False
            stream.setblocking(False)
            self.socket.close()
            self.socket = stream
            self._remove_directory()  # a driver that is killed from now on leaves nothing behind
        return not self.gone

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
