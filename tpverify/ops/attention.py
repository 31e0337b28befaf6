"""Verify attention as callers see it: check everything once, then dispatch to a backend.

To torch.compile and torch.export the call is one operator over tensors, tpverify::verify_attention: slots and masks are
data, checked when it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_NODES, check_choice, check_int, check_number, check_type
from tpverify.errors import ArgumentError, describe
from tpverify.ops import cuda, host, reference
from tpverify.ops.reference import RequestPlan
from tpverify.tree.arrays import as_numpy, int_array
from tpverify.tree.draft_tree import DraftTree

BACKENDS = ("auto", "cuda", "cuda_fp32", "cuda_naive", "reference")
KV_LORA_RANK = 512
ROW_DIM = 576
FLOAT32_MAX = float(np.finfo(np.float32).max)


RequestTensors = tuple[Tensor, Tensor, Tensor, Tensor]  # prefix slots, tree slots, ancestor words, depths


@dataclass(frozen=True, eq=False)
class TreeMask:
    """A tree of n <= 1024 nodes without its tokens: ancestor bits uint64 [n, ceil(n/64)] and depths int32 [n].

    Both are kept as read-only copies. Raises ArgumentError unless they are those of a tree in which parents come first:
    a row has its parent's bits and its own, and a depth counts the others' bits.
    Two torch tensors, words as int64, are taken as they are: so a traced call can have masks among its inputs.
    """

    words: np.ndarray | Tensor
    depths: np.ndarray | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.words, Tensor) and isinstance(self.depths, Tensor):
            return
        words, depths = as_numpy("words", self.words), int_array("depths", self.depths, 1)
        n = check_int("depths", len(depths), 1, MAX_NODES)
        if words.dtype != np.uint64 or words.shape != (n, -(-n // 64)):
            raise ArgumentError("words", f"uint64 [{n}, {-(-n // 64)}]", f"{words.dtype} {words.shape}")
        words = np.array(words, order="C")
        _check_tree(words, depths)
        depths = depths.astype(np.int32)
        words.flags.writeable = depths.flags.writeable = False
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "depths", depths)

    def __reduce__(self) -> tuple[Any, ...]:
        return TreeMask, (self.words, self.depths)  # copies are read-only too

    def ancestor_words(self) -> np.ndarray | Tensor:
        return self.words

    @staticmethod
    def chain(n: int) -> "TreeMask":
        """n tokens in a row, as a chunk of a prompt is: node i sees nodes 0..i."""
        n = check_int("n", n, 1, MAX_NODES)
        bits = np.packbits(np.tri(n, -(-n // 64) * 64, dtype=bool), axis=1, bitorder="little")
        return TreeMask(bits.view(np.uint64), np.arange(n, dtype=np.int32))


def _check_tree(words: np.ndarray, depths: np.ndarray) -> None:
    node = np.arange(len(words))
    others = words.copy()
    others[node, node // 64] ^= np.left_shift(np.uint64(1), (node % 64).astype(np.uint64))
    bits = np.unpackbits(others.view(np.uint8), axis=1, bitorder="little")
    parents = (
        bits.shape[1] - 1 - bits[:, ::-1].argmax(axis=1)
    )  # the last bit; none, or the own one missing: not below node
    wrong = (parents >= node) | (others != words[np.minimum(parents, node)]).any(axis=1)
    wrong[0] = others[0].any()
    if wrong.any():
        row = int(wrong.argmax())
        raise ArgumentError(
            f"words[{row}]", "the bits of an earlier node's row, and its own", describe(words[row].tolist())
        )
    expected = depths[np.minimum(parents, node)] + 1
    expected[0] = 0
    wrong = depths != expected
    if wrong.any():
        row = int(wrong.argmax())
        raise ArgumentError(f"depths[{row}]", f"{expected[row]}, one more than its parent's", depths[row])


@dataclass(frozen=True)
class VerifyRequest:
    """One sequence's share of a verify call.

    prefix_slots: int32 or int64 [S], the pool rows of the committed tokens in position order (S may be 0).
    tree_slots: int32 or int64 [n], the pool rows of the tree's nodes in node order. tree: DraftTree or TreeMask of n
    nodes. Slots may be numpy arrays, torch tensors or lists.
    """

    prefix_slots: np.ndarray | Tensor
    tree_slots: np.ndarray | Tensor
    tree: DraftTree | TreeMask
    tensors: RequestTensors | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes tensors now, for a traced call cannot; what cannot be one is left to the call, which names it."""
        try:
            object.__setattr__(self, "tensors", _make_tensors("request", self))
        except ArgumentError:
            object.__setattr__(self, "tensors", None)


