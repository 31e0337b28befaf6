"""The CUDA kernels: ctypes mirrors of csrc/tpverify.h, and a step's tables on the device."""

import ctypes
import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.ops.staging import VECTOR, Request, RequestTables, Staged, StagingRing

CUDA_LIBRARY = "libtpverify_cuda.so"
MAX_HEADS = 128
TILE_ROWS = (16, 32, 64)  # rows (node x heads + head) that a block of the kernel takes
KERNELS = {"cuda": 0, "cuda_fp32": 1, "cuda_naive": 2}  # tpv_kernel by backend; only the first takes a plan
DTYPES = {"cuda": torch.bfloat16, "cuda_fp32": torch.float32, "cuda_naive": torch.float32}  # that they take
DTYPE_CODES = {torch.bfloat16: 1, torch.float32: 2}  # tpv_dtype
SPLIT_HEADS = 8  # exact plans choose splits for this many heads, whatever a rank has: tp 1 to 8 then agree bit for bit

_i32, _i64, _u64, _f32, _ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_float, ctypes.c_void_p


class VerifySplit(ctypes.Structure):
    _fields_ = [
        ("heads", _i32), ("tile_rows", _i32), ("split_heads", _i32), ("split_tile_rows", _i32),
        ("batch_invariant", _i32), ("reserved", _i32),
    ]  # fmt: skip


class VerifyWorkspaceParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("split", VerifySplit), ("max_batch", _i32), ("max_nodes", _i32), ("max_tokens", _i64),
        ("bytes", _u64),
    ]  # fmt: skip


class VerifyRequests(ctypes.Structure):
    _fields_ = [
        ("slots", _ptr), ("slot_begin", _ptr), ("prefix_len", _ptr), ("nodes", _ptr), ("node_begin", _ptr),
        ("word_begin", _ptr), ("words", _ptr), ("batch", _i32), ("max_nodes", _i32), ("max_tokens", _i64),
    ]  # fmt: skip


class FetchSource(ctypes.Structure):
    _fields_ = [("values", _ptr), ("vectors", _i64)]


class FetchParams(ctypes.Structure):
    _fields_ = [("struct_size", _u64), ("stream", _ptr), ("source", _ptr), ("target", _ptr), ("capacity", _i64)]


class VerifyPlanParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("split", VerifySplit), ("requests", VerifyRequests), ("workspace", _ptr),
        ("workspace_bytes", _u64), ("stream", _ptr), ("split_tile_rows", _ptr),
    ]  # fmt: skip


class VerifyRunParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("split", VerifySplit), ("requests", VerifyRequests), ("workspace", _ptr),
        ("workspace_bytes", _u64), ("stream", _ptr), ("kernel", _i32), ("dtype", _i32), ("q", _ptr), ("kv", _ptr),
        ("out", _ptr), ("lse", _ptr), ("q_stride_node", _i64), ("q_stride_head", _i64), ("kv_stride_slot", _i64),
        ("out_stride_node", _i64), ("out_stride_head", _i64), ("lse_stride_node", _i64), ("out_nodes", _i32),
        ("softmax_scale", _f32),
    ]  # fmt: skip


class MoveRowsParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("stream", _ptr), ("pool", _ptr), ("layer_stride", _i64), ("slot_stride", _i64),
        ("row_bytes", _i64), ("src", _ptr), ("dst", _ptr), ("hashes", _ptr), ("layers", _i32), ("count", _i32),
    ]  # fmt: skip


class RopeCacheParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", _u64), ("stream", _ptr), ("x", _ptr), ("down", _ptr), ("queries", _ptr), ("rotation", _ptr),
        ("slots", _ptr), ("nope", _ptr), ("q", _ptr), ("pool", _ptr), ("q_stride_node", _i64), ("q_stride_head", _i64),
        ("pool_stride_slot", _i64), ("nodes", _i32), ("hidden", _i32), ("low_width", _i32), ("nope_width", _i32),
        ("shards", _i32), ("shard_heads", _i32), ("eps", _f32), ("norm_eps", _f32),
    ]  # fmt: skip


FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "tpv_verify_workspace_size": VerifyWorkspaceParams,
    "tpv_fetch": FetchParams,
    "tpv_verify_plan": VerifyPlanParams,
    "tpv_verify_run": VerifyRunParams,
    "tpv_move_rows": MoveRowsParams,
    "tpv_rope_cache": RopeCacheParams,
}


@functools.cache
def library() -> ctypes.CDLL | str:
    """The library, loaded once, or why there is none. Raises ArgumentError for one of another ABI."""
    found = native.load(CUDA_LIBRARY, FUNCTIONS)
    if not isinstance(found, str):
        found.tpv_cuda_archs.restype = ctypes.c_char_p
    return found


def why_not(device: torch.device | None = None) -> str | None:
    """Why the kernels cannot run here, on a GPU or by default on the current one; None if they can."""
    found = library()
    if isinstance(found, str):
        return found
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    index = torch.cuda.current_device() if device is None or device.index is None else device.index
    if index >= torch.cuda.device_count():
        return f"GPU {index} of {torch.cuda.device_count()}"
    return without_kernels(index)


def without_kernels(index: int) -> str | None:
    """What a GPU that the library has no kernels for is; None for others."""
    capability = torch.cuda.get_device_capability(index)
    if any(capability[0] == major and capability[1] >= minor for major, minor in archs()):
        return None
    return f"{torch.cuda.get_device_name(index)} of compute capability {capability[0]}.{capability[1]}"


def other_gpus() -> str | None:
    """Those that this process sees and that the library has no kernels for, if any."""
    found = filter(None, map(without_kernels, range(torch.cuda.device_count())))
    return ", ".join(found) or None


def archs() -> list[tuple[int, int]]:
    """Compute capabilities that the library holds kernels for; a later minor version runs them too."""
    found = library()
    return [] if isinstance(found, str) else [divmod(int(arch), 10) for arch in found.tpv_cuda_archs().split(b",")]


def call(function: str, params: ctypes.Structure) -> None:
    """Raises what the status means: ArgumentError, MemoryError or RuntimeError."""
    found = library()
    assert not isinstance(found, str)
    params.struct_size = ctypes.sizeof(params)
    native.check(found, getattr(found, function)(ctypes.byref(params)))


