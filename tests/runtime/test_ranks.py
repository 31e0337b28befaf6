"""A group of ranks and its coordinator: steps, both transports, and the ways in which a rank or a start can fail."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from tpverify.errors import ArgumentError, ClusterError, RankFailure
from tpverify.kv.log import Open
from tpverify.runtime import cluster, messages
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import ContentDigest, Ping, Step
from tpverify.runtime.rank import TABLES
from tpverify.runtime.ranks import RankGroup

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def coordinator(group: RankGroup, **options: Any) -> Coordinator:
    return Coordinator(group, TABLES, {}, num_slots=64, **options)


def process_ended(pid: int) -> bool:
    """Gone, waiting for its parent, or being reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread has stopped: until then it may well answer a step."""
    os.kill(pid, signal.SIGSTOP)
    while {task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")} != {
        "T"
    }:
        time.sleep(0.01)


def placements() -> dict[str, str]:
    return {key: row["state"] for key, row in placement_group_table().items() if row["state"] != "REMOVED"}


@contextmanager
def released() -> Iterator[None]:
    """What was there before is there after: no placement group, no file, no socket more."""

    def now() -> tuple:
        return placements(), os.listdir(tempfile.gettempdir())

    before = now()
    yield
    for _ in range(50):  # Ray removes a placement group in the background
        if now() == before:
            return
        time.sleep(0.1)
    assert now() == before


@pytest.mark.parametrize("transport", ["socket", "ray"])
def test_a_group_from_start_to_end(transport: str) -> None:
    """Frames reach the ranks that they are meant for, log entries reach all, closing ends every process."""
    with released():
        with RankGroup(3, "cpu", transport=transport) as group:
            steps = coordinator(group)
            first, second = steps.log.open(), steps.log.open()
            steps.log.append(first, 5)
            answers = steps.step(Ping(), [b"all", b""], [[b"zero"], [], [b"two", b"too"]])
            frames = [[bytes(frame) for frame in answer.frames] for answer in answers]
            assert frames == [[b"all", b"", b"zero"], [b"all", b""], [b"all", b"", b"two", b"too"]]
            assert [answer.reply.rank for answer in answers] == [0, 1, 2]

            steps.log.draft(second, 3)
            steps.log.commit(second, [0, 2])
            digests = steps.digests()
            assert list(digests) == ["driver", 0, 1, 2]
            assert set(digests.values()) == {steps.log.digest()}
            pids = group.pids
            assert len(set(pids)) == 3 and not any(map(process_ended, pids))
        assert all(map(process_ended, pids))
        group.close()
        with pytest.raises(ClusterError, match="closed"):
            steps.step(Ping())


def test_large_frames_survive(ranks: RankGroup) -> None:
    big = os.urandom(3 << 20)
    answers = coordinator(ranks).step(Ping(), [big], [[bytes([rank])] for rank in range(ranks.size)])
    assert [(answer.frames[0] == big, bytes(answer.frames[1])) for answer in answers] == [
        (True, bytes([rank])) for rank in range(ranks.size)
    ]


def test_a_smaller_tp_leaves_the_other_ranks_alone(ranks: RankGroup) -> None:
    small = coordinator(ranks, tp=2)
    small.log.open()
    assert list(small.digests()) == ["driver", 0, 1]
    large = coordinator(ranks)
    assert set(large.digests().values()) == {large.log.digest()}


@pytest.mark.parametrize("group", [None, 4, "group"])
def test_a_coordinator_needs_a_group(group: Any) -> None:
    with pytest.raises(ArgumentError, match="^group: expected a RankGroup"):
        coordinator(group)


def test_a_log_that_no_rank_follows_cannot_be_changed(ranks: RankGroup) -> None:
    """Taken over by a later coordinator, or closed: not a word more reaches the log, and none is promised."""
    first = coordinator(ranks)
    seq = first.log.open()
    before = first.stats()
    second = coordinator(ranks)
    for _ in range(2):
        with pytest.raises(ClusterError, match="has ended"):
            first.log.append(seq, 3)
        with pytest.raises(ClusterError, match="has ended"):
            first.digests()
        assert first.stats() == before
        first.close()
    assert set(second.digests().values()) == {second.log.digest()}


@pytest.mark.parametrize("tp", [0, 5, True])
def test_tp_is_at_most_the_group(ranks: RankGroup, tp: int) -> None:
    with pytest.raises(ArgumentError, match="tp: expected an int from 1 to 4"):
        coordinator(ranks, tp=tp)


def test_bad_message_is_answered_and_the_rank_lives_on(ranks: RankGroup) -> None:
    pids = list(ranks.pids)
    for raw in (b"\xc1", msgspec.msgpack.encode([1, 1, [], ["Eval", "1"]])):
        ranks.transport.send(1, [raw])
        answer = ranks.transport.receive(1, 10)
        assert answer is not None
        reply = messages.decode_reply(answer[0])
        assert reply.number == -1 and reply.error is not None
    assert len(coordinator(ranks).digests()) == 5
    assert not any(map(process_ended, pids))


def test_killed_rank_is_named_at_once_and_a_new_group_starts() -> None:
    """vllm#53157: the reason of a rank's death was lost, and the service went on saying that it was ready."""
    with released():
        group = RankGroup(3, "cpu", deadline_s=60)
        steps = coordinator(group)
        pids = group.pids
        stop(pids[1])  # so that the step is still under way when the rank dies
        threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(RankFailure, match="rank 1 failed at step 2: its process is gone") as failure:
            steps.step(Ping())
        assert time.monotonic() - start < 5
        assert (failure.value.rank, failure.value.step) == (1, 2)
        assert all(map(process_ended, pids))
        with RankGroup(1, "cpu") as again:
            assert coordinator(again).digests()[0]


