"""Inputs of rope_cache, and what it is to make of them: two norms one after the other and a rotation, in float64."""

import numpy as np
import torch
from torch import Tensor

EPS, NORM_EPS = 1e-5, 1e-6


def norm_scale(rows: np.ndarray, eps: float) -> np.ndarray:
    return 1 / np.sqrt((rows * rows).mean(1, keepdims=True) + eps)


def turned(pairs: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """[..., dim] with pairs side by side, as complex numbers; angles [..., dim / 2]."""
    numbers = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * np.exp(1j * angles)
    return np.stack([numbers.real, numbers.imag], -1).reshape(pairs.shape)


class Rows:
    """n nodes; `size` scales the residual stream: small rows make eps count."""

    def __init__(
        self, n: int, shards: int, heads: int, *, hidden: int, low: int, nope: int, rank: int, rope: int,
        dtype: torch.dtype, device: str = "cpu", size: float = 1.0, seed: int = 0, spare: int = 0,
    ) -> None:  # fmt: skip
        """spare: columns of the pool's rows and of q's that are no one's."""
        generator = torch.Generator().manual_seed(seed)
        self.rank, self.low, self.nope_width, row = rank, low, nope, rank + rope

        def normal(*shape: int) -> Tensor:
            return (size * torch.randn(shape, generator=generator)).to(device, dtype)

        self.x, self.down, self.queries = normal(n, hidden), normal(n, low + row), normal(shards, n, heads, nope + rope)
        self.angles = torch.rand(n, rope // 2, generator=generator) * 6.28
        self.rotation = torch.stack([self.angles.cos(), self.angles.sin()], 2).to(device)
        self.slots = torch.randperm(3 * n + 1, generator=generator)[:n].to(device)
        self.nope = torch.full((shards, n, heads, nope), 7.0, dtype=dtype, device=device)
        self._q = torch.full((shards * heads, n, row + spare), 7.0, dtype=dtype, device=device)
        self._pool = torch.full((3 * n + 1, row + spare), 7.0, dtype=dtype, device=device)
        self.q, self.pool = self._q[..., :row].transpose(0, 1), self._pool[:, :row]

    def arguments(self) -> tuple[Tensor | float, ...]:
        inputs = self.x, self.down, self.queries, self.rotation, self.slots
        return *inputs, self.nope, self.q, self.pool, EPS, NORM_EPS

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """nope, the rotated part of q [n, heads, rope], rows of the pool [n, row]."""
        x, down, queries, angles = (t.cpu().double().numpy() for t in (self.x, self.down, self.queries, self.angles))
        first = norm_scale(x, EPS)
        low, latent, key = np.split(down * first, [self.low, self.low + self.rank], 1)
        second = first * norm_scale(low, NORM_EPS)
        queries = queries * second[:, None]
        rotated = turned(queries[..., self.nope_width :], angles[:, None])
        rows = np.concatenate([latent * norm_scale(latent, NORM_EPS), turned(key, angles)], 1)
        return queries[..., : self.nope_width], np.concatenate(rotated, 1), rows

    def found(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        results = self.nope, self.q[..., self.rank :], self.pool[self.slots]
        return tuple(t.cpu().double().numpy() for t in results)  # type: ignore[return-value]

    def check(self, tolerance: float) -> None:
        """Relative, element by element, but for what cancels in a rotation."""
        for found, expected in zip(self.found(), self.expected(), strict=True):
            assert found.shape == expected.shape
            assert (np.abs(found - expected) <= tolerance * (np.abs(expected) + 0.1 * np.abs(expected).max())).all()

    def check_untouched(self) -> None:
        """What is not to be written: the latent part of q, other slots, what lies beside the rows."""
        others = torch.ones(len(self.pool), dtype=torch.bool)
        others[self.slots.cpu()] = False
        row = self.pool.shape[1]
        for tensor in (self.q[..., : self.rank], self._pool[others], self._pool[:, row:], self._q[..., row:]):
            assert (tensor == 7).all()
