"""Dense layers in which the bits of a row depend on that row alone.

By loops of the host library (csrc/host/dense_rows.h) for float32, else by the products of ops/gemm.py and operations of
torch on rows padded to whole blocks: an elementwise or reducing kernel then never meets a ragged end. The two ways
differ in their last bits, so all ranks of a group take the same one.
"""

import ctypes
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify import native
from tpverify.ops import gemm


def runs_natively(dtype: torch.dtype) -> bool:
    """Whether the host library is there, and takes such numbers."""
    return dtype == torch.float32 and native.host() is not None


class Linear:
    """x @ weight.T for a weight [N, K], laid out once for its products; or for one [H, N, K], head by head."""

    def __init__(self, weight: Tensor) -> None:
        self._heads = weight.shape[:-2]
        self._outputs, self._inputs = weight.shape[-2:]
        self._native = runs_natively(weight.dtype)
        if self._native:
            panels = F.pad(weight, (0, 0, 0, -self._outputs % native.PANEL)).unflatten(-2, (-1, native.PANEL))
            self._weight = panels.transpose(-1, -2).contiguous()
        else:
            self._weight = weight.transpose(-1, -2).contiguous()

    def __call__(self, x: Tensor, add: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [M, K], or [M, H, K], -> [M, N], or [M, H, N], plus `add`, a tensor of that shape; into `out` if given."""
        if out is None:
            out = x.new_empty(*x.shape[:-1], self._outputs)
        if not self._native:
            product = self._matmul(x)
            return out.copy_(product if add is None else add + product)
        assert x.dtype == out.dtype == torch.float32 and x.shape[-1] == self._inputs
        x = _dense_rows(x)
        x_head, y_head = (x.stride(1), out.stride(1)) if self._heads else (0, 0)
        if add is not None and (add.stride() != out.stride() or add.shape != out.shape or add.dtype != out.dtype):
            assert _recorder.of_thread is None
            add = out.copy_(add)
        _call(
            "tpv_linear", x.shape[0], self._inputs, self._outputs, self._heads.numel(), 0, x.stride(0), x_head,
            out.stride(0), y_head, x, self._weight, add, out,
        )  # fmt: skip
        return out

    def _matmul(self, x: Tensor) -> Tensor:
        rows = gemm.pad_rows(x)
        if self._heads:
            return gemm.matmul_heads(rows.transpose(0, 1), self._weight).transpose(0, 1)[: len(x)]
        return gemm.matmul(rows, self._weight)[: len(x)]


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """weight [N] * x [M, N] / sqrt(mean(x^2) + eps), the mean over a row; into `out` if given."""
    if out is None:
        out = x.new_empty(x.shape)
    if not runs_natively(x.dtype):
        rows = gemm.pad_rows(x)
        return out.copy_((weight * (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)))[: len(x)])
    assert weight.shape == x.shape[1:] and weight.dtype == x.dtype
    x, weight = _dense_rows(x), weight.contiguous()
    _call("tpv_rms_norm", *x.shape, eps, x.stride(0), out.stride(0), x, weight, out)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """x [M, H, D] rotated by cos and sin [M, D / 2]; into `out` if given. Pairs lie side by side in x if interleaved,
    else in halves; the result has them in halves."""
    if out is None:
        out = x.new_empty(x.shape)
    if not runs_natively(x.dtype):
        rows, cos, sin = gemm.pad_rows(x), gemm.pad_rows(cos)[:, None], gemm.pad_rows(sin)[:, None]
        a, b = (rows[..., 0::2], rows[..., 1::2]) if interleaved else rows.chunk(2, dim=-1)
        return out.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)[: len(x)])
    assert cos.shape == sin.shape == (len(x), x.shape[2] // 2) and cos.dtype == sin.dtype == x.dtype
    x, cos, sin = _dense_rows(x), cos.contiguous(), sin.contiguous()
    _call("tpv_rope", *x.shape, interleaved, 0, *x.stride()[:2], *out.stride()[:2], x, cos, sin, out)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate and up side by side [M, 2 N] -> silu(gate) * up [M, N]."""
    if not runs_natively(gate_up.dtype):
        gate, up = gemm.pad_rows(gate_up).chunk(2, dim=1)
        return (F.silu(gate) * up)[: len(gate_up)]
    assert gate_up.shape[1] % 2 == 0
    gate_up = gate_up.contiguous()
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    _call("tpv_silu_mul", rows, columns, 0, gate_up, out)
    return out


def place(x: Tensor, out: Tensor, at: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """out[at] = x [M, N] * scale, at int64 [M] distinct rows of `out`; without it out = x * scale."""
    if not runs_natively(x.dtype):
        out[slice(None) if at is None else at] = x * scale
        return out
    assert x.dtype == out.dtype and x.shape[1] == out.shape[1] and out.stride(1) == 1
    x = _dense_rows(x)
    _call("tpv_place", *x.shape, scale, len(out), x.stride(0), out.stride(0), x, at, out)
    return out


class Recording:
    """What `body` did by calls of the host library and by `perform`, to be done again on the same memory, as a CUDA
    graph does: calls that lie between two others of `perform` become one. Nothing else may compute in `body`, which
    runs once."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._calls: list[tuple[str, ctypes.Structure]] = []
        self._actions: list[Callable[[], None]] = []
        self._memory: list[object] = []  # what the calls point to
        assert _recorder.of_thread is None
        _recorder.of_thread = self
        try:
            body()
        finally:
            _recorder.of_thread = None
        self._join_calls()

    def add_call(self, function: str, params: ctypes.Structure, memory: object) -> None:
        self._calls.append((function, params))
        self._memory.append((params, memory))

    def add_action(self, action: Callable[[], None]) -> None:
        self._join_calls()
        self._actions.append(action)

    def _join_calls(self) -> None:
        library = native.host()
        if not self._calls or library is None:
            return
        calls = (native.Call * len(self._calls))()
        for call, (function, params) in zip(calls, self._calls, strict=True):
            call.function = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
            call.params = ctypes.addressof(params)
        replay = native.ReplayParams(ctypes.sizeof(native.ReplayParams), len(calls), ctypes.addressof(calls))
        self._memory.append(calls)
        self._actions.append(lambda: native.check(library, library.tpv_replay(replay)))
        self._calls = []

    def replay(self) -> None:
        for action in self._actions:
            action()


class _Recorder(threading.local):
    of_thread: Recording | None = None


_recorder = _Recorder()


def perform(action: Callable[[], None]) -> None:
    """Call it, now and in each replay of what is being recorded."""
    action()
    if _recorder.of_thread is not None:
        _recorder.of_thread.add_action(action)


def call(function: str, params: ctypes.Structure, memory: object) -> None:
    """A function of the host library, on memory that a recording is to keep."""
    library = native.host()
    assert library is not None
    native.check(library, getattr(library, function)(params))
    if _recorder.of_thread is not None:
        _recorder.of_thread.add_call(function, params, memory)


def _dense_rows(x: Tensor) -> Tensor:
    assert x.stride(-1) == 1 or _recorder.of_thread is None
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(function: str, *fields: int | float | Tensor | None) -> None:
    """The function on a struct of these fields after struct_size."""
    params = native.FUNCTIONS[function]
    values = [field.data_ptr() if isinstance(field, Tensor) else field for field in fields]
    call(function, params(ctypes.sizeof(params), *values), fields)
