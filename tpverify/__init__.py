"""Verify step of tree speculative decoding on MLA models: draft trees, tree-masked attention, tensor-parallel ranks."""
# ruff: noqa: F401  the imports for type checkers

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpverify.config import MlaGeometry, RuntimeConfig
    from tpverify.errors import ArgumentError, ClusterError, PoolFull, RankFailure
    from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
    from tpverify.ops.plan import VerifyPlan
    from tpverify.runtime.engine import Engine
    from tpverify.runtime.generation import GenerationResult
    from tpverify.runtime.runtime import Draft, VerifyRuntime
    from tpverify.tree import Accept, DraftTree, accept_greedy, accept_sampled, build_ddtree, build_ddtree_topk

__version__ = "0.1.0"

# Imported at first use: the commands answer --help, and the doctor its questions, without torch and Ray.
_MODULES = {
    "config": ["MlaGeometry", "RuntimeConfig"],
    "errors": ["ArgumentError", "ClusterError", "PoolFull", "RankFailure"],
    "ops.attention": ["TreeMask", "VerifyRequest", "verify_attention"],
    "ops.plan": ["VerifyPlan"],
    "runtime.engine": ["Engine"],
    "runtime.generation": ["GenerationResult"],
    "runtime.runtime": ["Draft", "VerifyRuntime"],
    "tree": ["Accept", "DraftTree", "accept_greedy", "accept_sampled", "build_ddtree", "build_ddtree_topk"],
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