def test_hung_rank_is_named_at_the_deadline() -> None:
    """vllm#50835: a step without a deadline hung for good."""
    with released():
        group = RankGroup(3, "cpu", deadline_s=1)
        steps = coordinator(group)
        pids = group.pids
        stop(pids[2])
        with pytest.raises(RankFailure, match="rank 2 failed at step 2: no answer within 1 s, nor to a ping"):
            steps.step(Ping())
        assert all(map(process_ended, pids)), "a stopped process is ended too"


def test_diverged_rank_is_named() -> None:
    """A rank that applied an entry of its own answers with another digest."""
    with released():
        group = RankGroup(2, "cpu")
        steps = coordinator(group)
        group.transport.send(1, [messages.encode(Step(99, 1, [Open(7)], Ping()))])
        assert group.transport.receive(1, 10) is not None
        with pytest.raises(RankFailure, match="rank 1 failed at step 2: its tables diverged"):
            steps.step(Ping())
        assert group.closed


def test_contradicted_rank_is_fenced() -> None:
    """The same number with another body: the rank itself refuses to go on."""
    with released():
        group = RankGroup(2, "cpu")
        steps = coordinator(group)
        group.transport.send(0, [messages.encode(Step(99, 1, [Open(7)], Ping()))])
        assert group.transport.receive(0, 10) is not None
        steps.log.open()
        with pytest.raises(RankFailure, match="rank 0 failed at step 2: Fenced: entry 1 was repeated"):
            steps.step(Ping())


def test_error_on_a_rank_is_a_failure_with_its_text() -> None:
    with released():
        group = RankGroup(1, "cpu")
        steps = coordinator(group)
        with pytest.raises(RankFailure, match="rank 0 failed at step 2: RuntimeError: this rank has no worker"):
            steps.step(ContentDigest(0))
        assert group.closed


def test_groups_one_after_another_and_side_by_side() -> None:
    with released():
        first = RankGroup(1, "cpu")
        second = RankGroup(1, "cpu")
        one, two = coordinator(first), coordinator(second)
        one.log.open()
        assert one.digests()["driver"] != two.digests()["driver"]
        first.close()
        assert two.digests()[0] == two.log.digest(), "closing one leaves the other and their Ray alone"
        second.close()
        assert ray.is_initialized(), "Ray ends with who started it"


def test_a_fork_of_the_driver_leaves_the_ranks_alone(ranks: RankGroup) -> None:
    """Steps of two processes on one connection would be mixed up; and Ray's calls never return in a fork."""
    steps = coordinator(ranks)
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(ClusterError, match=f"process {os.getppid()}'s, of which this one is a fork"):
                steps.step(Ping())
            with pytest.raises(ClusterError, match="a fork"):
                ranks.call(Step(1, 1, [], Ping()))
            ranks.close()
            os._exit(0)
        finally:
            os._exit(1)
    end = time.monotonic() + 20
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ended == (pid, 0)
    assert len(set(steps.digests().values())) == 1


def test_a_driver_with_thousands_of_descriptors() -> None:
    """A handle of a rank's process is then a number that select() does not take."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with RankGroup(2, "cpu") as group:
            assert len(set(coordinator(group).digests().values())) == 1
            stop(group.pids[1])
        assert all(map(process_ended, group.pids))
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_no_file_stays_while_ranks_run(ranks: RankGroup) -> None:
    assert [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tpverify-")] == []


def test_socket_path_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with released(), pytest.raises(ClusterError, match="shorter TMPDIR"):
        RankGroup(1, "cpu")


def test_a_deadline_far_too_short_is_a_rank_failure() -> None:
    """A step then fails in the documented way; Ray's own GetTimeoutError came from the start of the ranks."""
    with released():
        group = RankGroup(2, "cpu", deadline_s=1e-9)
        steps = coordinator(group)
        stop(group.pids[1])
        with pytest.raises(RankFailure, match="^rank 1 failed at step 2: no answer within 1e-09 s"):
            steps.step(Ping())
        assert group.closed


def test_more_gpus_than_the_node_has() -> None:
    with released(), pytest.raises(ClusterError, match="1000 ranks with 1 GPU each .*the cluster has .* GPUs and"):
        RankGroup(1000, "cuda")


def test_place_that_is_taken_is_an_error_at_the_deadline() -> None:
    """ray#64035: a placement group that nobody removes keeps the next one pending for ever."""
    taken = placement_group([{f"node:{cluster.this_node().address}": 0.95}])
    assert taken.wait(10)
    try:
        with released(), pytest.raises(ClusterError, match="1000 ranks with 0 GPU each .* within 1 s; the cluster has"):
            RankGroup(1000, "cpu", deadline_s=1)
    finally:
        remove_placement_group(taken)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"size": 0}, "size"),
        ({"size": 1025}, "size"),
        ({"size": 2.0}, "size"),
        ({"size": 1, "device": "tpu"}, "device"),
        ({"size": 1, "transport": "tcp"}, "transport"),
        ({"size": 1, "deadline_s": 0}, "deadline_s"),
        ({"size": 1, "deadline_s": float("nan")}, "deadline_s"),
        ({"size": 1, "deadline_s": float("inf")}, "deadline_s"),
        ({"size": 1, "deadline_s": "30"}, "deadline_s"),
        ({"size": 1, "deadline_s": True}, "deadline_s"),
        ({"size": 1, "deadline_s": None}, "deadline_s"),
        ({"size": True}, "size"),
        ({"size": 1, "device": None}, "device"),
        ({"size": 1, "transport": ["socket"]}, "transport"),
        ({"size": 1, "oversubscribe": 1}, "oversubscribe"),
    ],
)
def test_bad_arguments(options: dict, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        RankGroup(**options)
    assert error.value.argument == argument
