"""What a rank keeps by slot: rows that change slots, rows for a rank that has none, and hashes that say whether all
ranks hold the same."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tpverify.kv.digest import content_digest, position_hashes
from tpverify.kv.extents import unpack
from tpverify.kv.log import Replica
from tpverify.native import give_back
from tpverify.ops.move import move_rows
from tpverify.ops.move import row_hashes as row_hashes_on_cpu
from tpverify.runtime.comm import Comm
from tpverify.runtime.messages import ContentDigest, Refill, RowHashes

ROWS_AT_ONCE = 4096  # on a GPU, so that a large wave needs little memory beside the pool
BYTES_AT_ONCE = 256 << 10  # of a layer on a CPU, so that all passes but the first read its cache


class Kept:
    """Everything of a rank's worker that is indexed by slot.

    pool: latent rows [layers, slots, row]. tables: [slots, width], bit for bit the same on every rank at committed
    positions, as the pool is. own: [slots, width], moved with the rest, but not every rank has them; derive(slots int64
    [n], first) makes them out of the tables, for committed rows at positions first, first + 1, ... Rows are multiples
    of 8 bytes.
    """

    def __init__(
        self,
        pool: Tensor,
        *tables: Tensor,
        own: tuple[Tensor, ...] = (),
        derive: Callable[[Tensor, int], None] | None = None,
    ) -> None:
        self.pool, self.tables, self.own, self._derive = pool, tables, own, derive

    def move(self, src: np.ndarray, dst: np.ndarray, replica: Replica) -> str:
        """Row src[i] goes to row dst[i] everywhere. Returns a digest of the rows moved, in the order given.

        src, dst int32 [n], as a Move of the log has them. Fences the replica if a row of the pool is not afterwards
        what it was: Fenced, naming one by a sequence that reads it.
        """
        sources, targets = self._index(src), self._index(dst)
        if self.pool.is_cuda:
            hashes = move_rows(self.pool, src, dst, hashed=True)  # on the way
            assert hashes is not None
        else:
            move_rows(self.pool, src, dst)
            hashes = row_hashes(self.pool, targets)
        for table in (*self.tables, *self.own):
            table.index_copy_(0, targets, table.index_select(0, sources))
        for parts in zip(*(slots.split(_at_once(self.pool)) for slots in (sources, targets)), strict=True):
            old, new = (self.pool[:, part].view(torch.int64) for part in parts)
            wrong = (old != new).any(2).any(0).nonzero()
            if len(wrong):
                slot = int(parts[1][wrong[0]])
                readers = ", ".join(f"sequence {seq} at position {at}" for seq, at in replica.readers(slot))
                replica.fence(f"a moved row is not what it was: slot {slot}, read by {readers or 'the cache'}")
        return content_digest(self._positions(hashes, targets))

    def refill(self, work: Refill, comm: Comm, replica: Replica) -> None:
        """Send the rows, or take them in, own ones derived."""
        (slots,) = unpack("slots", work.slots, 1, self.pool.shape[1])
        index, filled = self._index(slots), comm.rank in work.targets
        for table in (*self.pool, *self.tables):
            rows = table.index_select(0, index)
            comm.relay(rows, work.source, work.targets)
            if filled:
                table.index_copy_(0, index, rows)
        comm.wait()
        if filled and self._derive is not None:
            positions = replica.positions(slots)
            slots, positions = slots[positions >= 0], positions[positions >= 0]
            ends = np.flatnonzero(np.diff(positions) != 1) + 1
            for run, at in zip(np.split(slots, ends), np.split(positions, ends), strict=True):
                if run.size:
                    self._derive(self._index(run), int(at[0]))

    def release(self, limit: int) -> None:
        """Slots from `limit` on hold nothing: on a CPU their memory goes back to the system, and rows there are zeros
        from now on. A GPU keeps it: graphs know the pool by its address."""
        if self.pool.is_cuda:
            return
        for table in (*self.pool, *self.tables, *self.own):
            top = table[limit:]
            give_back(top.data_ptr(), top.numel() * top.itemsize)

    def answer(self, work: ContentDigest | RowHashes, replica: Replica) -> str | bytes:
        """The result of either, as messages.py has it."""
        if isinstance(work, ContentDigest):
            return content_digest(self.hashes(replica.prefix_slots(work.seq)))
        (slots,) = unpack("slots", work.slots, 1, self.pool.shape[1])
        return self.hashes(slots).astype("<u8").tobytes()

    def hashes(self, slots: np.ndarray) -> np.ndarray:
        """position_hashes, uint64 [n], of what every rank should hold alike in slots int [n]."""
        index = self._index(slots)
        return self._positions(row_hashes(self.pool, index), index)

    def _positions(self, of_pool: Tensor, index: Tensor) -> np.ndarray:
        found = [of_pool, *(row_hashes(table.unsqueeze(0), index) for table in self.tables)]
        return position_hashes(torch.cat(found).cpu().numpy().view(np.uint64))

    def _index(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.pool.device)


def row_hashes(table: Tensor, slots: Tensor) -> Tensor:
    """int64 [layers, n], holding the 64 bits: hashes of rows slots int64 [n] of table [layers, slots, width], on its
    device, as csrc/tpverify.h defines them."""
    found = [torch.empty(len(table), 0, dtype=torch.int64, device=table.device)]
    for part in slots.split(_at_once(table)):
        found.append(torch.stack([_hashes(layer.index_select(0, part)) for layer in table]))
    return torch.cat(found, dim=1)


def _at_once(table: Tensor) -> int:
    """How many rows of a table [layers, slots, width] to work on together."""
    if table.device.type != "cpu":
        return ROWS_AT_ONCE
    return max(1, BYTES_AT_ONCE // (table.shape[2] * table.itemsize))


def _hashes(rows: Tensor) -> Tensor:
    """int64 [n] of rows [n, width]."""
    if rows.device.type == "cpu":  # numpy is three times as fast there
        return torch.from_numpy(row_hashes_on_cpu(rows.view(torch.uint8).numpy()).view(np.int64))
    return row_hashes_in_torch(rows)


def row_hashes_in_torch(rows: Tensor) -> Tensor:
    """int64 [n] of rows [n, width], on any device."""
    z = rows.view(torch.int64)
    z = z + torch.arange(1, z.shape[1] + 1, device=z.device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30 & 2**34 - 1)) * _signed(0xBF58476D1CE4E5B9)  # torch shifts the sign in
    z = (z ^ (z >> 27 & 2**37 - 1)) * _signed(0x94D049BB133111EB)
    return (z ^ (z >> 31 & 2**33 - 1)).sum(1)


def _signed(word: int) -> int:
    return word - 2**64
