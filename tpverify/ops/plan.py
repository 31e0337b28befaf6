"""A verify call that is prepared once a step and run once a layer."""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpverify.config import MAX_NODES, MAX_TOKENS, MlaGeometry, check_int, check_type
from tpverify.errors import ArgumentError, describe
from tpverify.ops.attention import (
    KV_LORA_RANK,
    ROW_DIM,
    VerifyRequest,
    check_kernel_takes,
    check_requests,
    check_scale,
    check_tensors,
    plan_reference,
    run_reference,
)
from tpverify.ops.cuda import CudaPlan, why_not
from tpverify.ops.reference import RequestPlan
from tpverify.ops.staging import Request

ANY_POOL = 2**63 - 1  # slots are checked against the pool when the plan runs


@dataclass
class _Step:
    """plans: of the CPU. top_slot: the largest slot, where the caller's are not taken on trust."""

    plans: list[RequestPlan] = field(default_factory=list)
    top_slot: int = -1


class VerifyPlan:
    """The requests of one step, checked once, for all layers.

    geometry.num_heads heads a call; at most max_batch requests of max_nodes nodes each, and max_tokens prefix tokens in
    all. device: "cpu" (the reference) or a CUDA device (the kernel: 512 + 64 wide, at most 128 heads). batch_invariant
    as in verify_attention. exact: on CUDA, a head's bits do not depend on how many heads a call has, so tp 1 to 8
    agree; without it splits fit the heads of this call, which is faster for many heads. Raises ArgumentError.

    On a CUDA device run() only launches, so it may be captured in a CUDA graph. Capture it with as many rows of q, out
    and lse as any later step has nodes; a replay then computes what the last update() gave, and rows beyond the step's
    nodes get out 0 and lse -inf. torch.compile takes run() as one operator on this plan, whatever the step.
    """

    def __init__(
        self,
        geometry: MlaGeometry,
        max_batch: int,
        max_nodes: int,
        max_tokens: int,
        device: str | torch.device,
        batch_invariant: bool = False,
        exact: bool = True,
    ) -> None:
        check_type("geometry", geometry, MlaGeometry, "an MlaGeometry")
        check_type("batch_invariant", batch_invariant, bool, "a bool")
        check_type("exact", exact, bool, "a bool")
        self.geometry, self.batch_invariant = geometry, batch_invariant
        self.max_batch = check_int("max_batch", max_batch, 1, 4096)
        self.max_nodes = check_int("max_nodes", max_nodes, 1, MAX_NODES)
        self.max_tokens = check_int("max_tokens", max_tokens, 0, MAX_TOKENS)
        self.device = device = _device(device)
        self._id = next(_ids)
        _living[self._id] = self
        self._step = _Step()
        self._staged: _Step | None = None  # until the first
        self._cuda: CudaPlan | None = None
        if device.type == "cuda":
            if (geometry.kv_lora_rank, geometry.row_dim) != (KV_LORA_RANK, ROW_DIM):
                raise ArgumentError("geometry", "kv_lora_rank 512 and qk_rope_head_dim 64 on CUDA", geometry)
            limits = self.max_batch, self.max_nodes, self.max_tokens
            self._cuda = CudaPlan(geometry.num_heads, *limits, device, batch_invariant, exact=exact)
            self.update([])

    def update(self, requests: Sequence[VerifyRequest]) -> None:
        """Take the requests of the next step. Raises ArgumentError, and keeps the earlier ones, if they do not fit:
        the plan's limits, or a captured run's rows and pool."""
        pool_slots = ANY_POOL
        if self._cuda:
            self._cuda.require_no_capture()  # reading slots of a GPU would end the capture
            pool_slots = min(pool_slots, self._cuda.captured_slots)
        checked = check_requests(requests, pool_slots)
        self.take(checked)
        self._step.top_slot = max((int(s.max()) for r in checked for s in (r.prefix, r.tree) if len(s)), default=-1)

    def take(self, requests: Sequence[Request]) -> None:
        """The same for requests of whoever keeps the tables, whose slots and trees need no second look: a rank."""
        step = self._planned(requests)
        if self._cuda:
            self._cuda.update(requests)
        self._step = step

    def stage(self, requests: Sequence[Request]) -> None:
        """As `take` for a step that is a CUDA graph with `fetch` in it: the host writes memory, nothing is enqueued.
        Slots on the CPU. What was staged before must have been fetched; the plan has to live until this is."""
        step = self._planned(requests)
        if self._cuda:
            self._cuda.stage(requests)
        self._staged = step

    def _planned(self, requests: Sequence[Request]) -> "_Step":
        """Raises ArgumentError for requests beyond the plan's limits."""
        if len(requests) > self.max_batch:
            raise ArgumentError("requests", f"at most {self.max_batch}", len(requests))
        tokens = 0
        for i, request in enumerate(requests):
            if request.nodes > self.max_nodes:
                raise ArgumentError(f"requests[{i}].tree", f"at most {self.max_nodes} nodes", request.nodes)
            tokens += len(request.prefix)
        if tokens > self.max_tokens:
            raise ArgumentError("requests", f"at most {self.max_tokens} prefix tokens in all", tokens)
        return _Step([] if self._cuda else plan_reference(requests, self.geometry.num_heads))

    def fetch(self) -> None:
        """Enqueue the fetch of what `stage` wrote last, and the plan: once a step, before its layers' `run`. May be
        captured, after a first call outside of a capture; a replay fetches what is staged then. `update` and `take` may
        not: RuntimeError."""
        fetched = self._cuda.fetch() if self._cuda else True
        if fetched and self._staged is not None:
            self._step = self._staged

    @torch.no_grad()
    def run(self, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        """Verify attention of one layer into out [N, heads, kv_lora_rank] in q's dtype and lse [N, heads] float32.

        q [N, heads, row_dim] with N the nodes of all requests, one after another (on CUDA N may be larger); kv_pool
        [slots, row_dim].
        """
        scale = check_scale(softmax_scale)
        if torch.compiler.is_compiling():
            _run_plan(self._id, q, kv_pool, out, lse, scale)
        else:
            self._run(q, kv_pool, out, lse, scale)

    def _run(self, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        geometry, step = self.geometry, self._step
        check_tensors(q, kv_pool, geometry.row_dim)
        nodes = sum(plan.nodes for plan in step.plans)
        if self._cuda:
            check_kernel_takes(q)
            nodes = max(self._cuda.rows_needed(), len(q))
        for name, tensor, shape, dtype in (
            ("q", q, (nodes, geometry.num_heads, geometry.row_dim), q.dtype),
            ("out", out, (nodes, geometry.num_heads, geometry.kv_lora_rank), q.dtype),
            ("lse", lse, (nodes, geometry.num_heads), torch.float32),
        ):
            check_type(name, tensor, Tensor, f"a torch tensor {shape}")
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != self.device:
                got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                raise ArgumentError(name, f"{dtype} {shape} on {self.device}", got)
        if step.top_slot >= kv_pool.shape[0]:
            raise ArgumentError("kv_pool", f"more than {step.top_slot} slots", kv_pool.shape[0])
        if self._cuda:
            self._cuda.run(q, kv_pool, out, lse, softmax_scale)
        else:
            run_reference(q, kv_pool, step.plans, out, lse, softmax_scale)


def _device(device: str | torch.device) -> torch.device:
    """The device with its index. Raises ArgumentError for one that is not here or has no backend."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError("device", "'cpu' or a CUDA device", describe(device)) from None
    if found.type == "cpu":
        return torch.device("cpu")
    reason = why_not(found) if found.type == "cuda" else f"{describe(device)}, which has no backend"
    if reason:
        raise ArgumentError("device", "'cpu', or a CUDA device and kernels for it", reason)
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


_ids = itertools.count()
_living: weakref.WeakValueDictionary[int, VerifyPlan] = weakref.WeakValueDictionary()


@torch.library.custom_op("tpverify::run_plan", mutates_args=("out", "lse"))
def _run_plan(plan: int, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
    """A compiled graph holds no object but tensors: it names the plan by number."""
    if plan not in _living:
        raise ArgumentError("plan", "a VerifyPlan of this process that still exists", plan)
    _living[plan]._run(q, kv_pool, out, lse, softmax_scale)


@_run_plan.register_fake
def _(plan: int, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
    torch._check(out.shape[0] == q.shape[0] == lse.shape[0], lambda: "out, lse: expected a row for each of q")
