"""Random requests for the verify kernel on a GPU, and the float64 reference of what it gives."""

import random

import numpy as np
import torch

from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention

SCALE = 576**-0.5


def random_mask(n, rng):
    """Any node order in which parents come first: neither breadth-first nor a chain. sglang pull/39703, FastDeploy
    pull/3514: masks cut short to a causal tile."""
    bits = np.zeros((n, -(-n // 64) * 64), bool)
    depths = np.zeros(n, np.int32)
    for i in range(n):
        if i:
            parent = rng.randrange(max(0, i - rng.choice((1, 2, 8, n))), i)
            bits[i], depths[i] = bits[parent], depths[parent] + 1
        bits[i, i] = True
    return TreeMask(np.packbits(bits, axis=1, bitorder="little").view(np.uint64), depths), bits[:, :n]


class Case:
    """Random slots; NaN in slot 0 and in every slot that no request has (vllm issues/57156)."""

    def __init__(self, lengths, heads, seed=0):
        rng, g = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
        tokens, self.nodes = sum(s + n for s, n in lengths), sum(n for _, n in lengths)
        self.lengths, self.heads = lengths, heads
        rows = torch.randn(tokens, 576, device="cuda", generator=g).bfloat16()
        self.q = torch.randn(self.nodes, heads, 576, device="cuda", generator=g).bfloat16()
        trees = [random_mask(n, rng) for _, n in lengths]
        self.masks, self.bits = [t for t, _ in trees], [b for _, b in trees]
        self.rows = rows
        self.place(seed)

    def place(self, seed):
        order = torch.randperm(len(self.rows) + 50, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        self.slots = order[: len(self.rows)] + 1
        self.pool = torch.full((len(self.rows) + 51, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
        self.pool[self.slots] = self.rows
        parts = iter(self.slots.split([x for length in self.lengths for x in length]))
        self.requests = [VerifyRequest(next(parts), next(parts), mask) for mask in self.masks]

    def __call__(self, q=None, **options):
        q = self.q if q is None else q
        return verify_attention(q, self.pool, self.requests, softmax_scale=SCALE, **options)

    def check(self, out, lse, sample=24):
        """Relative error against float64, at most twice that of rounding P and the output to bf16. A denominator sums
        P as rounded, so that lse may be 2^-8 off."""
        assert out.isfinite().all() and lse.isfinite().all()
        first = begin = 0
        for (prefix, n), bits in zip(self.lengths, self.bits, strict=True):
            kv = self.rows[begin : begin + prefix + n].double()
            for node in sorted(random.Random(0).sample(range(n), min(n, sample))):
                seen = torch.cat([torch.ones(prefix, dtype=torch.bool), torch.from_numpy(bits[node])]).cuda()
                scores = (self.q[first + node].double() @ kv[seen].T) * SCALE
                weights = scores.softmax(1)
                exact = weights @ kv[seen, :512]
                plain = (weights.bfloat16().double() @ kv[seen, :512]).bfloat16().double()
                error, bar = (out[first + node].double() - exact).norm(), (plain - exact).norm()
                assert error <= 2 * bar + 1e-9, (prefix, n, node, float(error / exact.norm()))
                torch.testing.assert_close(lse[first + node].double(), scores.logsumexp(1), atol=2**-8, rtol=0)
            first, begin = first + n, begin + prefix + n
