"""Verify step of tree speculative decoding on MLA models: draft trees, tree-masked attention, tensor-parallel ranks."""

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError, ClusterError, PoolFull, RankFailure
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree import Accept, DraftTree, accept_greedy, accept_sampled, build_ddtree, build_ddtree_topk

__version__ = "0.1.0"
__all__ = [
    "Accept",
    "ArgumentError",
    "ClusterError",
    "Draft",
    "DraftTree",
    "Engine",
    "GenerationResult",
    "MlaGeometry",
    "PoolFull",
    "RankFailure",
    "RuntimeConfig",
    "TreeMask",
    "VerifyPlan",
    "VerifyRequest",
    "VerifyRuntime",
    "accept_greedy",
    "accept_sampled",
    "build_ddtree",
    "build_ddtree_topk",
    "verify_attention",
]
