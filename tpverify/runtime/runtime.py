"""The verify runtime: sequences in a paged latent cache, replicated over ranks that share out the query heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tpverify.config import RuntimeConfig, check_int, check_type
from tpverify.errors import ArgumentError
from tpverify.kv.log import KvLog
from tpverify.ops.attention import KV_LORA_RANK, ROW_DIM, check_scale
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.device import for_attention
from tpverify.runtime.frames import frame_of, tensor_of
from tpverify.runtime.messages import Attend, ContentDigest, Ping, TreeRequest, Write
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.recovery import checked_restarts
from tpverify.tree.accept import Accept
from tpverify.tree.arrays import as_numpy
from tpverify.tree.draft_tree import DraftTree

WRITE_BYTES = 8 << 20  # one Write message, so that a long prompt neither doubles memory nor outlasts a deadline


@dataclass(frozen=True, eq=False)
class Draft:
    """A sequence's part of a verify step, for a tree of n nodes.

    q: absorbed queries [layers, n, heads, row_dim]. tree_latents: the nodes' own latent rows [layers, n, row_dim].
    Both in the runtime's dtype, on the CPU: torch tensors, or numpy arrays if that is float32. With one layer the
    layers axis may be left out.
    """

    tree: DraftTree
    q: Tensor | np.ndarray
    tree_latents: Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Verified:
    """out: [layers, n, heads, kv_lora_rank] in the runtime's dtype. lse: float32 [layers, n, heads], natural log.

    Heads in the model's order. No layers axis if the Draft's q had none. The tensors are the caller's own.
    """

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class DefragReport:
    """moves: rows that changed slots; bytes: theirs in all layers, on each rank. extents_before, extents_after: in how
    many runs of consecutive slots the open sequences lie, summed. done: nothing is left to do; else the budget is
    spent, or a tree, which stays where it is, is in the way."""

    moves: int
    bytes: int
    extents_before: int
    extents_after: int
    done: bool


class VerifyRuntime:
    """Attention of tree verify steps over `cfg.tp` ranks. A context manager; not for several threads.

    Changes to sequences take effect on the ranks with the next step. Errors: ArgumentError, before anything is sent,
    for bad input or a sequence that is not open; PoolFull, with nothing changed, when the pool has too few free slots
    even without what is only kept for later sequences;
    ClusterError when the ranks find no place, and for every call but stats and close once the runtime has ended;
    RankFailure when a rank fails, after which everything has been released. group: at least cfg.tp ranks to use instead
    of starting some. Its device and deadline count then, not cfg's; closing the runtime leaves it running, and a later
    runtime on it ends this one.

    max_restarts: how many ranks that die or hang are replaced, as Engine does it. By default none is: whoever drives
    steps one by one hears of it from the step.

    Rows of very scattered sequences are brought together between steps, in at most 2 % of their time.

    On GPUs the bfloat16 kernel runs: device "auto" takes them if each rank can have one and cfg.dtype is "bfloat16".
    """

    def __init__(self, cfg: RuntimeConfig, *, group: RankGroup | None = None, max_restarts: int = 0) -> None:
        check_type("cfg", cfg, RuntimeConfig, "a RuntimeConfig")
        max_restarts = checked_restarts(max_restarts)
        if (cfg.geometry.kv_lora_rank, cfg.geometry.row_dim) != (KV_LORA_RANK, ROW_DIM):
            raise ArgumentError("cfg.geometry", f"kv_lora_rank {KV_LORA_RANK} and rows of {ROW_DIM}", cfg.geometry)
        self.cfg = cfg
        self._dtype: torch.dtype = getattr(torch, cfg.dtype)
        self._trees: dict[int, DraftTree] = {}
        self._seconds: dict[str, float] = {}
        self._owned = group is None
        check_type("group", group, (RankGroup, type(None)), "a RankGroup or None")
        wanted = cfg.device if group is None else group.device
        device, self._device_reason = for_attention(wanted, cfg.dtype, cfg.geometry, cfg.tp)
        if group is None:
            group = RankGroup(cfg.tp, device, cfg.deadline_s, oversubscribe=cfg.oversubscribe)
        self._group = group
        options = {
            "num_heads": cfg.geometry.num_heads,
            "row_dim": cfg.geometry.row_dim,
            "num_layers": cfg.num_layers,
            "num_slots": cfg.num_slots,
            "dtype": cfg.dtype,
            "max_batch": cfg.max_batch,
            "max_nodes": cfg.max_nodes,
        }
        try:
            self._coordinator = Coordinator(
                self._group, "attention", options, num_slots=cfg.num_slots, tp=cfg.tp, max_restarts=max_restarts
            )
        except BaseException:
            if self._owned:
                group.close()
            raise

    @property
    def _log(self) -> KvLog:
        return self._coordinator.log

    def open(self, tokens: npt.ArrayLike | None = None) -> int:
        """Number of a new, empty sequence. With the token ids, int [n], of what it is to hold, it starts with those
        positions that an earlier sequence left (see close); length(seq) says how many, at most n - 1. Append the rest.
        """
        return self._log.open(tokens)

    def append(self, seq: int, latents: Tensor | np.ndarray) -> None:
        """Commit L further positions. latents: [layers, L, row_dim], or [L, row_dim] with one layer. Drops a tree."""
        rows, _ = self._tensor("latents", latents, (None, self.cfg.geometry.row_dim))
        start, count = self._log.length(seq), rows.shape[1]
        if count == 0:
            raise ArgumentError("latents", "at least one position", tuple(latents.shape))
        self._coordinator.reserve(lambda: self._log.append(seq, count))
        self._trees.pop(seq, None)
        chunk = max(1, WRITE_BYTES // (rows[:, :1].numel() * rows.element_size()))
        for first in range(0, count, chunk):
            part = rows[:, first : first + chunk]
            self._coordinator.step(Write(seq, start + first, part.shape[1]), [frame_of(part)])

    def verify(self, drafts: Mapping[int, Draft], *, softmax_scale: float) -> dict[int, Verified]:
        """Score every draft's tree in one step. A tree verified before and not committed is dropped.

        At most cfg.max_batch sequences, and cfg.max_nodes nodes in each tree, its root included.
        """
        softmax_scale = check_scale(softmax_scale)
        if not isinstance(drafts, Mapping) or not 1 <= len(drafts) <= self.cfg.max_batch:
            got = len(drafts) if isinstance(drafts, Mapping) else type(drafts).__name__
            raise ArgumentError("drafts", f"a mapping of 1 to max_batch={self.cfg.max_batch} sequences", got)
        checked = {seq: self._check(seq, draft) for seq, draft in drafts.items()}
        nodes = {seq: len(draft.tree) for seq, draft in drafts.items()}
        self._coordinator.reserve(lambda: self._log.draft_all(nodes))

        requests = []
        for seq, draft in drafts.items():
            self._trees[seq] = draft.tree
            words, depths = draft.tree.ancestor_words().astype("<u8"), draft.tree.depths.astype("<i4")
            requests.append(TreeRequest(seq, len(draft.tree), words.tobytes(), depths.tobytes()))
        latents = _joined([latents for _, latents, _ in checked.values()])
        q = _joined([q for q, _, _ in checked.values()])
        shards = [[frame_of(shard)] for shard in q.chunk(self.cfg.tp, dim=2)]
        answers = self._coordinator.step(Attend(requests, softmax_scale), [frame_of(latents)], shards)

        self._seconds = answers[0].reply.seconds | answers[0].result()
        out = tensor_of(answers[0].frames[0], self._dtype, (*q.shape[:3], self.cfg.geometry.kv_lora_rank))
        lse = tensor_of(answers[0].frames[1], torch.float32, q.shape[:3])
        return self._split(checked, out, lse)

    def commit(self, seq: int, accepted: Accept) -> None:
        """Keep the accepted path of the tree verified last: its nodes become the next positions, the rest go."""
        self._log.length(seq)
        tree = self._trees.get(seq)
        if tree is None:
            raise ArgumentError("seq", "a sequence with a verified tree that is not yet committed", seq)
        self._log.commit(seq, _path_in(tree, accepted))
        del self._trees[seq]

    def fork(self, seq: int) -> int:
        """Number of a new sequence with the committed positions of `seq`, in the same slots. A tree stays behind."""
        return self._log.fork(seq)

    def length(self, seq: int) -> int:
        """Committed positions."""
        return self._log.length(seq)

    def close(self, seq: int | None = None, tokens: npt.ArrayLike | None = None) -> None:
        """End a sequence; without one, end the runtime and its ranks. Ending the runtime again does nothing.

        tokens: ids, int [n], of the sequence's first committed positions. Their rows are kept, while there is room, for
        sequences opened with the same ids.
        """
        if seq is None:
            if tokens is not None:
                raise ArgumentError("seq", "the sequence whose tokens these are", None)
            self._end()
            return
        self._log.close(seq, tokens)
        self._trees.pop(seq, None)

    def defrag(self, *, max_bytes: int | None = None) -> DefragReport:
        """Bring the rows of scattered sequences together, moving at most max_bytes on each rank (default: whatever it
        takes). Outputs do not change by a bit. A rank on which a moved row is not what it was fails."""
        row_bytes = self._row_bytes()
        budget = 2**31 - 1
        if max_bytes is not None:
            budget = check_int("max_bytes", max_bytes, row_bytes, 2**62) // row_bytes
        moves, before = 0, self._extents()
        while moves < budget:
            moved = self._log.defrag(min(budget - moves, self.cfg.num_slots))
            if moved.done:
                break
            moves += moved.moves
            self._coordinator.step(Ping())
        return DefragReport(moves, moves * row_bytes, before, self._extents(), moves < budget)

    def shrink(self, num_slots: int) -> DefragReport:
        """Move what lies in slots from num_slots on below, and hand none of those out until `shrink` is called with a
        larger number; on CPU ranks their memory goes back to the system. What was kept for later sequences goes if
        there is no room. PoolFull if the rest does not fit."""
        moves, idle, before = 0, 0, self._extents()
        while not (moved := self._log.resize(num_slots)).done and idle < 3:
            moves += moved.moves
            idle = 0 if moved.moves else idle + 1
            self._coordinator.step(Ping())
        self._coordinator.step(Ping())  # the ranks' turn: the last slots are free
        return DefragReport(moves, moves * self._row_bytes(), before, self._extents(), moved.done)

    def digests(self) -> dict[str | int, str]:
        """Structural digests of the tables, {"driver": hex, 0: hex, ...}: equal when healthy."""
        return self._coordinator.digests()

    def content_digest(self, seq: int) -> dict[int, str]:
        """{rank: hex}: each rank's hash of the sequence's rows in position order, wherever they are stored."""
        self._log.length(seq)
        return {answer.reply.rank: answer.result() for answer in self._coordinator.step(ContentDigest(seq))}

    def check_content(self) -> int:
        """Compare what the ranks hold at every committed position, of sequences and of what is kept for later ones: the
        number of rows compared. Moved rows are compared with each move. RankFailure if a rank holds something else: it
        names a sequence and the first position, and nothing runs after it."""
        return self._coordinator.check_content()

    def stats(self) -> dict[str, Any]:
        """The log's counts, steps sent, rank 0's seconds by stage in the last verify, the device, why it is no GPU
        where device="auto" was asked for, and what gathers the results."""
        return self._coordinator.stats() | {
            "tp": self.cfg.tp,
            "device": self._group.device,
            "device_reason": self._device_reason or self._group.device_reason,
            "collectives": dict(self._group.collectives),
            "last_verify_seconds": dict(self._seconds),
        }

    def __enter__(self) -> "VerifyRuntime":
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        self._coordinator.close()
        if self._owned:
            self._group.close()

    def _check(self, seq: int, draft: Draft) -> tuple[Tensor, Tensor, bool]:
        """q and latents with their layers axis, and whether the caller's q had it."""
        self._log.length(seq)
        if not isinstance(draft, Draft) or not isinstance(draft.tree, DraftTree):
            raise ArgumentError(f"drafts[{seq}]", "a Draft with a DraftTree", type(draft).__name__)
        n = len(draft.tree)
        if n > self.cfg.max_nodes:
            raise ArgumentError(
                f"drafts[{seq}].tree", f"at most max_nodes={self.cfg.max_nodes} nodes, root included", n
            )
        geometry = self.cfg.geometry
        q, had_layers = self._tensor(f"drafts[{seq}].q", draft.q, (n, geometry.num_heads, geometry.row_dim))
        latents, _ = self._tensor(f"drafts[{seq}].tree_latents", draft.tree_latents, (n, geometry.row_dim))
        return q, latents, had_layers

    def _tensor(self, name: str, value: Any, shape: tuple[int | None, ...]) -> tuple[Tensor, bool]:
        """A CPU tensor [layers, *shape] in the runtime's dtype, and whether `value` had the layers axis."""
        if isinstance(value, np.ndarray) and value.dtype == np.float32:
            value = torch.from_numpy(np.array(value, order="C"))  # torch takes no reversed array
        if not isinstance(value, Tensor):
            got = f"numpy {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ArgumentError(name, "a torch tensor, or a numpy array of float32", got)
        if value.dtype != self._dtype or value.device.type != "cpu":
            raise ArgumentError(name, f"{self.cfg.dtype} on the CPU", f"{value.dtype} on {value.device}")
        had_layers = value.dim() == len(shape) + 1
        tensor = value if had_layers or self.cfg.num_layers > 1 else value.unsqueeze(0)
        expected = (self.cfg.num_layers, *shape)
        if tensor.dim() != len(expected) or any(
            e not in (None, s) for e, s in zip(expected, tensor.shape, strict=True)
        ):
            text = ", ".join("L" if size is None else str(size) for size in expected)
            raise ArgumentError(name, f"[{text}]" + " or without layers" * (expected[0] == 1), tuple(value.shape))
        return tensor.detach(), had_layers

    def _row_bytes(self) -> int:
        return self.cfg.num_layers * self.cfg.geometry.row_dim * self._dtype.itemsize

    def _extents(self) -> int:
        return sum(self._log.extents().values())

    @staticmethod
    def _split(checked: dict[int, tuple[Tensor, Tensor, bool]], out: Tensor, lse: Tensor) -> dict[int, Verified]:
        sizes = [q.shape[1] for q, _, _ in checked.values()]
        results = {}
        for seq, seq_out, seq_lse in zip(checked, out.split(sizes, 1), lse.split(sizes, 1), strict=True):
            if not checked[seq][2]:
                seq_out, seq_lse = seq_out[0], seq_lse[0]
            results[seq] = Verified(seq_out.contiguous(), seq_lse.contiguous())
        return results


def _joined(parts: list[Tensor]) -> Tensor:
    """Along the nodes, [layers, N, ...]; without a copy if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _path_in(tree: DraftTree, accepted: Accept) -> np.ndarray:
    path = as_numpy("accepted.path", getattr(accepted, "path", None))
    fits = path.ndim == 1 and path.dtype.kind in "iu" and path.size and 0 <= path.min() <= path.max() < len(tree)
    if not fits or path[0] != 0 or not np.array_equal(tree.parents[path[1:]], path[:-1]):
        raise ArgumentError("accepted.path", "node indices down from the root of the tree verified last", path.tolist())
    return path
