"""VerifyRuntime against a dense float64 oracle that knows nothing of slots, logs, words or ranks."""

import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError, PoolFull, RankFailure
from tpverify.runtime import runtime as runtime_module
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.accept import Accept
from tpverify.tree.draft_tree import DraftTree

pytestmark = pytest.mark.ray

HEADS, ROW, RANK = 8, 576, 512
SCALE = 0.0721  # about 1/sqrt(192)
CFG = RuntimeConfig(tp=4, device="cpu", geometry=MlaGeometry(num_heads=HEADS), num_slots=512, max_batch=3, max_nodes=70)


def random_tree(rng: np.random.Generator, n: int) -> DraftTree:
    """Node i hangs below any earlier node."""
    return DraftTree.from_parents(np.arange(n), [-1, *(int(rng.integers(0, i)) for i in range(1, n))])


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def random_draft(rng: np.random.Generator, n: int, layers: int = 1) -> Draft:
    return Draft(random_tree(rng, n), normal(rng, layers, n, HEADS, ROW), normal(rng, layers, n, ROW))


def random_path(rng: np.random.Generator, tree: DraftTree) -> Accept:
    """From the root to any node."""
    path = [int(rng.integers(0, len(tree)))]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return Accept(np.array(path, np.int32), 0)


def oracle(prefix: torch.Tensor, draft: Draft) -> tuple[np.ndarray, np.ndarray]:
    """out [layers, n, heads, 512], lse [layers, n, heads]. prefix [layers, S, 576]. Ancestors by walking up."""
    q, tree_rows = np.asarray(draft.q.double()), np.asarray(draft.tree_latents.double())
    committed = np.asarray(prefix.double())
    out, lse = np.empty((*q.shape[:3], RANK)), np.empty(q.shape[:3])
    for node in range(len(draft.tree)):
        seen, ancestor = [], node
        while ancestor >= 0:
            seen.append(ancestor)
            ancestor = int(draft.tree.parents[ancestor])
        rows = np.concatenate([committed, tree_rows[:, seen]], axis=1)  # [layers, keys, 576]
        scores = np.einsum("lhd,lkd->lhk", q[:, node], rows) * SCALE
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        out[:, node] = np.einsum("lhk,lkd->lhd", weights / total, rows[..., :RANK])
        lse[:, node] = (np.log(total) + top)[..., 0]
    return out, lse


