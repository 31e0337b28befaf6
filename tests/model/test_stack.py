"""The stack of attention layers against float64 with keys and values written out, and for bits over ranks."""

import threading

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.stack import KIMI_K2, PARTS, PAUSE, AttentionStack
from tpverify.ops.attention import VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.tree import DraftTree

CONFIG = ModelConfig(
    vocab_size=50, hidden_size=96, num_hidden_layers=3, num_attention_heads=16, intermediate_size=1, kv_lora_rank=64,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, max_position_embeddings=4096, q_lora_rank=40,
    rope_theta=50000.0,
)  # fmt: skip
CPU = torch.device("cpu")
SLOTS, ROW = 400, 72


class Step:
    """Two sequences of different lengths, each with a tree, over a pool whose committed rows are random."""

    def __init__(self):
        draw = np.random.default_rng(3)
        slots = draw.permutation(np.arange(1, SLOTS))
        self.trees = [
            DraftTree.from_parents(draw.integers(0, 50, 9) + 50 * np.arange(9), [-1, 0, 0, 1, 1, 2, 5, 3, 7]),
            DraftTree.chain(draw.integers(0, 50, 4)),
        ]
        self.prefixes, self.slots = [slots[:130], slots[200:203]], [slots[300:309], slots[310:314]]
        self.pool = torch.from_numpy(draw.standard_normal((CONFIG.num_hidden_layers, SLOTS, ROW)).astype(np.float32))
        self.tokens = torch.from_numpy(np.concatenate([tree.tokens % 50 for tree in self.trees]))
        lengths = [len(prefix) for prefix in self.prefixes]
        self.positions = torch.from_numpy(np.concatenate([t.positions(n) for t, n in zip(self.trees, lengths, strict=True)]))  # fmt: skip  # noqa: E501
        self.rows = torch.from_numpy(np.concatenate(self.slots))

    def run(self, stack, pool, gather):
        plan = VerifyPlan(MlaGeometry(stack.local_heads, 64, 8), 2, 9, 1000, "cpu")
        plan.update([VerifyRequest(*one) for one in zip(self.prefixes, self.slots, self.trees, strict=True)])
        lse = torch.empty(len(self.tokens), stack.local_heads)

        def attend(layer, q, out):
            plan.run(q, pool[layer], out, lse, CONFIG.softmax_scale)

        buffers = stack.buffers(len(self.tokens))
        return stack(buffers, self.tokens, self.positions, self.rows, pool, attend, gather)

    def exact(self, stack):
        """float64, key by key, in numpy: nothing absorbed, nothing batched over nodes."""
        n, nope, latent = len(self.tokens), CONFIG.qk_nope_head_dim, CONFIG.kv_lora_rank
        numbers = lambda tensor: tensor.double().numpy()  # noqa: E731
        x, pool = numbers(stack.embed)[self.tokens.numpy()], numbers(self.pool)
        frequencies = CONFIG.rope_theta ** -(np.arange(0, 8, 2) / 8)

        def norm(y, eps=1e-6):
            return y / np.sqrt((y * y).mean(-1, keepdims=True) + eps)

        def rotate(y, position):
            angle = position * frequencies
            even, odd = y[..., 0::2], y[..., 1::2]
            turned = [even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)]
            return np.stack(turned, -1).reshape(y.shape)

        for layer, w in enumerate(stack.layers):
            q_b, w_uk, w_uv = (np.concatenate([numbers(t) for t in parts], axis) for parts, axis in ((w.q_b, 1), (w.w_uk, 0), (w.w_uv, 0)))  # fmt: skip  # noqa: E501
            down = norm(x) @ numbers(w.down)
            q = (norm(down[:, : CONFIG.q_lora_rank]) @ q_b).reshape(n, 16, -1)
            kv = down[:, CONFIG.q_lora_rank :]
            own = [
                np.concatenate([norm(kv[i, :latent]), rotate(kv[i, latent:], float(self.positions[i]))])
                for i in range(n)
            ]
            attended = np.zeros((n, 16, CONFIG.v_head_dim))
            first = 0
            for tree, prefix in zip(self.trees, self.prefixes, strict=True):
                for i in range(len(tree)):
                    seen, at = [], i
                    while at >= 0:
                        seen.append(own[first + at])
                        at = int(tree.parents[at])
                    rows = np.concatenate([pool[layer, prefix], seen])
                    position = float(self.positions[first + i])
                    for head in range(16):
                        keys = np.concatenate([rows[:, :latent] @ w_uk[head].T, rows[:, latent:]], 1)
                        query = q[first + i, head]
                        query = np.concatenate([query[:nope], rotate(query[nope:], position)])
                        scores = keys @ query * 20**-0.5
                        weights = np.exp(scores - scores.max())
                        attended[first + i, head] = weights / weights.sum() @ (rows[:, :latent] @ w_uv[head])
                first += len(tree)
            x = x + attended.reshape(n, -1) @ numbers(w.o_proj)
        return norm(x)


