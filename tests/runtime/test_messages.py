"""Messages: what is sent arrives, and anything else is answered with an error."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpverify.kv.log import Append, Close, Commit, Draft, Fork, Open
from tpverify.runtime import messages
from tpverify.runtime.frames import frame_of, tensor_of
from tpverify.runtime.messages import (
    Attend,
    Configure,
    ContentDigest,
    Ping,
    Reply,
    Step,
    TreeRequest,
    Write,
)
from tpverify.runtime.rank import TABLES, RankServer

ENTRIES = [Open(0), Append(0, b"\1\0\0\0"), Draft(0, b"\2\0\0\0"), Commit(0, b"\0\0\0\0"), Fork(0, 1), Close(1)]
WORKS = [
    Configure(2, 16, "attention", {"num_heads": 8}, "/tmp/rendezvous"),
    Write(3, 0, 5),
    Attend([TreeRequest(3, 2, b"\1" * 16, b"\0" * 8)], 0.125),
    ContentDigest(3),
    Ping(),
]


def answer(server: RankServer, *message: bytes) -> tuple[Reply, list]:
    reply, *frames = server.answer([memoryview(frame) for frame in message])
    return messages.decode_reply(reply), frames


@pytest.mark.parametrize("work", WORKS, ids=lambda work: type(work).__name__)
def test_step_round_trip(work: messages.Work) -> None:
    step = Step(7, 4, ENTRIES, work)
    assert messages.decode_step(messages.encode(step)) == step


def test_reply_round_trip() -> None:
    reply = Reply(7, 3, "0123456789abcdef", None, msgspec.msgpack.encode("x"), {"total": 0.5})
    assert messages.decode_reply(messages.encode(reply)) == reply


PING = msgspec.msgpack.encode([1, 1, [], ["Ping"]])
MALFORMED = {
    "empty": b"",
    "truncated": PING[:-2],
    "trailing bytes": PING + b"\0",
    "not msgpack": b"\xc1",
    "pickle": b"\x80\x04N.",
    "a map": msgspec.msgpack.encode({"number": 1}),
    "too few fields": msgspec.msgpack.encode([1, 1, []]),
    "unknown work": msgspec.msgpack.encode([1, 1, [], ["Eval", "1"]]),
    "unknown entry": msgspec.msgpack.encode([1, 1, [["Drop", 0]], ["Ping"]]),
    "work without tag": msgspec.msgpack.encode([1, 1, [], []]),
    "number as text": msgspec.msgpack.encode(["1", 1, [], ["Ping"]]),
    "slots as list": msgspec.msgpack.encode([1, 1, [["Append", 0, [1]]], ["Ping"]]),
    "sequence as float": msgspec.msgpack.encode([1, 1, [["Open", 0.5]], ["Ping"]]),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_message_is_answered_with_an_error(raw: bytes) -> None:
    server = RankServer(2, "cpu", False, 1.0)
    reply, frames = answer(server, raw)
    assert (reply.number, reply.rank, frames) == (-1, 2, [])
    assert reply.error is not None
    assert answer(server, PING)[0].error is None, "the next message is served"


@given(st.binary(max_size=200))
def test_no_bytes_at_all_break_a_rank(raw: bytes) -> None:
    server = RankServer(0, "cpu", False, 1.0)
    answer(server, raw)
    assert answer(server, PING)[0].error is None


def test_message_without_frames() -> None:
    assert answer(RankServer(0, "cpu", False, 1.0))[0].error is not None


def test_ping_returns_its_frames() -> None:
    assert answer(RankServer(0, "cpu", False, 1.0), PING, b"", b"abc")[1] == [b"", b"abc"]


def test_entries_are_applied_before_the_work_and_counted_in_the_digest() -> None:
    server = RankServer(0, "cpu", False, 1.0)
    configure = Configure(1, 16, TABLES, {}, "")
    empty = answer(server, messages.encode(Step(1, 1, [], configure)))[0]
    opened = answer(server, messages.encode(Step(2, 1, [Open(0)], Ping())))[0]
    assert empty.error is None and opened.error is None
    assert opened.digest != empty.digest


def test_gap_in_the_log_fences_the_rank_until_it_is_configured_again() -> None:
    server = RankServer(0, "cpu", False, 1.0)
    configure = messages.encode(Step(1, 1, [], Configure(1, 16, TABLES, {}, "")))
    answer(server, configure)
    for message in (Step(2, 2, [Open(0)], Ping()), Step(3, 1, [], Ping())):
        error = answer(server, messages.encode(message))[0].error
        assert error is not None and error.startswith("Fenced: entry 1 is missing")
    assert answer(server, configure)[0].error is None


@pytest.mark.parametrize("kind", ["no such worker", "os:system"])
def test_only_known_workers_are_built(kind: str) -> None:
    step = Step(1, 1, [], Configure(1, 16, kind, {}, ""))
    error = answer(RankServer(0, "cpu", False, 1.0), messages.encode(step))[0].error
    assert error is not None and kind in error


def test_work_without_a_worker() -> None:
    error = answer(RankServer(0, "cpu", False, 1.0), messages.encode(Step(1, 1, [], ContentDigest(0))))[0].error
    assert error is not None and "ContentDigest" in error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(3, 4), (1,), (2, 0, 5)])
def test_tensor_frames_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    received = tensor_of(bytes(frame_of(tensor)), dtype, shape)
    assert received.dtype == dtype and torch.equal(received, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.chunk(2, dim=2)[1],  # a rank's heads
        lambda x: x[:, 1:3, ::2],
        lambda x: x[..., ::2],
        lambda x: x.transpose(1, 3),
        lambda x: x[:1, :1, :1, :1].expand(2, 3, 4, 5),
        lambda x: x[..., :1].expand(2, 5, 4, 6),
        lambda x: x[:, :, :0],
    ],
)
def test_frame_of_a_strided_tensor_is_in_row_major_order(cut: Callable, dtype: torch.dtype) -> None:
    tensor = cut(torch.randn(2, 5, 4, 6).to(dtype))
    assert bytes(frame_of(tensor)) == bytes(
        torch.clone(tensor, memory_format=torch.contiguous_format).untyped_storage()
    )


@pytest.mark.parametrize("size", [0, 15, 17, 32])
def test_frame_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"expected 16 bytes.*got {size}"):
        tensor_of(bytes(size), torch.float32, (2, 2))
