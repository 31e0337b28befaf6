"""Verify attention by the host library: what ops/reference.py promises, by own loops (csrc/host/attention_rows.h),
where that one has to probe the habits of a BLAS. Faster the fewer rows there are."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from tpverify import native
from tpverify.ops import dense
from tpverify.ops.reference import RequestPlan

SCORES_A_THREAD = 1 << 16  # below this many scores another thread costs more than it saves


def takes(kv_pool: Tensor, rank: int) -> bool:
    """Whether there is a library, and it reads such rows: float32, of whole vectors. Not a matter of strides, which
    must not change a bit."""
    fits = kv_pool.dtype == torch.float32 and rank % 16 == 0 and kv_pool.shape[1] % 8 == 0
    return fits and native.host() is not None


@torch.no_grad()
def verify(q: Tensor, kv_pool: Tensor, plan: RequestPlan, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, heads, row_dim]; kv_pool [slots, row_dim]. Returns float32 out [n, heads, rank] and natural-log lse
    [n, heads]."""
    prefix, tree = plan.prefix, plan.tree
    if kv_pool.stride(1) != 1 or kv_pool.stride(0) < kv_pool.shape[1] or kv_pool.is_neg():
        kv_pool = kv_pool.index_select(0, torch.cat([prefix, tree])).contiguous()
        prefix, tree = torch.arange(len(kv_pool)).split([len(prefix), len(tree)])
    q = q.float().contiguous()
    out, lse = q.new_empty(plan.nodes, plan.heads, rank), q.new_empty(plan.nodes, plan.heads)
    attention = Attention(plan.nodes, plan.heads, scale)
    attention.take(prefix, tree, plan.words, plan.depths)
    attention(q, kv_pool, out, lse)
    return out, lse


class Attention:
    """verify() of one request at a time, of `nodes` nodes: that of the last `take`, in recorded calls too."""

    def __init__(self, nodes: int, heads: int, scale: float) -> None:
        self._nodes, self._heads, self._scale = nodes, heads, scale
        self._prefix, self._tree = torch.empty(0, dtype=torch.int64), torch.empty(nodes, dtype=torch.int64)
        self._words, self._depths = np.empty((nodes, -(-nodes // 64)), np.uint64), np.empty(nodes, np.int32)
        self._calls: list[native.AttentionParams] = []

    def take(self, prefix: Tensor, tree: Tensor, words: np.ndarray, depths: np.ndarray) -> None:
        """As RequestPlan has them."""
        self._prefix = prefix.contiguous()
        self._tree.copy_(tree)
        self._words[...], self._depths[...] = words, depths
        for params in self._calls:
            for name, value in self._of_request().items():
                setattr(params, name, value)

    def _of_request(self) -> dict[str, int]:
        scores = self._nodes * self._heads * (len(self._prefix) + self._nodes)
        threads = max(1, min(torch.get_num_threads(), scores // SCORES_A_THREAD))
        return {"threads": threads, "prefix": len(self._prefix), "prefix_slots": self._prefix.data_ptr()}

    def __call__(self, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor) -> None:
        """Into out and lse; all contiguous float32, but that rows of the pool may lie apart."""
        assert q.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
        scaled = dense.place(q.flatten(0, 1), torch.empty(self._nodes * self._heads, q.shape[2]), scale=self._scale)
        params = native.AttentionParams(
            struct_size=ctypes.sizeof(native.AttentionParams),
            nodes=self._nodes,
            heads=self._heads,
            rank=out.shape[2],
            row_dim=q.shape[2],
            slots=len(kv_pool),
            pool_stride=kv_pool.stride(0),
            q=scaled.data_ptr(),
            kv_pool=kv_pool.data_ptr(),
            tree_slots=self._tree.data_ptr(),
            depths=self._depths.ctypes.data,
            ancestor_words=self._words.ctypes.data,
            out=out.data_ptr(),
            lse=lse.data_ptr(),
            **self._of_request(),
        )
        self._calls.append(params)
        dense.call("tpv_attention", params, (scaled, kv_pool, out, lse, self))