@pytest.fixture(scope="module")
def step():
    return Step()


def alone(step, **options):
    stack = AttentionStack(CONFIG, 0, 1, CPU, torch.float32, **options)
    return stack, step.run(stack, step.pool.clone(), lambda values: values)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_hidden_states_are_those_of_float64(step, size):
    """Small ones too: a norm's eps then counts for as much as the mean square."""
    stack, _ = alone(step)
    stack.embed *= size
    hidden = step.run(stack, step.pool.clone(), lambda values: values)
    exact = step.exact(stack)
    assert np.abs(hidden.numpy() - exact).max() < 1e-4 * np.abs(exact).max()
    assert torch.equal(stack.logits(hidden), hidden @ stack.head)


@pytest.mark.parametrize("size", [2, 8])
def test_ranks_give_the_bits_of_one(step, size):
    _, expected = alone(step)
    meet, shares, found = threading.Barrier(size, timeout=60), [None] * size, [None] * size

    def rank(number):
        def gather(values):
            shares[number] = values
            meet.wait()
            both = torch.cat(shares)
            meet.wait()
            return both

        stack = AttentionStack(CONFIG, number, size, CPU, torch.float32)
        found[number] = step.run(stack, step.pool.clone(), gather)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(one, expected) for one in found)


def test_seeds_are_other_weights(step):
    _, one = alone(step)
    _, same = alone(step, seed=0)
    _, other = alone(step, seed=1)
    assert torch.equal(one, same) and not torch.allclose(one, other, atol=0.1)


@pytest.mark.parametrize("parts", [["attention"], ["gather"], ["gemm"], [part for part in PARTS if part != "gather"]])
def test_a_part_alone_does_only_its_own(step, parts, monkeypatch):
    """What runs is seen from outside: calls of the kernel, of the gather, and of torch's products."""
    called = []
    for name in ("mm", "bmm"):
        product = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, product=product, **k: called.append("gemm") or product(*a, **k))
    monkeypatch.setattr(VerifyPlan, "run", lambda *_: called.append("attention"))
    stack = AttentionStack(CONFIG, 0, 1, CPU, torch.float32, parts=parts)
    pool = step.pool.clone()
    step.run(stack, pool, lambda values: called.append("gather") or values)
    assert set(called) == set(parts) - {"rest"}
    assert torch.equal(pool, step.pool) == ("rest" not in parts)


def test_what_cannot_be_sharded_is_refused():
    for argument, options in (
        ("tp", {"size": 3}), ("tp", {"size": 16}), ("parts", {"parts": ["norm"]}),
        ("config", {"config": ModelConfig(**{**vars(CONFIG), "num_attention_heads": 12})}),
        ("config", {"config": ModelConfig(**{**vars(CONFIG), "q_lora_rank": None})}),
    ):  # fmt: skip
        with pytest.raises(ArgumentError) as error:
            AttentionStack(
                **({"config": CONFIG, "rank": 0, "size": 1, "device": CPU, "dtype": torch.float32} | options)
            )
        assert error.value.argument == argument


def test_the_size_is_kimi_k2s():
    """As its config.json has it: 101 million weights in a layer's attention, norms left out."""
    c = KIMI_K2
    heads = c.num_attention_heads
    weights = c.hidden_size * (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim + heads * c.v_head_dim)
    weights += heads * (c.q_lora_rank * c.qk_head_dim + c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim))
    assert (c.num_hidden_layers, weights) == (61, 101_122_048)


def test_a_pause_comes_before_everything(step, monkeypatch):
    """So that a GPU waits for no launch where parts are timed."""
    paused = []
    monkeypatch.setattr(torch.cuda, "_sleep", paused.append)
    _, paused_too = alone(step, parts=(PAUSE, *PARTS))
    _, expected = alone(step)
    assert len(paused) == 1 and paused[0] > 0 and torch.equal(paused_too, expected)
