"""A grid of cases in which every two values of different dimensions meet, and what a case is."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpverify.config import MlaGeometry
from tpverify.ops.attention import TreeMask, VerifyRequest, check_requests
from tpverify.ops.cuda import DTYPES, CudaPlan
from tpverify.ops.plan import VerifyPlan

SCALE = 576**-0.5
POISON = 7.0  # what guard bands hold
DIMENSIONS: dict[str, tuple] = {
    "nodes": (1, 2, 7, 8, 9, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 257, 513, 1024),
    "prefix": (0, 1, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 185_000, 1_000_000),
    "heads": (1, 2, 4, 8, 12, 16, 64, 128),
    "tree": ("chain", "star", "near", "far"),
    "others": (0, 1, 7),  # requests beside
    "strided": ("nothing", "q", "pool", "out"),
    "slots": ("shuffled", "int32", "descending", "high"),
    "batch_invariant": (False, True),
    "leaf_is_nan": (False, True),
    "backend": ("cuda", "cuda_fp32", "cuda_naive"),  # bfloat16, float32, float32; on a CPU the reference in that type
}
HIGH = 7_500_000  # slots from here on lie more than 2^32 elements into the pool


@dataclass(frozen=True)
class Settings:
    nodes: int
    prefix: int
    heads: int
    tree: str
    others: int
    strided: str
    slots: str
    batch_invariant: bool
    leaf_is_nan: bool
    backend: str

    def __str__(self) -> str:
        return "-".join(map(str, vars(self).values()))


def allowed(settings: Settings) -> bool:
    """Fixed splits of a long prefix for many rows are partial results of 20 GB and more; float32 is slow."""
    work = settings.nodes * settings.heads * settings.prefix
    return work <= (10**8 if settings.backend != "cuda" else 10**10 if settings.batch_invariant else 10**12)


def pairs(settings: Settings) -> set[tuple]:
    return set(itertools.combinations(vars(settings).items(), 2))


def pairwise(seed: int = 0, tries: int = 20) -> list[Settings]:
    """Greedy: of several cases that hold an open pair, the one that holds most."""
    rng = random.Random(seed)
    names = list(DIMENSIONS)
    every = [
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in DIMENSIONS[a] for y in DIMENSIONS[b]
    ]
    open_pairs = dict.fromkeys(every)
    grid = []
    while open_pairs:
        (a, x), (b, y) = next(iter(open_pairs))
        drawn = [
            Settings(**{name: rng.choice(values) for name, values in DIMENSIONS.items()} | {a: x, b: y})
            for _ in range(tries)
        ]
        best = max(filter(allowed, drawn), key=lambda settings: len(pairs(settings) & open_pairs.keys()))
        for pair in pairs(best):
            open_pairs.pop(pair, None)
        grid.append(best)
    return grid


def tree_of(kind: str, n: int, rng: random.Random) -> tuple[TreeMask, np.ndarray]:
    """The mask, and as bool [n, n]. near: chains and fans; far: parents anywhere before, so no row is like the last
    (sglang pull/39703, FastDeploy pull/3514: masks cut short to a causal tile)."""
    bits, depths = np.zeros((n, -(-n // 64) * 64), bool), np.zeros(n, np.int32)
    reach = {"chain": 1, "near": 4}
    for i in range(n):
        if i:
            parent = 0 if kind == "star" else rng.randrange(max(0, i - reach.get(kind, n)), i)
            bits[i], depths[i] = bits[parent], depths[parent] + 1
        bits[i, i] = True
    return TreeMask(np.packbits(bits, axis=1, bitorder="little").view(np.uint64), depths), bits[:, :n].copy()


class Run:
    """A case on a device: random rows, NaN in every slot that nobody has, outputs in guard bands of poison."""

    def __init__(self, settings: Settings, device: str, seed: int = 0) -> None:
        self.settings, self.device, self.dtype = settings, device, DTYPES[settings.backend]
        rng = random.Random(f"{settings} {seed}")
        generator = torch.Generator(device).manual_seed(seed)
        self.lengths = [(rng.choice((0, 3, 100, 1000)), rng.choice((1, 5, 40))) for _ in range(settings.others)]
        self.main = rng.randrange(settings.others + 1)
        self.lengths.insert(self.main, (settings.prefix, settings.nodes))
        masks = [tree_of(settings.tree, n, rng) for _, n in self.lengths]
        self.bits = [torch.from_numpy(bits).to(device) for _, bits in masks]
        self.begins = [sum(s + n for s, n in self.lengths[:i]) for i in range(len(self.lengths))]
        self.firsts = [sum(n for _, n in self.lengths[:i]) for i in range(len(self.lengths))]
        tokens, self.nodes = (sum(sizes) for sizes in (map(sum, self.lengths), (n for _, n in self.lengths)))
        self.rows = torch.randn(tokens, 576, device=device, generator=generator).to(self.dtype)
        q = torch.randn(self.nodes, settings.heads, 576, device=device, generator=generator).to(self.dtype)
        self.leaf = rng.choice([i for i, row in enumerate(masks[self.main][1].sum(0)) if row == 1])
        if settings.leaf_is_nan:
            self.rows[self.begins[self.main] + settings.prefix + self.leaf] = torch.nan
        slots = torch.randperm(tokens + 20, device=device, generator=generator)[:tokens] + 1
        if settings.slots == "descending":
            slots = slots.sort(descending=True).values
        if settings.slots == "high":
            slots = slots + HIGH
        wide = 584 if settings.strided == "pool" else 576
        self.pool = torch.full((int(slots.max()) + 2, wide), torch.nan, device=device, dtype=self.dtype)[:, :576]
        self.pool[slots] = self.rows
        self.q = torch.full((self.nodes, 2 * settings.heads, 584), torch.nan, device=device, dtype=self.dtype)
        self.q = self.q[:, ::2, :576].copy_(q) if settings.strided == "q" else q
        parts = iter(
            (slots.int() if settings.slots == "int32" else slots).split([x for pair in self.lengths for x in pair])
        )
        self.requests = [VerifyRequest(next(parts), next(parts), mask) for mask, _ in masks]

    def __call__(self) -> tuple[Tensor, Tensor]:
        settings, lengths = self.settings, self.lengths
        bands = 3 if settings.strided == "out" else 1  # every third head of a wider tensor
        out = torch.full((self.nodes + 2, bands * settings.heads, 512), POISON, device=self.device, dtype=self.dtype)
        lse = torch.full((self.nodes + 2, 2 * settings.heads), POISON, device=self.device)
        inner, inner_lse = out[1:-1, ::bands], lse[1:-1, : settings.heads]
        limits = len(lengths), max(n for _, n in lengths), sum(s for s, _ in lengths)
        plan: VerifyPlan | CudaPlan
        if self.device == "cpu":
            plan = VerifyPlan(MlaGeometry(settings.heads), *limits, self.device, settings.batch_invariant)
            plan.update(self.requests)
        else:
            device = self.pool.device
            plan = CudaPlan(settings.heads, *limits, device, settings.batch_invariant, settings.backend)
            plan.update(check_requests(self.requests, len(self.pool)))
        plan.run(self.q, self.pool, inner, inner_lse, SCALE)
        result = inner.clone(), inner_lse.clone()
        inner.fill_(POISON), inner_lse.fill_(POISON)
        assert (out == POISON).all() and (lse == POISON).all(), "written outside of out or lse"
        return result

    def check(self, out: Tensor, lse: Tensor, sample: int = 4) -> None:
        """Sampled rows against float64: in bfloat16 at most twice the error of rounding P and the output to it, in
        float32 what a sum of so many terms makes. Whoever does not see a NaN has none."""
        rng = random.Random(0)
        spoiled = self.firsts[self.main] + self.leaf if self.settings.leaf_is_nan else -1
        whole = torch.ones(self.nodes, dtype=torch.bool, device=out.device)
        if spoiled >= 0:
            whole[spoiled] = False
            assert out[spoiled].isnan().all(), "a node that sees NaN"
        assert out[whole].isfinite().all() and lse[whole].isfinite().all()
        heads = sorted(rng.sample(range(self.settings.heads), min(self.settings.heads, 4)))
        for request in {self.main, rng.randrange(len(self.lengths))}:
            prefix, n = self.lengths[request]
            kv = self.rows[self.begins[request] : self.begins[request] + prefix + n].double()
            for node in {0, n - 1, *(rng.randrange(n) for _ in range(sample))}:
                row = self.firsts[request] + node
                if row == spoiled:
                    continue
                seen = torch.cat([torch.ones(prefix, dtype=torch.bool, device=out.device), self.bits[request][node]])
                own = kv[seen]
                scores = self.q[row, heads].double() @ own.T * SCALE
                weights = scores.softmax(1)
                exact = weights @ own[:, :512]
                plain = (weights.bfloat16().double() @ own[:, :512]).bfloat16().double()
                summed = 2e-5 + 2e-7 * len(own) ** 0.5
                rounded = self.dtype == torch.bfloat16
                bar = 2 * (plain - exact).norm() + 1e-9 if rounded else summed * exact.norm()
                error = (out[row, heads].double() - exact).norm()
                assert error <= bar, (request, node, float(error / exact.norm()))
                atol = 2**-8 if rounded else summed  # a denominator sums weights as rounded to bfloat16
                torch.testing.assert_close(lse[row, heads].double(), scores.logsumexp(1), atol=atol, rtol=0)
