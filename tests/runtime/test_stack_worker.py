"""The stack's rank without a GPU: graphs run directly, events and pinned memory are stand-ins, the rest is as it is."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.kv.log import KvLog, Replica
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.stack import PARTS
from tpverify.ops.attention import VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.runtime import graphs, stack_worker
from tpverify.runtime.device import check_room
from tpverify.runtime.messages import ContentDigest, Decode, DecodeRequest, HiddenDigest
from tpverify.tree import DraftTree, accept_greedy

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=64, num_hidden_layers=2, num_attention_heads=8, intermediate_size=1, kv_lora_rank=512,
    qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=16, max_position_embeddings=4096, q_lora_rank=32,
)  # fmt: skip
SLOTS = 512


class Alone:
    rank, size, waits = 0, 1, 0

    def wait(self, stream: object = None, meanwhile: Callable[[float], None] = lambda _: None) -> None:
        """A long one, and the beginning of the next."""
        self.waits += 1
        for waited_s in (0.0, 1.0, 0.0):
            meanwhile(waited_s)


class Direct:
    """In place of a recorder: every replay runs the body."""

    def __init__(self, wait: Callable[[object], None]) -> None:
        pass

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> stack_worker.StackWorker:
    monkeypatch.setattr(graphs, "Recorder", Direct)
    options = {
        "config": vars(CONFIG), "num_slots": SLOTS, "buckets": [[1, 7], [2, 16]], "parts": list(PARTS), "seed": 5,
    }  # fmt: skip
    return stack_worker.StackWorker(Alone(), "cpu", options)  # type: ignore[arg-type]


def decode(trees: dict[int, DraftTree]) -> Decode:
    return Decode(
        [DecodeRequest(seq, t.tokens.tobytes(), t.parents.tobytes(), False, 0.0, 0, 0) for seq, t in trees.items()]
    )


def expected(worker: stack_worker.StackWorker, pool: torch.Tensor, log: KvLog, trees: dict[int, DraftTree]) -> list:
    """Of the same stack, fed by hand."""
    n = sum(map(len, trees.values()))
    plan = VerifyPlan(MlaGeometry(8), 4, 16, 4 * SLOTS, "cpu")
    plan.update([VerifyRequest(log.prefix_slots(seq), log.tree_slots(seq), tree) for seq, tree in trees.items()])
    lse = torch.empty(n, 8)
    hidden = worker.stack(
        worker.stack.buffers(n),
        torch.cat([torch.from_numpy(tree.tokens.copy()) for tree in trees.values()]),
        torch.cat([log.length(seq) + torch.from_numpy(tree.depths.copy()).long() for seq, tree in trees.items()]),
        torch.cat([torch.from_numpy(log.tree_slots(seq).copy()).long() for seq in trees]),
        pool,
        lambda layer, q, out: plan.run(q, pool[layer], out, lse, CONFIG.softmax_scale),
        lambda values: values,
    )
    choices = (hidden.float() @ worker.stack.head.float()).argmax(1).numpy()
    parts = np.split(choices, np.cumsum([len(tree) for tree in trees.values()])[:-1])
    return [accept_greedy(tree, part) for tree, part in zip(trees.values(), parts, strict=True)]


def apply(log: KvLog, replica: Replica) -> Replica:
    replica.apply(*log.pending())
    return replica


def test_steps_are_those_of_the_stack_fed_by_hand(worker: stack_worker.StackWorker) -> None:
    """Appends, drafts and commits through the log; two buckets; what is committed is read by later steps."""
    log, replica, draw = KvLog(SLOTS), Replica(SLOTS), np.random.default_rng(0)
    pool = worker.pool.clone()
    assert pool.std() > 0.9 and not torch.equal(pool[0], pool[1])
    one, two = log.open(), log.open()
    log.append(one, 100)
    log.append(two, 3)
    chain = DraftTree.chain(draw.integers(0, 40, 8))
    fan = DraftTree.from_parents([*draw.integers(0, 40, 2), 1, 2, 3, 4, 5, 6], [-1, 0, 1, 1, 1, 1, 1, 1])
    fresh = worker.kept.answer(ContentDigest(one), apply(log, replica))
    for trees in ({one: chain}, {one: chain, two: fan}, {two: chain}):
        for seq, tree in trees.items():
            log.draft(seq, len(tree))
        result, frames = worker.handle(decode(trees), [], apply(log, replica))
        wanted = expected(worker, pool, log, trees)
        assert frames == [] and worker.comm.waits
        for got, want, seq in zip(result.requests, wanted, trees, strict=True):
            assert np.frombuffer(got.path, "<i4").tolist() == want.path.tolist() and got.bonus == want.bonus
            log.commit(seq, want.path)
        assert torch.equal(worker.pool[:, 1:], pool[:, 1:]), "rows of the trees, and no others but the sink's"
        assert set(result.seconds) == {"plan", "layers", "head", "accept"}
        assert min(result.seconds.values()) > 0
        msgspec.msgpack.encode(result)
    assert worker.kept.answer(ContentDigest(one), apply(log, replica)) != fresh


def test_what_it_does_not_do(worker: stack_worker.StackWorker) -> None:
    log, replica = KvLog(SLOTS), Replica(SLOTS)
    seq = log.open()
    log.draft(seq, 17)
    replica.apply(*log.pending())
    with pytest.raises(
        ArgumentError, match="requests: expected at most 1 with 8 nodes, 2 with 16 nodes, got 1 with 17"
    ):
        worker.handle(decode({seq: DraftTree.chain(range(17))}), [], replica)
    log.draft(seq, 1)
    replica.apply(*log.pending())
    for token in (40, -1):
        asked = DecodeRequest(seq, np.int64([token]).tobytes(), np.int32([-1]).tobytes(), False, 0.0, 0, 0)
        with pytest.raises(ValueError, match=f"tokens: expected ids from 0 to 39, got {token}"):
            worker.handle(Decode([asked]), [], replica)
    with pytest.raises(TypeError, match="cannot do HiddenDigest"):
        worker.handle(HiddenDigest(seq, 1), [], replica)


def test_a_pool_without_room_says_how_many_slots_there_are() -> None:
    """So many that graphs and a step fit beside them: it said how many would fill the GPU, and these ended in a capture
    out of memory."""
    gib = 1 << 30
    step = 80 * gib // 64
    check_room(64, 1 << 20, 1024, 64 * gib + step, 80 * gib)
    text = "at most 63.00 GiB, free of the GPU's 80.00: 1032192 slots, got 1048576 slots, 64.00 GiB"
    with pytest.raises(ArgumentError, match=text) as error:
        check_room(64, 1 << 20, 1024, 63 * gib + step, 80 * gib)
    assert error.value.argument == "num_slots"


def test_the_wait_for_a_gpu_launches_a_graph_too(worker: stack_worker.StackWorker) -> None:
    """A first launch after 20 ms takes three times as long as the next."""
    worker._rehearsal._written.fill_(1)
    worker._rehearsal.rehearse()
    assert worker._rehearsal._written.item() == 0
