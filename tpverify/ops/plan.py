"""A verify call that is prepared once a step and run once a layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tpverify.config import MAX_NODES, MlaGeometry, check_range
from tpverify.errors import ArgumentError
from tpverify.ops.attention import (
    VerifyRequest,
    check_scale,
    check_tensors,
    plan_requests,
    require_backend,
    run_reference,
)
from tpverify.ops.reference import RequestPlan

ANY_POOL = 2**63 - 1  # slots are checked against the pool when the plan runs


class VerifyPlan:
    """The requests of one step, checked once, for all layers.

    geometry.num_heads heads a call; at most max_batch requests of max_nodes nodes each, and max_tokens prefix tokens in
    all. device: "cpu" (the reference) in this build. batch_invariant as in verify_attention. Raises ArgumentError.
    """

    def __init__(
        self,
        geometry: MlaGeometry,
        max_batch: int,
        max_nodes: int,
        max_tokens: int,
        device: str | torch.device,
        batch_invariant: bool = False,
    ) -> None:
        check_range("max_batch", max_batch, 1, 4096)
        check_range("max_nodes", max_nodes, 1, MAX_NODES)
        check_range("max_tokens", max_tokens, 0, 2**31 - 1)
        require_backend("auto", torch.device(device))
        self.geometry, self.max_batch, self.max_nodes, self.max_tokens = geometry, max_batch, max_nodes, max_tokens
        self.batch_invariant = batch_invariant
        self._plans: list[RequestPlan] = []
        self._top_slot = -1

    def update(self, requests: Sequence[VerifyRequest]) -> None:
        """Take the requests of the next step. Raises ArgumentError, and keeps the earlier ones, if they do not fit."""
        if len(requests) > self.max_batch:
            raise ArgumentError("requests", f"at most {self.max_batch}", len(requests))
        plans = plan_requests(requests, self.geometry.num_heads, ANY_POOL)
        for i, plan in enumerate(plans):
            if plan.nodes > self.max_nodes:
                raise ArgumentError(f"requests[{i}].tree", f"at most {self.max_nodes} nodes", plan.nodes)
        tokens = sum(len(plan.prefix) for plan in plans)
        if tokens > self.max_tokens:
            raise ArgumentError("requests", f"at most {self.max_tokens} prefix tokens in all", tokens)
        self._plans = plans
        self._top_slot = max((int(s.max()) for p in plans for s in (p.prefix, p.tree) if len(s)), default=-1)

    def run(self, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        """Verify attention of one layer into out [N, heads, kv_lora_rank] in q's dtype and lse [N, heads] float32.

        q [N, heads, row_dim] with N the nodes of all requests, one after another; kv_pool [slots, row_dim].
        """
        geometry, nodes = self.geometry, sum(plan.nodes for plan in self._plans)
        check_tensors(q, kv_pool, geometry.row_dim)
        check_scale(softmax_scale)
        for name, tensor, shape, dtype in (
            ("q", q, (nodes, geometry.num_heads, geometry.row_dim), q.dtype),
            ("out", out, (nodes, geometry.num_heads, geometry.kv_lora_rank), q.dtype),
            ("lse", lse, (nodes, geometry.num_heads), torch.float32),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ArgumentError(name, f"{dtype} {shape}", f"{tensor.dtype} {tuple(tensor.shape)}")
        if self._top_slot >= kv_pool.shape[0]:
            raise ArgumentError("kv_pool", f"more than {self._top_slot} slots", kv_pool.shape[0])
        run_reference(q, kv_pool, self._plans, out, lse, softmax_scale)
