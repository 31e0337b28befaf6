"""Verify attention as callers see it: check everything once, then dispatch to a backend."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_NODES
from tpverify.errors import ArgumentError
from tpverify.ops import cuda, reference
from tpverify.ops.reference import RequestPlan

BACKENDS = ("auto", "cuda", "cuda_fp32", "cuda_naive", "reference")
KV_LORA_RANK = 512
ROW_DIM = 576


class Tree(Protocol):
    """What attention needs of a draft tree: DraftTree has it, and so does TreeMask, which ranks receive."""

    @property
    def depths(self) -> np.ndarray: ...

    def ancestor_words(self) -> np.ndarray: ...


@dataclass(frozen=True)
class TreeMask:
    """A tree without its tokens: ancestor bits uint64 [n, ceil(n/64)] and depths int32 [n]."""

    words: np.ndarray
    depths: np.ndarray

    def ancestor_words(self) -> np.ndarray:
        return self.words

    @staticmethod
    def chain(n: int) -> "TreeMask":
        """n tokens in a row, as a chunk of a prompt is: node i sees nodes 0..i."""
        bits = np.packbits(np.tri(n, -(-n // 64) * 64, dtype=bool), axis=1, bitorder="little")
        return TreeMask(bits.view(np.uint64), np.arange(n, dtype=np.int32))


@dataclass(frozen=True)
class VerifyRequest:
    """One sequence's share of a verify call.

    prefix_slots: int32 or int64 [S], the pool rows of the committed tokens in position order (S may be 0).
    tree_slots: int32 or int64 [n], the pool rows of the tree's nodes in node order. tree: DraftTree or TreeMask of n
    nodes. Slots may be numpy arrays or torch tensors.
    """

    prefix_slots: np.ndarray | Tensor
    tree_slots: np.ndarray | Tensor
    tree: Tree


def verify_attention(
    q: Tensor,
    kv_pool: Tensor,
    requests: Sequence[VerifyRequest],
    *,
    softmax_scale: float,
    backend: str = "auto",
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Tree-masked MLA attention: node i of a request sees all of its prefix, its ancestors and itself.

    q [sum of n, heads, 576] float32 or bfloat16, absorbed queries, requests one after another; kv_pool [slots, 576] in
    q's dtype, 512 latent then 64 rope; softmax_scale multiplies the scores.
    backend "auto" is the kernel on CUDA tensors (bfloat16, at most 128 heads) and the reference on CPU tensors.
    Returns out [sum of n, heads, 512] in q's dtype and lse [sum of n, heads] float32, natural log.
    batch_invariant: a request's bits do not depend on the other requests (the reference always gives that).
    Raises ArgumentError, a ValueError, for anything else. Inputs may be strided.
    """
    check_tensors(q, kv_pool)
    check_scale(softmax_scale)
    if not isinstance(batch_invariant, bool):
        raise ArgumentError("batch_invariant", "a bool", repr(batch_invariant))
    require_backend(backend, q.device)
    checked = check_requests(requests, kv_pool.shape[0])
    total = sum(request.nodes for request in checked)
    if total != q.shape[0]:
        raise ArgumentError("q", f"{total} rows, the nodes of all requests", tuple(q.shape))
    out = q.new_empty(total, q.shape[1], KV_LORA_RANK)
    lse = torch.empty(total, q.shape[1], device=q.device)
    if q.device.type == "cuda":
        check_kernel_takes(q)
        widest = max((request.nodes for request in checked), default=1)
        tokens = sum(len(request.prefix) for request in checked)
        plan = cuda.CudaPlan(q.shape[1], max(len(checked), 1), widest, tokens, q.device, batch_invariant)
        plan.update(checked)
        plan.run(_dense_rows(q), _dense_rows(kv_pool), out, lse, softmax_scale)
    else:
        run_reference(q, kv_pool, plan_reference(checked, q.shape[1]), out, lse, softmax_scale)
    return out, lse


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_kernel_takes(q: Tensor) -> None:
    """Raise ArgumentError unless there is a CUDA kernel for q's dtype and heads."""
    if q.dtype != torch.bfloat16:
        raise ArgumentError("q", "bfloat16 on CUDA, no kernel takes another dtype yet", q.dtype)
    if q.shape[1] > cuda.MAX_HEADS:
        raise ArgumentError("q", f"at most {cuda.MAX_HEADS} heads on CUDA", tuple(q.shape))