def _make_tensors(name: str, request: VerifyRequest) -> RequestTensors:
    check_type(f"{name}.tree", request.tree, (DraftTree, TreeMask), "a DraftTree or a TreeMask")
    prefix, tree = (
        slots if isinstance(slots, Tensor) else _make_slots(f"{name}.{part}", slots)
        for part, slots in (("prefix_slots", request.prefix_slots), ("tree_slots", request.tree_slots))
    )
    return prefix, tree, _copy(request.tree.ancestor_words()), _copy(request.tree.depths)


def _copy(mask: np.ndarray | Tensor) -> Tensor:
    """A tensor as it is; an array, which is read-only, copied, with 64-bit words as int64."""
    if isinstance(mask, Tensor):
        return mask
    return torch.from_numpy((mask.view(np.int64) if mask.dtype == np.uint64 else mask).copy())


def _make_slots(name: str, slots: np.ndarray) -> Tensor:
    array = as_numpy(name, slots)
    if array.ndim != 1 or array.dtype not in (np.int32, np.int64):
        raise ArgumentError(name, "int32 or int64 [count]", f"{array.dtype} {array.shape}")
    return torch.from_numpy(
        array.astype(np.int64)
    )  # a copy: torch takes no reversed array, and warns of a read-only one


@torch.no_grad()
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
    q's dtype, 512 latent then 64 rope; softmax_scale, any number that float32 can hold, multiplies the scores.
    backend "auto" is the kernel on CUDA tensors (bfloat16, at most 128 heads) and the reference on CPU tensors.
    "cuda_fp32" and "cuda_naive" take float32: slow kernels, a block a node, that the fast one is tested against.
    Returns out [sum of n, heads, 512] in q's dtype and lse [sum of n, heads] float32, natural log.
    batch_invariant: a request's bits do not depend on the other requests (the others give that anyway).
    Raises ArgumentError, a ValueError, for anything else. Inputs may be strided. torch.compile and torch.export take
    the call with requests made before it, or made of tensors alone.
    """
    check_tensors(q, kv_pool)
    scale = check_scale(softmax_scale)
    check_type("batch_invariant", batch_invariant, bool, "a bool")
    check_choice("backend", backend, BACKENDS)
    tensors = _tensors_of(requests)
    prefix, tree, words, depths = ([t[i] for t in tensors] for i in range(4))
    out = q.new_empty(q.shape[0], q.shape[1], KV_LORA_RANK)
    lse = q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
    attend = _operator if torch.compiler.is_compiling() else _attend  # an operator's first call imports the compiler
    attend(q, kv_pool, prefix, tree, words, depths, out, lse, scale, backend, batch_invariant)
    return out, lse


def _attend(
    q: Tensor,
    kv_pool: Tensor,
    prefix_slots: Sequence[Tensor],
    tree_slots: Sequence[Tensor],
    words: Sequence[Tensor],
    depths: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    backend: str,
    batch_invariant: bool,
) -> None:
    require_backend(backend, q.device)
    tensors = list(zip(prefix_slots, tree_slots, words, depths, strict=True))
    checked = _check_all(tensors, kv_pool.shape[0])
    total = sum(request.nodes for request in checked)
    if total != q.shape[0]:
        raise ArgumentError("q", f"{total} rows, the nodes of all requests", tuple(q.shape))
    if q.device.type == "cpu":
        run_reference(q, kv_pool, plan_reference(checked, q.shape[1]), out, lse, softmax_scale)
        return
    kernel = "cuda" if backend == "auto" else backend
    check_kernel_takes(q, kernel)
    widest = max((request.nodes for request in checked), default=1)
    tokens = sum(len(request.prefix) for request in checked)
    plan = cuda.CudaPlan(q.shape[1], max(len(checked), 1), widest, tokens, q.device, batch_invariant, kernel)
    plan.update(checked)
    plan.run(_dense_rows(q), _dense_rows(kv_pool), out, lse, softmax_scale)


_operator = torch.library.custom_op("tpverify::verify_attention", _attend, mutates_args=("out", "lse"))


@_operator.register_fake
def _(q: Tensor, kv_pool: Tensor, prefix_slots: Sequence[Tensor], tree_slots: Sequence[Tensor], *_: object) -> None:
    torch._check(sum(slots.shape[0] for slots in tree_slots) == q.shape[0], lambda: "q: expected a row a node")


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_kernel_takes(q: Tensor, kernel: str = "cuda") -> None:
    """Raise ArgumentError unless q has the kernel's dtype, and no more heads than kernels take."""
    if q.dtype != cuda.DTYPES[kernel]:
        expected = str(cuda.DTYPES[kernel]).removeprefix("torch.")
        raise ArgumentError("q", f"{expected} on CUDA with backend {kernel!r}", q.dtype)
    if q.shape[1] > cuda.MAX_HEADS:
        raise ArgumentError("q", f"at most {cuda.MAX_HEADS} heads on CUDA", tuple(q.shape))