def check(verified: Any, prefix: torch.Tensor, draft: Draft) -> None:
    out, lse = oracle(prefix, draft)
    assert verified.out.dtype == torch.float32 and verified.lse.dtype == torch.float32
    np.testing.assert_allclose(verified.out, out, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(verified.lse, lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("layers", "seed"), [(1, 0), (1, 1), (3, 2)])
def test_a_life_of_sequences(ranks: RankGroup, layers: int, seed: int) -> None:
    """Random calls; after each verify the oracle, which keeps every sequence's rows in a plain tensor, agrees."""
    rng = np.random.default_rng(seed)
    rows: dict[int, torch.Tensor] = {}
    drafts: dict[int, Draft] = {}
    verified = 0
    with VerifyRuntime(replace(CFG, num_layers=layers), group=ranks) as runtime:
        for _ in range(60):
            seqs = list(rows)
            seq = seqs[rng.integers(len(seqs))] if seqs else -1
            match rng.choice(["open", "append", "verify", "verify", "commit", "fork", "close"]):
                case "open" if len(rows) < 4:
                    rows[runtime.open()] = torch.empty(layers, 0, ROW)
                case "append" if seqs and rows[seq].shape[1] < 80:
                    new = normal(rng, layers, int(rng.integers(1, 40)), ROW)
                    runtime.append(seq, new)
                    rows[seq] = torch.cat([rows[seq], new], dim=1)
                    drafts.pop(seq, None)
                case "verify" if seqs:
                    batch = rng.permutation(seqs)[:2].tolist()
                    step = {seq: random_draft(rng, int(rng.integers(1, 20)), layers) for seq in batch}
                    results = runtime.verify(step, softmax_scale=SCALE)
                    assert list(results) == batch
                    for seq in batch:
                        check(results[seq], rows[seq], step[seq])
                    drafts |= step
                    verified += 1
                case "commit" if seq in drafts:
                    accepted = random_path(rng, drafts[seq].tree)
                    runtime.commit(seq, accepted)
                    rows[seq] = torch.cat([rows[seq], drafts.pop(seq).tree_latents[:, accepted.path]], dim=1)
                case "fork" if seqs and len(rows) < 4:
                    rows[runtime.fork(seq)] = rows[seq]
                case "close" if len(seqs) > 2:
                    runtime.close(seq)
                    del rows[seq]
                    drafts.pop(seq, None)
            assert {seq: runtime.length(seq) for seq in rows} == {seq: rows[seq].shape[1] for seq in rows}
        assert verified > 5
        assert len(set(runtime.digests().values())) == 1
        for seq in rows:
            assert len(set(runtime.content_digest(seq).values())) == 1
        stats = runtime.stats()
        assert stats["free"] + stats["live"] + stats["scratch"] == CFG.num_slots - 1
        for seq in rows:
            runtime.close(seq)
        assert runtime.stats()["free"] == CFG.num_slots - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tp_gives_the_same_bits(ranks: RankGroup, dtype: str) -> None:
    rng = np.random.default_rng(3)
    prefixes = [normal(rng, 130, ROW).to(getattr(torch, dtype)), normal(rng, 7, ROW).to(getattr(torch, dtype))]
    drafts = [random_draft(rng, n) for n in (65, 9)]
    drafts = [Draft(d.tree, d.q.to(prefixes[0].dtype), d.tree_latents.to(prefixes[0].dtype)) for d in drafts]
    outcomes = []
    for tp in (1, 2, 4):
        with VerifyRuntime(replace(CFG, tp=tp, dtype=dtype), group=ranks) as runtime:
            seqs = [runtime.open(), runtime.open()]
            for seq, prefix in zip(seqs, prefixes, strict=True):
                runtime.append(seq, prefix)
            step = runtime.verify(dict(zip(seqs, drafts, strict=True)), softmax_scale=SCALE)
            digests = runtime.content_digest(seqs[0])
            assert list(digests) == list(range(tp)) and len(set(digests.values())) == 1
            outcomes.append([step[seq] for seq in seqs] + [digests[0]])
    for first, second, digest in outcomes[1:]:
        for got, expected in ((first, outcomes[0][0]), (second, outcomes[0][1])):
            assert got.out.dtype == getattr(torch, dtype)
            assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)
        assert digest == outcomes[0][2]


def test_both_transports_give_the_same_bits(ray_session: None, ranks: RankGroup) -> None:
    rng = np.random.default_rng(4)
    prefix, draft = normal(rng, 33, ROW), random_draft(rng, 12)
    results = []
    with RankGroup(2, "cpu", deadline_s=60, transport="ray") as calls:
        for group in (ranks, calls):
            with VerifyRuntime(replace(CFG, tp=2), group=group) as runtime:
                seq = runtime.open()
                runtime.append(seq, prefix)
                verified = runtime.verify({seq: draft}, softmax_scale=SCALE)[seq]
                runtime.commit(seq, random_path(np.random.default_rng(5), draft.tree))
                results.append((verified, runtime.digests(), runtime.content_digest(seq)))
    (sockets, *rest), (plain, *plain_rest) = results
    assert torch.equal(sockets.out, plain.out) and torch.equal(sockets.lse, plain.lse)
    assert rest == plain_rest


def test_a_rank_lost_in_mid_step_is_the_one_named(ray_session: None) -> None:
    """Rank 0, which gathers from the dead one, sees an error of its own: that must not hide the cause."""
    rng = np.random.default_rng(6)
    with VerifyRuntime(replace(CFG, tp=2, deadline_s=60)) as runtime:
        seq = runtime.open()
        pid = runtime._group.pids[1]
        os.kill(pid, signal.SIGSTOP)  # and a moment to take effect
        time.sleep(0.5)
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(RankFailure) as failure:
            runtime.verify({seq: random_draft(rng, 5)}, softmax_scale=SCALE)
        assert (failure.value.rank, failure.value.step) == (1, 2)


