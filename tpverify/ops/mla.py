"""What lies between the products of an MLA layer: norms, rotation, the latent rows' way into the pool.

One operator to torch.compile, one kernel on a GPU, in bfloat16, and a few calls of torch on a CPU.
"""

import torch
from torch import Tensor

from tpverify.errors import ArgumentError
from tpverify.ops import cuda

ROW_DIM, ROPE_DIM = 576, 64  # of the kernel


@torch.no_grad()
def rope_cache(
    x: Tensor,
    down: Tensor,
    queries: Tensor,
    rotation: Tensor,
    slots: Tensor,
    nope: Tensor,
    q: Tensor,
    pool: Tensor,
    eps: float,
    norm_eps: float,
) -> None:
    """Queries and latents that products made of rows without a norm become what attention reads.

    x [n, hidden] the residual stream; down [n, low + row_dim] its first products; queries [shards, n, shard heads,
    nope + rope] the second ones, of down[:, :low]; rotation float32 [n, rope / 2, 2] the cosines and sines of pairs,
    which lie side by side; slots int64 [n].
    Writes nope [shards, n, shard heads, nope], the last `rope` of q [n, heads, row_dim], and rows `slots` of pool
    [slots, row_dim]: what two norms, of x (eps), then of queries and latents (norm_eps), would have made of them. A
    norm is a row's scale here, with its weights in the next matrix, and a scale can wait until after a product.
    A row's bits depend on that row alone. Slots are the caller's word. Raises ArgumentError for shapes that do not fit;
    on a GPU also for what is not dense bfloat16, widths that are no multiples of 8, and a row_dim other than 512 + 64.
    """
    dims = {"x": 2, "down": 2, "queries": 4, "rotation": 3, "pool": 2}
    for (name, axes), tensor in zip(dims.items(), (x, down, queries, rotation, pool), strict=True):
        if tensor.dim() != axes:
            raise ArgumentError(name, f"{axes} axes", tuple(tensor.shape))
    n, row_dim, (shards, _, heads, width), rope = len(x), pool.shape[1], queries.shape, 2 * rotation.shape[1]
    low = down.shape[1] - row_dim
    for name, tensor, shape in (
        ("down", down, (n, max(low, 1) + row_dim)),
        ("queries", queries, (shards, n, heads, max(width, rope + 1))),
        ("rotation", rotation, (n, rope // 2, 2)),
        ("slots", slots, (n,)),
        ("nope", nope, (shards, n, heads, width - rope)),
        ("q", q, (n, shards * heads, row_dim)),
    ):
        if tuple(tensor.shape) != shape or tensor.device != x.device:
            raise ArgumentError(name, f"{shape} on {x.device}", f"{tuple(tensor.shape)} on {tensor.device}")
    for name, tensor, dtype in (("rotation", rotation, torch.float32), ("slots", slots, torch.int64)):
        if tensor.dtype != dtype:
            raise ArgumentError(name, str(dtype).removeprefix("torch."), tensor.dtype)
    call = _rope_cache_operator if torch.compiler.is_compiling() else _rope_cache
    call(x, down, queries, rotation, slots, nope, q, pool, eps, norm_eps)


def _rope_cache(
    x: Tensor,
    down: Tensor,
    queries: Tensor,
    rotation: Tensor,
    slots: Tensor,
    nope: Tensor,
    q: Tensor,
    pool: Tensor,
    eps: float,
    norm_eps: float,
) -> None:
    row_dim, rope = pool.shape[1], 2 * rotation.shape[1]
    low, rank = down.shape[1] - row_dim, row_dim - rope
    if x.is_cuda:
        _check_kernel_takes({"x": x, "down": down, "queries": queries, "nope": nope})
        if (row_dim, rope) != (ROW_DIM, ROPE_DIM):
            raise ArgumentError("pool", f"rows of {ROW_DIM}, {ROPE_DIM} of them rotated", (row_dim, rope))
        for name, tensor in (("q", q), ("pool", pool)):
            if tensor.dtype != x.dtype or tensor.stride(-1) != 1:
                raise ArgumentError(name, "dense bfloat16 rows", f"{tensor.dtype} with strides {tensor.stride()}")
        rotation, slots = rotation.contiguous(), slots.contiguous()
        shards, nodes, shard_heads, _ = queries.shape
        with torch.cuda.device(x.device):
            params = cuda.RopeCacheParams(
                stream=torch.cuda.current_stream().cuda_stream,
                x=x.data_ptr(),
                down=down.data_ptr(),
                queries=queries.data_ptr(),
                rotation=rotation.data_ptr(),
                slots=slots.data_ptr(),
                nope=nope.data_ptr(),
                q=q.data_ptr(),
                pool=pool.data_ptr(),
                q_stride_node=q.stride(0),
                q_stride_head=q.stride(1),
                pool_stride_slot=pool.stride(0),
                nodes=nodes,
                hidden=x.shape[1],
                low_width=low,
                nope_width=nope.shape[3],
                shards=shards,
                shard_heads=shard_heads,
                eps=eps,
                norm_eps=norm_eps,
            )
            cuda.call("tpv_rope_cache", params)
        return
    square, turns = _mean_square(x) + eps, torch.view_as_complex(rotation)
    # The mean square of a normed row's product, were the row not normed, is `square` times as large: so is eps.
    scale = (_mean_square(down[:, :low]) + square * norm_eps).rsqrt()
    nope.copy_(queries[..., :-rope] * scale[:, None])
    by_head = (rotate(queries[..., -rope:], turns[:, None]) * scale[:, None]).transpose(1, 2)
    q[..., rank:] = by_head.flatten(0, 1).transpose(0, 1)
    latent, key = down[:, low : low + rank], rotate(down[:, low + rank :], turns) * square.rsqrt()
    latent = latent * (_mean_square(latent) + square * norm_eps).rsqrt()
    pool[slots] = torch.cat([latent.float(), key], 1).to(pool.dtype)


_rope_cache_operator = torch.library.custom_op("tpverify::rope_cache", _rope_cache, mutates_args=("nope", "q", "pool"))


@_rope_cache_operator.register_fake
def _(*_: object) -> None: ...


def _check_kernel_takes(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ArgumentError(name, "dense bfloat16 on CUDA", f"{tensor.dtype} with strides {tensor.stride()}")


def _mean_square(x: Tensor) -> Tensor:
    """Of rows [n, width]: float32 [n, 1]."""
    return x.float().square().mean(1, keepdim=True)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Pairs [..., dim] turned by complex [..., dim / 2], as float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)