def run_reference(
    q: Tensor, kv_pool: Tensor, plans: Sequence[RequestPlan], out: Tensor, lse: Tensor, softmax_scale: float
) -> None:
    """The reference over prepared requests, into out and lse (see verify_attention)."""
    row = 0
    for plan in plans:
        rows = slice(row, row + plan.nodes)
        out[rows], lse[rows] = reference.verify(q[rows], kv_pool, plan, out.shape[-1], softmax_scale)
        row = rows.stop


def require_backend(backend: str, device: torch.device) -> None:
    """Raise ArgumentError unless `backend` exists and can run on `device`."""
    if backend not in BACKENDS:
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", repr(backend))
    if device.type == "cuda":
        if backend not in ("auto", "cuda"):
            raise ArgumentError("backend", "'cuda' or 'auto' on CUDA tensors", repr(backend))
        if reason := cuda.why_not():
            raise ArgumentError("backend", "CUDA kernels and a GPU for CUDA tensors", reason)
    elif device.type != "cpu" or backend.startswith("cuda"):
        raise ArgumentError(
            "backend", "CUDA tensors for kernels, CPU tensors for 'reference'", f"{backend!r} on {device}"
        )


def check_scale(softmax_scale: float) -> None:
    if (
        isinstance(softmax_scale, bool)
        or not isinstance(softmax_scale, (int, float))
        or not math.isfinite(softmax_scale)
    ):
        raise ArgumentError("softmax_scale", "a finite number", repr(softmax_scale))


def check_tensors(q: Tensor, kv_pool: Tensor, row_dim: int = ROW_DIM) -> None:
    """Raise ArgumentError unless q and kv_pool have the shapes, dtype and device that verify attention takes."""
    for name, tensor, shape in (("q", q, f"[nodes, heads, {row_dim}]"), ("kv_pool", kv_pool, f"[slots, {row_dim}]")):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(name, f"a torch tensor {shape}", type(tensor).__name__)
        if tensor.dim() != shape.count(",") + 1 or tensor.shape[-1] != row_dim:
            raise ArgumentError(name, shape, tuple(tensor.shape))
    if q.shape[1] < 1:
        raise ArgumentError("q", "at least one head", tuple(q.shape))
    if q.dtype not in (torch.float32, torch.bfloat16):
        raise ArgumentError("q", "float32 or bfloat16", q.dtype)
    if kv_pool.dtype != q.dtype or kv_pool.device != q.device:
        raise ArgumentError("kv_pool", f"{q.dtype} on {q.device} like q", f"{kv_pool.dtype} on {kv_pool.device}")


def check_requests(requests: Sequence[VerifyRequest], pool_slots: int) -> list[cuda.Request]:
    """Raises ArgumentError unless every request fits a pool of `pool_slots` rows."""
    return [_check_request(f"requests[{i}]", request, pool_slots) for i, request in enumerate(requests)]


def plan_reference(requests: Sequence[cuda.Request], heads: int) -> list[RequestPlan]:
    return [RequestPlan(r.prefix, r.tree, r.words, r.depths, heads) for r in requests]


def _check_request(name: str, request: VerifyRequest, pool_slots: int) -> cuda.Request:
    if not isinstance(request, VerifyRequest):
        raise ArgumentError(name, "a VerifyRequest", type(request).__name__)
    prefix = _check_slots(f"{name}.prefix_slots", request.prefix_slots, pool_slots)
    tree = _check_slots(f"{name}.tree_slots", request.tree_slots, pool_slots)
    words, depths = np.asarray(request.tree.ancestor_words()), np.asarray(request.tree.depths)
    n = len(depths)
    if not 1 <= n <= MAX_NODES:
        raise ArgumentError(f"{name}.tree", f"1 to {MAX_NODES} nodes", n)
    if words.dtype != np.uint64 or words.shape != (n, -(-n // 64)):
        raise ArgumentError(
            f"{name}.tree", f"ancestor words uint64 [{n}, {-(-n // 64)}]", f"{words.dtype} {words.shape}"
        )
    if len(tree) != n:
        raise ArgumentError(f"{name}.tree_slots", f"{n} slots, one a node", len(tree))
    return cuda.Request(prefix, tree, words, depths)


def _check_slots(name: str, slots: np.ndarray | Tensor, pool_slots: int) -> Tensor:
    tensor = torch.as_tensor(slots)
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(name, "int32 or int64 [count]", f"{tensor.dtype} {tuple(tensor.shape)}")
    if len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < pool_slots:
        raise ArgumentError(name, f"slots from 0 to {pool_slots - 1}", f"{int(tensor.min())} to {int(tensor.max())}")
    return tensor.long()