def choose_tile_rows(lengths: Sequence[tuple[int, int]], heads: int, multiprocessors: int) -> int:
    """The fastest tile, by measurement, for requests of (prefix, nodes). Small tiles start and end sooner."""
    tiles = sum(-(-nodes * heads // 64) * -(-(prefix + nodes) // 16) for prefix, nodes in lengths) / multiprocessors
    rows = max((nodes * heads for _, nodes in lengths), default=0)
    if rows <= 32:
        return 16 if rows <= 16 or tiles < 10 else 32
    if tiles < 3:
        return 16
    return 32 if tiles < (20 if rows <= 64 else 15) else 64


_rings: dict[torch.device, StagingRing] = {}


def _ring(device: torch.device) -> StagingRing:
    found = _rings.get(device)
    return found if found is not None else _rings.setdefault(device, StagingRing())  # of two threads' the first


def _lengths(requests: Sequence[Request]) -> list[tuple[int, int]]:
    return [(len(request.prefix), request.nodes) for request in requests]


class CudaPlan:
    """A step's requests in device buffers of fixed addresses, so that captured runs can be replayed for other steps.

    Limits and exact as of VerifyPlan; kernel one of KERNELS. Everything is allocated here: for "cuda" a workspace of
    the order of 50 MB for 8 heads and 400 MB for 64.
    """

    def __init__(
        self,
        heads: int,
        max_batch: int,
        max_nodes: int,
        max_tokens: int,
        device: torch.device,
        batch_invariant: bool,
        kernel: str = "cuda",
        exact: bool = True,
    ) -> None:
        if not 1 <= heads <= MAX_HEADS:
            raise ArgumentError("heads", f"1 to {MAX_HEADS} on CUDA", heads)
        self.heads, self.max_batch, self.max_nodes, self.max_tokens = heads, max_batch, max_nodes, max_tokens
        self.device, self.batch_invariant, self.kernel = device, batch_invariant, kernel
        self._split_heads = SPLIT_HEADS if exact else heads
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        size = 0
        if kernel == "cuda":
            with torch.cuda.device(device):
                size = max(self._workspace_bytes(a, b) for a in TILE_ROWS for b in TILE_ROWS)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        self._tables = RequestTables(max_batch, max_nodes, max_tokens, device)
        self._requests = VerifyRequests(*self._tables.pointers(), max_batch, max_nodes, max_tokens)
        self._tile_rows, self._captured = TILE_ROWS[0], False  # a captured kernel keeps its tile
        # Of runs that were captured: the fewest rows of out, the fewest slots of a pool.
        self._captured_nodes, self.captured_slots = sys.maxsize, sys.maxsize
        # Nodes in the tables as far as is known here, and staged; replays of a captured fetch are not seen.
        self._nodes, self._fetch_captured = 0, False
        self._staged_nodes: int | None = None

    def _split_of(self, tile_rows: int, split_tile_rows: int) -> VerifySplit:
        return VerifySplit(self.heads, tile_rows, self._split_heads, split_tile_rows, self.batch_invariant)

    def _workspace_bytes(self, tile_rows: int, split_tile_rows: int) -> int:
        limits = {"max_batch": self.max_batch, "max_nodes": self.max_nodes, "max_tokens": self.max_tokens}
        params = VerifyWorkspaceParams(split=self._split_of(tile_rows, split_tile_rows), **limits)
        call("tpv_verify_workspace_size", params)
        return params.bytes

    def update(self, requests: Sequence[Request]) -> None:
        """Enqueue the fetch of the tables, and the plan, on the current stream. Raises ArgumentError, and changes
        nothing, for more nodes than a captured run has rows for; RuntimeError in a capture, whose replays would fetch
        from a buffer that is others' by then."""
        self.require_no_capture()
        nodes = self._room_for(requests)
        with torch.cuda.device(self.device):
            with _ring(self.device).turn() as staged:
                there = self._write(staged, requests)
                if not self._captured:
                    self._tile_rows = choose_tile_rows(_lengths(requests), self.heads, self._multiprocessors)
                self._nodes = nodes
                self._fetch(staged)
            for part, slots in there:
                self._tables.buffer[part] = slots

    def require_no_capture(self) -> None:
        if self._capturing():
            raise RuntimeError("a plan cannot be updated while a CUDA graph is captured: capture its fetch, then stage")

    def stage(self, requests: Sequence[Request]) -> None:
        """The same for `fetch`: nothing is enqueued."""
        nodes = self._room_for(requests)
        if any(isinstance(slots, Tensor) and not slots.is_cpu for r in requests for slots in (r.prefix, r.tree)):
            raise ArgumentError("requests", "slots on the CPU", "slots on a GPU")
        if self._fetch_captured and self._staged_nodes is not None:
            self._nodes = self._staged_nodes  # a replay has fetched them, or this may not be called
        self._write(self._staged, requests)
        self._staged_nodes = nodes

    def fetch(self) -> bool:
        """Whether it was enqueued, not captured."""
        with torch.cuda.device(self.device):
            captured = self._capturing()
            if captured:
                self._captured = self._fetch_captured = True
            elif self._staged_nodes is not None:
                self._nodes = self._staged_nodes
            self._fetch(self._staged)
        return not captured

    def rows_needed(self) -> int:
        """Of q, out and lse, now: as many as the tables may have nodes, whether or not a replay has fetched them."""
        return max(self._nodes, self._staged_nodes or 0) if self._fetch_captured else self._nodes

    def _capturing(self) -> bool:
        with torch.cuda.device(self.device):  # whose current stream is meant, not that of the current device
            return torch.cuda.is_current_stream_capturing()

    @functools.cached_property
    def _staged(self) -> Staged:
        return Staged()

    def _room_for(self, requests: Sequence[Request]) -> int:
        """Nodes of all. Raises ArgumentError for more than a captured run has rows for."""
        nodes = sum(request.nodes for request in requests)
        if nodes > self._captured_nodes:
            raise ArgumentError("requests", f"at most {self._captured_nodes} nodes, as captured", nodes)
        return nodes

    def _write(self, staged: Staged, requests: Sequence[Request]) -> list[tuple[slice, Tensor]]:
        rows = choose_tile_rows(_lengths(requests), self._split_heads, self._multiprocessors)
        return self._tables.write(staged, requests, rows)

    def _fetch(self, staged: Staged) -> None:
        stream, buffer = torch.cuda.current_stream().cuda_stream, self._tables.buffer
        capacity = buffer.numel() // VECTOR
        call("tpv_fetch", FetchParams(stream=stream, source=staged.source, target=buffer.data_ptr(), capacity=capacity))
        if self.kernel == "cuda":
            call("tpv_verify_plan", VerifyPlanParams(**self._common(), split_tile_rows=self._tables.split_tile_rows))

    def _common(self) -> dict[str, Any]:
        return {
            "split": self._split_of(self._tile_rows, TILE_ROWS[0]),
            "requests": self._requests,
            "workspace": self._workspace.data_ptr(),
            "workspace_bytes": self._workspace.numel(),
            "stream": torch.cuda.current_stream().cuda_stream,
        }

    def run(self, q: Tensor, kv_pool: Tensor, out: Tensor, lse: Tensor, softmax_scale: float) -> None:
        """Launches on the current stream, nothing else. Rows of out and lse beyond the nodes get 0 and -inf."""
        for name, tensor in (("q", q), ("kv_pool", kv_pool), ("out", out), ("lse", lse)):
            if tensor.device != self.device or tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
                raise ArgumentError(
                    name, f"a dense last axis on {self.device}", f"{tensor.stride()} on {tensor.device}"
                )
        if not len(out):
            return
        with torch.cuda.device(self.device):
            if self._capturing():
                self._captured = True
                self._captured_nodes = min(len(out), self._captured_nodes)
                self.captured_slots = min(len(kv_pool), self.captured_slots)
            params = VerifyRunParams(
                **self._common(),
                kernel=KERNELS[self.kernel],
                dtype=DTYPE_CODES[q.dtype],
                q=q.data_ptr(),
                kv=kv_pool.data_ptr(),
                out=out.data_ptr(),
                lse=lse.data_ptr(),
                q_stride_node=q.stride(0),
                q_stride_head=q.stride(1),
                kv_stride_slot=kv_pool.stride(0),
                out_stride_node=out.stride(0),
                out_stride_head=out.stride(1),
                lse_stride_node=lse.stride(0),
                out_nodes=len(out),
                softmax_scale=softmax_scale,
            )
            call("tpv_verify_run", params)


def move_rows(pool: Tensor, src: Tensor, dst: Tensor, hashes: Tensor | None) -> None:
    """One launch on the current stream: pool [layers, slots, row] on CUDA with a dense last axis; beside it src, dst
    int32 [count] and hashes int64 [layers, count]."""
    with torch.cuda.device(pool.device):
        params = MoveRowsParams(
            stream=torch.cuda.current_stream().cuda_stream,
            pool=pool.data_ptr(),
            layer_stride=pool.stride(0) * pool.itemsize,
            slot_stride=pool.stride(1) * pool.itemsize,
            row_bytes=pool.shape[2] * pool.itemsize,
            src=src.data_ptr(),
            dst=dst.data_ptr(),
            hashes=None if hashes is None else hashes.data_ptr(),
            layers=pool.shape[0],
            count=len(src),
        )
        call("tpv_move_rows", params)