def run_reference(
    q: Tensor, kv_pool: Tensor, plans: Sequence[RequestPlan], out: Tensor, lse: Tensor, softmax_scale: float
) -> None:
    """The reference over prepared requests, into out and lse (see verify_attention)."""
    attend = host.verify if host.takes(kv_pool, out.shape[-1]) else reference.verify
    row = 0
    for plan in plans:
        rows = slice(row, row + plan.nodes)
        out[rows], lse[rows] = attend(q[rows], kv_pool, plan, out.shape[-1], softmax_scale)
        row = rows.stop


def require_backend(backend: str, device: torch.device) -> None:
    """Raise ArgumentError unless `backend`, one of BACKENDS, can run on `device`."""
    if device.type == "cuda" and backend != "reference":
        if reason := cuda.why_not(device):
            raise ArgumentError("backend", "CUDA kernels and a GPU for CUDA tensors", reason)
    elif device.type != "cpu" or backend.startswith("cuda"):
        raise ArgumentError(
            "backend", "CUDA tensors for kernels, CPU tensors for 'reference'", f"{backend!r} on {device}"
        )


def check_scale(softmax_scale: float) -> float:
    return check_number("softmax_scale", softmax_scale, "a finite float32 number", -FLOAT32_MAX, FLOAT32_MAX)


def check_tensors(q: Tensor, kv_pool: Tensor, row_dim: int = ROW_DIM) -> None:
    """Raise ArgumentError unless q and kv_pool have the shapes, dtype and device that verify attention takes."""
    for name, tensor, shape in (("q", q, f"[nodes, heads, {row_dim}]"), ("kv_pool", kv_pool, f"[slots, {row_dim}]")):
        check_type(name, tensor, Tensor, f"a torch tensor {shape}")
        if tensor.layout != torch.strided:
            raise ArgumentError(name, "a dense tensor", tensor.layout)
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
    return _check_all(_tensors_of(requests), pool_slots)


def plan_reference(requests: Sequence[cuda.Request], heads: int) -> list[RequestPlan]:
    return [RequestPlan(_as_index(r.prefix), _as_index(r.tree), r.words, r.depths, heads) for r in requests]


def _as_index(slots: Tensor | np.ndarray) -> Tensor:
    return slots if isinstance(slots, Tensor) else torch.from_numpy(slots.astype(np.int64))


def _tensors_of(requests: Sequence[VerifyRequest]) -> list[RequestTensors]:
    check_type("requests", requests, (list, tuple), "a list of VerifyRequests")
    for i, request in enumerate(requests):
        check_type(f"requests[{i}]", request, VerifyRequest, "a VerifyRequest")
    return [request.tensors or _make_tensors(f"requests[{i}]", request) for i, request in enumerate(requests)]


def _check_all(requests: Sequence[RequestTensors], pool_slots: int) -> list[cuda.Request]:
    return [_check_request(f"requests[{i}]", *tensors, pool_slots) for i, tensors in enumerate(requests)]


def _check_request(
    name: str, prefix_slots: Tensor, tree_slots: Tensor, words: Tensor, depths: Tensor, pool_slots: int
) -> cuda.Request:
    prefix = _check_slots(f"{name}.prefix_slots", prefix_slots, pool_slots)
    tree = _check_slots(f"{name}.tree_slots", tree_slots, pool_slots)
    n = len(depths) if depths.dim() == 1 else 0
    if not 1 <= n <= MAX_NODES or depths.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"{name}.tree", f"int32 depths of 1 to {MAX_NODES} nodes", _describe(depths))
    if not 0 <= int(depths.min()) <= int(depths.max()) < n:
        raise ArgumentError(f"{name}.tree", f"depths from 0 to {n - 1}", f"{int(depths.min())} to {int(depths.max())}")
    if words.dtype != torch.int64 or tuple(words.shape) != (n, -(-n // 64)):
        raise ArgumentError(f"{name}.tree", f"int64 words [{n}, {-(-n // 64)}]", _describe(words))
    if len(tree) != n:
        raise ArgumentError(f"{name}.tree_slots", f"{n} slots, one a node", len(tree))
    return cuda.Request(prefix, tree, words.cpu().numpy().view(np.uint64), depths.cpu().numpy())


def _check_slots(name: str, slots: Tensor, pool_slots: int) -> Tensor:
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(name, "int32 or int64 [count]", _describe(slots))
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < pool_slots:
        raise ArgumentError(name, f"slots from 0 to {pool_slots - 1}", f"{int(slots.min())} to {int(slots.max())}")
    return slots.long()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
