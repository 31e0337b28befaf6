"""Other kernels for the same work, used where they are installed.

A peer is made for one shape and run like ours: into an output of its own, on the current stream. Only one of them takes
a tree; the others compute the causal chain, which is less work.
"""

import functools
import importlib
import importlib.metadata
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verify_case import LATENT, ROPE, SCALE, VerifyCase

WORKSPACE_BYTES = 512 << 20
SM120_SHARED = 101_376  # bytes of shared memory that FlashInfer's FA2 would find on sm_120


class Unsupported(Exception):
    """The peer does not take this shape."""


@dataclass(frozen=True)
class Peer:
    """prepare(case) gives a call that computes the case and returns out [N, heads, 512]. tree: it takes a mask."""

    name: str
    package: str  # as pip names it
    tree: bool
    prepare: Callable[[VerifyCase], Callable[[], Tensor]]

    def version(self) -> str | None:
        """None where it is not installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def flashinfer(case: VerifyCase, backend: str, as_on_sm120: bool = False) -> Callable[[], Tensor]:
    """backend "fa2" or "fa3", page size 1. as_on_sm120: FA2 in the configuration that 101,376 B allow: one stage,
    16-token tiles, scores computed by both warp groups."""
    mla: Any = importlib.import_module("flashinfer.mla")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    usual = mla.get_batch_mla_module
    try:
        if as_on_sm120:
            mla.get_batch_mla_module = lambda *_: fa2_as_on_sm120()
        lengths = torch.full((case.shape.batch,), case.tokens, dtype=torch.int32, device=case.device)
        wrapper.plan(
            case.node_begins, case.token_begins, case.slots.int(), lengths, case.shape.heads, LATENT, ROPE, 1, True,
            SCALE, case.q.dtype, case.pool.dtype,
        )  # fmt: skip
    finally:
        mla.get_batch_mla_module = usual
    q_nope, q_pe = case.q.split((LATENT, ROPE), dim=-1)
    ckv, kpe = case.pool[:, None].split((LATENT, ROPE), dim=-1)
    out = torch.empty_like(q_nope, memory_format=torch.contiguous_format)
    return lambda: wrapper.run(q_nope, q_pe, ckv, kpe, out=out)


@functools.cache
def fa2_as_on_sm120() -> object:
    """FlashInfer's FA2 module, built anew with sm_120's shared memory in place of the device's."""
    env = importlib.import_module("flashinfer.jit.env")
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    spec = modules.gen_batch_mla_module("fa2", *[torch.bfloat16] * 3, torch.int32, LATENT, ROPE, False)
    folder = env.FLASHINFER_GEN_SRC_DIR / f"batch_mla_{SM120_SHARED}"
    shutil.copytree(spec.sources[0].parent, folder, dirs_exist_ok=True)
    run = folder / "batch_mla_run.cu"
    asked = f"#define cudaDeviceGetAttribute(value, ...) (*(value) = {SM120_SHARED}, cudaSuccess)\n"
    run.write_text("#include <cuda_runtime.h>\n#include <cooperative_groups.h>\n" + asked + run.read_text())
    return modules.gen_jit_spec(folder.name, [folder / source.name for source in spec.sources]).build_and_load()


def sglang_arguments(case: VerifyCase, custom_mask: Tensor | None) -> tuple[Tensor, tuple]:
    prefix, tree = case.slots_by_request[:, : case.shape.prefix], case.slots_by_request[:, case.shape.prefix :]
    rows = case.pool[tree.reshape(-1)][:, None].contiguous()
    out = case.q.new_empty(*case.q.shape[:2], LATENT)
    pool = case.pool[:, None]
    begins = torch.arange(case.shape.batch + 1, device=case.device, dtype=torch.int32)
    mask_begins = begins.long() * case.shape.nodes * case.tokens
    return out, (
        case.q, rows, rows[..., :LATENT].contiguous(), out, pool, pool[..., :LATENT], case.node_begins,
        begins * case.shape.prefix, prefix.reshape(-1).long(), custom_mask, True, mask_begins, case.shape.nodes,
        1.0, 1.0, SCALE,
    )  # fmt: skip


def sglang_extend(case: VerifyCase) -> Callable[[], Tensor]:
    """What SGLang verifies trees with: a mask [n, S + n] a request, of which it skips the prefix part."""
    extend = importlib.import_module("sglang.kernels.ops.attention.extend_attention")
    prefix = torch.ones(case.shape.nodes, case.shape.prefix, dtype=torch.bool, device=case.device)
    mask = torch.cat([torch.cat([prefix, bits], dim=1).reshape(-1) for bits in case.bits])
    out, arguments = sglang_arguments(case, mask)

    def run() -> Tensor:
        extend.extend_attention_fwd(*arguments)
        return out

    return run


def sglang_verify_mla(case: VerifyCase) -> Callable[[], Tensor]:
    verify = importlib.import_module("sglang.kernels.ops.attention.verify_mla")
    out, arguments = sglang_arguments(case, None)
    if not verify.verify_shared_kv_fwd(*arguments):
        raise Unsupported

    def run() -> Tensor:
        verify.verify_shared_kv_fwd(*arguments)
        return out

    return run


def flash_mla(case: VerifyCase) -> Callable[[], Tensor]:
    """Dense FlashMLA (wgmma) on random pages of 64 tokens, the smallest that it takes."""
    library = importlib.import_module("flash_mla")
    pages, table = case.paged()
    q = case.q.view(case.shape.batch, case.shape.nodes, *case.q.shape[1:])
    lengths = torch.full((case.shape.batch,), case.tokens, dtype=torch.int32, device=case.device)
    state, _ = library.get_mla_metadata()
    out = torch.empty(0)

    def run() -> Tensor:
        nonlocal out
        out, _ = library.flash_mla_with_kvcache(
            q, pages, table, lengths, LATENT, state, softmax_scale=SCALE, causal=True, use_legacy=True
        )
        return out.flatten(0, 1)

    return run


PEERS = (
    Peer("FlashInfer FA2", "flashinfer-python", False, functools.partial(flashinfer, backend="fa2")),
    Peer(
        "FA2 as on sm_120", "flashinfer-python", False, functools.partial(flashinfer, backend="fa2", as_on_sm120=True)
    ),
    Peer("FlashInfer FA3", "flashinfer-python", False, functools.partial(flashinfer, backend="fa3")),
    Peer("FlashMLA", "sgl-flash-mla", False, flash_mla),
    Peer("SGLang verify_mla", "sglang", False, sglang_verify_mla),
    Peer("SGLang extend", "sglang", True, sglang_extend),
)
