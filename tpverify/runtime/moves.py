"""Rows that change slots on a rank: in the latent pool, and in everything else that is kept by slot."""

import numpy as np
import torch
from torch import Tensor

from tpverify.kv.log import Replica
from tpverify.ops.move import move_rows

COMPARED_AT_ONCE = 4096  # rows, so that a large wave needs little memory beside the pool


def move_kept(replica: Replica, src: np.ndarray, dst: np.ndarray, pool: Tensor, *tables: Tensor) -> None:
    """Row src[i] goes to row dst[i], in all layers of pool [layers, slots, row] and in tables [slots, width].

    src, dst int32 [n], as a Move of the log has them. RuntimeError, which fences the rank, if a row of the pool is not
    afterwards what it was.
    """
    move_rows(pool, src, dst)
    sources, targets = (torch.from_numpy(slots.astype(np.int64)).to(pool.device) for slots in (src, dst))
    for table in tables:
        table.index_copy_(0, targets, table.index_select(0, sources))
    for first in range(0, len(src), COMPARED_AT_ONCE):
        part = slice(first, first + COMPARED_AT_ONCE)
        old, new = (pool[:, slots[part]].flatten(2).view(torch.uint8) for slots in (sources, targets))
        wrong = (old != new).any(2).any(0).nonzero()
        if len(wrong):
            slot = int(dst[first + int(wrong[0])])
            readers = ", ".join(f"sequence {seq} at position {at}" for seq, at in replica.readers(slot))
            raise RuntimeError(f"a moved row is not what it was: slot {slot}, read by {readers or 'the cache'}")
