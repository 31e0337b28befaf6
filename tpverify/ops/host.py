"""Verify attention by the host library: what ops/reference.py promises, by own loops (csrc/host/attention_rows.h),
where that one has to probe the habits of a BLAS. Faster the fewer rows there are."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from tpverify import native
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
    library = native.host()
    assert library is not None
    scaled = (q.float() * scale).contiguous()
    out, lse = scaled.new_empty(plan.nodes, plan.heads, rank), scaled.new_empty(plan.nodes, plan.heads)
    prefix, tree = plan.prefix.contiguous(), plan.tree.contiguous()
    if kv_pool.stride(1) != 1 or kv_pool.stride(0) < kv_pool.shape[1] or kv_pool.is_neg():
        kv_pool = kv_pool.index_select(0, torch.cat([prefix, tree])).contiguous()
        prefix, tree = torch.arange(len(kv_pool)).split([len(prefix), len(tree)])
    words, depths = np.ascontiguousarray(plan.words), np.ascontiguousarray(plan.depths, np.int32)
    scores = plan.nodes * plan.heads * (len(prefix) + len(tree))
    params = native.AttentionParams(
        struct_size=ctypes.sizeof(native.AttentionParams),
        nodes=plan.nodes,
        heads=plan.heads,
        rank=rank,
        row_dim=q.shape[-1],
        threads=max(1, min(torch.get_num_threads(), scores // SCORES_A_THREAD)),
        prefix=len(prefix),
        slots=len(kv_pool),
        pool_stride=kv_pool.stride(0),
        q=scaled.data_ptr(),
        kv_pool=kv_pool.data_ptr(),
        prefix_slots=prefix.data_ptr(),
        tree_slots=tree.data_ptr(),
        depths=depths.ctypes.data,
        ancestor_words=words.ctypes.data,
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    native.check(library, library.tpv_attention(params))
    return out, lse