def test_layers_axis_is_left_out_if_it_was_left_out(ranks: RankGroup) -> None:
    """Also: numpy goes in, strided tensors go in, and what comes out is the caller's own."""
    rng = np.random.default_rng(7)
    draft = random_draft(rng, 6)
    flat = Draft(draft.tree, draft.q[0].numpy(), draft.tree_latents[0].T.contiguous().T)
    with VerifyRuntime(CFG, group=ranks) as runtime:
        seq = runtime.open()
        runtime.append(seq, normal(rng, 5, ROW).numpy())
        full = runtime.verify({seq: draft}, softmax_scale=SCALE)[seq]
        kept = full.out.clone()
        part = runtime.verify({seq: flat}, softmax_scale=SCALE)[seq]
        assert full.out.shape == (1, 6, HEADS, RANK) and full.lse.shape == (1, 6, HEADS)
        assert part.out.shape == (6, HEADS, RANK) and part.lse.shape == (6, HEADS)
        assert torch.equal(part.out, full.out[0]) and torch.equal(part.lse, full.lse[0])
        part.out.zero_()
        draft.q.zero_()
        runtime.verify({seq: draft}, softmax_scale=SCALE)
        assert torch.equal(full.out, kept)


def test_long_append_is_cut_into_messages(ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    rows, draft = normal(rng, 101, ROW), random_draft(rng, 3)
    outcomes = []
    for limit in (runtime_module.WRITE_BYTES, 10 * ROW * 4 + 1, 1):
        monkeypatch.setattr(runtime_module, "WRITE_BYTES", limit)
        with VerifyRuntime(CFG, group=ranks) as runtime:
            seq = runtime.open()
            runtime.append(seq, rows[:1])
            runtime.append(seq, rows[1:])
            outcomes.append((runtime.verify({seq: draft}, softmax_scale=SCALE)[seq].out, runtime.stats()["steps"]))
    assert [steps for _, steps in outcomes] == [4, 13, 103]
    assert all(torch.equal(out, outcomes[0][0]) for out, _ in outcomes)


def test_full_pool_changes_nothing(ranks: RankGroup) -> None:
    rng = np.random.default_rng(9)
    with VerifyRuntime(replace(CFG, num_slots=31), group=ranks) as runtime:
        one, two = runtime.open(), runtime.open()
        runtime.append(one, normal(rng, 10, ROW))
        first = random_draft(rng, 8)
        runtime.verify({one: first}, softmax_scale=SCALE)
        before = runtime.stats()
        with pytest.raises(PoolFull, match="21 slots needed, 20 are free"):
            runtime.verify({two: random_draft(rng, 6), one: random_draft(rng, 15)}, softmax_scale=SCALE)
        with pytest.raises(PoolFull):
            runtime.append(two, normal(rng, 13, ROW))
        assert runtime.stats() == before
        runtime.commit(one, Accept(np.array([0], np.int32), 0))  # the earlier tree is still there
        assert runtime.length(one) == 11
        runtime.verify({two: random_draft(rng, 6), one: random_draft(rng, 13)}, softmax_scale=SCALE)
        assert len(set(runtime.digests().values())) == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_trees_that_fit_together_fit_in_any_order(ranks: RankGroup, order: tuple[int, int]) -> None:
    """A growing tree may take what a shrinking one of the same step gives back."""
    rng = np.random.default_rng(11)
    with VerifyRuntime(replace(CFG, num_slots=21), group=ranks) as runtime:
        one, two = runtime.open(), runtime.open()
        runtime.verify({one: random_draft(rng, 5), two: random_draft(rng, 15)}, softmax_scale=SCALE)
        drafts = {one: random_draft(rng, 15), two: random_draft(rng, 5)}
        runtime.verify({seq: drafts[seq] for seq in ((one, two)[i] for i in order)}, softmax_scale=SCALE)
        assert runtime.stats()["free"] == 0


def test_a_refused_verify_leaves_every_tree_as_it_was(ranks: RankGroup) -> None:
    rng = np.random.default_rng(12)
    with VerifyRuntime(replace(CFG, num_slots=21), group=ranks) as runtime:
        one, two, three = (runtime.open() for _ in range(3))
        tree = DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
        verified = Draft(tree, normal(rng, 3, HEADS, ROW), normal(rng, 3, ROW))
        runtime.verify({one: verified, two: random_draft(rng, 4), three: random_draft(rng, 13)}, softmax_scale=SCALE)
        before = runtime.stats()
        with pytest.raises(PoolFull):
            sizes = {one: 2, two: 9, three: 10}
            runtime.verify({seq: random_draft(rng, n) for seq, n in sizes.items()}, softmax_scale=SCALE)
        assert runtime.stats() == before
        runtime.commit(one, Accept(np.array([0, 2], np.int32), 0))  # a path of the tree that was verified
        assert runtime.length(one) == 2


def test_numpy_rows_in_any_layout_and_numpy_numbers(ranks: RankGroup) -> None:
    rng = np.random.default_rng(13)
    rows, draft = normal(rng, 6, ROW).numpy(), random_draft(rng, 4)
    frozen = rows.copy()
    frozen.flags.writeable = False
    outcomes = []
    for given in (rows, rows[::-1].copy()[::-1], np.asfortranarray(rows), frozen):
        with VerifyRuntime(replace(CFG, num_slots=np.int64(64), max_batch=np.int32(1)), group=ranks) as runtime:
            seq = runtime.open()
            runtime.append(seq, given)
            outcomes.append(runtime.verify({seq: draft}, softmax_scale=np.float64(SCALE))[seq].out)
    assert all(torch.equal(out, outcomes[0]) for out in outcomes)


@pytest.fixture(scope="module")
def small(ranks: RankGroup) -> Any:
    """A runtime with sequence 0 (7 positions, a tree of three nodes, uncommitted) and sequence 1 (empty, no tree)."""
    rng = np.random.default_rng(10)
    with VerifyRuntime(replace(CFG, tp=2, max_nodes=4, max_batch=2), group=ranks) as runtime:
        for _ in range(2):
            runtime.open()
        runtime.append(0, normal(rng, 7, ROW))
        draft = Draft(DraftTree.from_parents([5, 6, 7], [-1, 0, 0]), normal(rng, 3, HEADS, ROW), normal(rng, 3, ROW))
        runtime.verify({0: draft}, softmax_scale=SCALE)
        yield SimpleNamespace(runtime=runtime, draft=draft, steps=runtime.stats()["steps"])


def bad_drafts() -> dict[str, tuple[Any, str]]:
    """name: (what to change in a good draft, the argument that the error names)."""
    wide = DraftTree.from_parents(np.arange(5), np.arange(-1, 4))
    meta = torch.empty(3, HEADS, ROW, device="meta")
    return {
        "one head too few": ({"q": torch.zeros(3, HEADS - 1, ROW)}, "drafts[0].q"),
        "one node too few": ({"q": torch.zeros(2, HEADS, ROW)}, "drafts[0].q"),
        "q without heads": ({"q": torch.zeros(3, ROW)}, "drafts[0].q"),
        "two layers": ({"q": torch.zeros(2, 3, HEADS, ROW)}, "drafts[0].q"),
        "row of 512": ({"q": torch.zeros(3, HEADS, RANK)}, "drafts[0].q"),
        "float64": ({"q": torch.zeros(3, HEADS, ROW, dtype=torch.float64)}, "drafts[0].q"),
        "numpy float64": ({"q": np.zeros((3, HEADS, ROW))}, "drafts[0].q"),
        "bfloat16 in a float32 runtime": ({"q": torch.zeros(3, HEADS, ROW, dtype=torch.bfloat16)}, "drafts[0].q"),
        "another device": ({"q": meta}, "drafts[0].q"),
        "a list": ({"q": [[0.0]]}, "drafts[0].q"),
        "latents of another tree": ({"tree_latents": torch.zeros(4, ROW)}, "drafts[0].tree_latents"),
        "latents missing": ({"tree_latents": None}, "drafts[0].tree_latents"),
        "no tree": ({"tree": [-1, 0, 0]}, "drafts[0]"),
        "more than max_nodes": ({"tree": wide}, "drafts[0].tree"),
    }


@pytest.mark.parametrize(("change", "argument"), bad_drafts().values(), ids=bad_drafts().keys())
def test_bad_draft_is_refused_before_anything_is_sent(small: Any, change: dict, argument: str) -> None:
    good = random_draft(np.random.default_rng(0), 1)
    with pytest.raises(ArgumentError) as error:
        small.runtime.verify({1: good, 0: replace(small.draft, **change)}, softmax_scale=SCALE)
    assert error.value.argument == argument
    assert small.runtime.stats()["steps"] == small.steps


BAD_CALLS: dict[str, tuple[Any, str]] = {
    "verify nothing": (lambda r, d: r.verify({}, softmax_scale=SCALE), "drafts"),
    "verify a list": (lambda r, d: r.verify([d], softmax_scale=SCALE), "drafts"),
    "verify beyond max_batch": (lambda r, d: r.verify({0: d, 1: d, 2: d}, softmax_scale=SCALE), "drafts"),
    "verify an unknown sequence": (lambda r, d: r.verify({9: d}, softmax_scale=SCALE), "seq"),
    "verify no Draft": (lambda r, d: r.verify({0: (d.tree, d.q)}, softmax_scale=SCALE), "drafts[0]"),
    "scale nan": (lambda r, d: r.verify({0: d}, softmax_scale=float("nan")), "softmax_scale"),
    "scale text": (lambda r, d: r.verify({0: d}, softmax_scale="1"), "softmax_scale"),
    "append an unknown sequence": (lambda r, d: r.append(9, torch.zeros(1, ROW)), "seq"),
    "append nothing": (lambda r, d: r.append(0, torch.zeros(0, ROW)), "latents"),
    "append one row without its axis": (lambda r, d: r.append(0, torch.zeros(ROW)), "latents"),
    "append integers": (lambda r, d: r.append(0, torch.zeros(1, ROW, dtype=torch.int32)), "latents"),
    "commit without a tree": (lambda r, d: r.commit(1, Accept(np.array([0]), 0)), "seq"),
    "commit an unknown sequence": (lambda r, d: r.commit(9, Accept(np.array([0]), 0)), "seq"),
    "commit siblings": (lambda r, d: r.commit(0, Accept(np.array([0, 1, 2]), 0)), "accepted.path"),
    "commit without the root": (lambda r, d: r.commit(0, Accept(np.array([1]), 0)), "accepted.path"),
    "commit an empty path": (lambda r, d: r.commit(0, Accept(np.array([], np.int32), 0)), "accepted.path"),
    "commit beyond the tree": (lambda r, d: r.commit(0, Accept(np.array([0, 3]), 0)), "accepted.path"),
    "commit a negative node": (lambda r, d: r.commit(0, Accept(np.array([0, -1]), 0)), "accepted.path"),
    "commit a ragged path": (lambda r, d: r.commit(0, Accept([[0], [1, 2]], 0)), "accepted.path"),
    "scale beyond float32": (lambda r, d: r.verify({0: d}, softmax_scale=1e300), "softmax_scale"),
    "commit no Accept": (lambda r, d: r.commit(0, 3), "accepted.path"),
    "fork an unknown sequence": (lambda r, d: r.fork(9), "seq"),
    "length of an unknown sequence": (lambda r, d: r.length(9), "seq"),
    "close an unknown sequence": (lambda r, d: r.close(9), "seq"),
    "digest of an unknown sequence": (lambda r, d: r.content_digest(9), "seq"),
}


@pytest.mark.parametrize(("call", "argument"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_bad_call_is_refused_before_anything_is_sent(small: Any, call: Any, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        call(small.runtime, small.draft)
    assert error.value.argument == argument
    assert small.runtime.stats()["steps"] == small.steps
    assert small.runtime.length(0) == 7 and small.runtime.stats()["scratch"] == 3


@pytest.mark.parametrize(
    ("change", "argument"),
    [({"tp": 3}, "tp"), ({"tp": 8}, "tp"), ({"geometry": MlaGeometry(8, kv_lora_rank=256)}, "cfg.geometry")],
)
def test_bad_configuration(ranks: RankGroup, change: dict, argument: str) -> None:
    """3 does not divide 8 heads; 8 is more than the group's 4; the kernels know rows of 512 + 64."""
    with pytest.raises(ArgumentError) as error:
        VerifyRuntime(replace(CFG, **change), group=ranks)
    assert error.value.argument == argument


def test_configuration_of_another_type(ranks: RankGroup) -> None:
    with pytest.raises(ArgumentError, match="cfg: expected a RuntimeConfig, got {'tp': 1}"):
        VerifyRuntime({"tp": 1}, group=ranks)  # type: ignore[arg-type]
