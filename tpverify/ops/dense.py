"""Dense layers in which the bits of a row depend on that row alone.

By loops of the host library (csrc/host/dense_rows.h) for float32, else by the products of ops/gemm.py and operations of
torch on rows padded to whole blocks: an elementwise or reducing kernel then never meets a ragged end. The two ways
differ in their last bits, so all ranks of a group take the same one.
"""

import ctypes

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
            add = out.copy_(add)
        add_at = None if add is None else add.data_ptr()
        _call(
            "tpv_linear", x.shape[0], self._inputs, self._outputs, self._heads.numel(), 0, x.stride(0), x_head,
            out.stride(0), y_head, x.data_ptr(), self._weight.data_ptr(), add_at, out.data_ptr(),
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
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _call("tpv_rms_norm", *x.shape, eps, x.stride(0), out.stride(0), *pointers)
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
    pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
    _call("tpv_rope", *x.shape, interleaved, 0, *x.stride()[:2], *out.stride()[:2], *pointers)
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
    _call("tpv_silu_mul", rows, columns, 0, gate_up.data_ptr(), out.data_ptr())
    return out


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _call(function: str, *fields: int | float | None) -> None:
    """The function on a struct of these fields after struct_size."""
    library, params = native.host(), native.FUNCTIONS[function]
    assert library is not None
    native.check(library, getattr(library, function)(params(ctypes.sizeof(params), *fields)))
