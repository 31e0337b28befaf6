"""The decoder against transformers' DeepseekV3ForCausalLM, which loads the same directory and shares no code with
it."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from random_model import OTHERS, save_random

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import ModelConfig, load_checkpoint, save_checkpoint
from tpverify.model.decoder import Decoder
from tpverify.model.parallel import TensorParallel
from tpverify.ops.attention import TreeMask, VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.tree import DraftTree

TEXT = b'def merge(left, right):\n    """Merge two sorted lists."""\n    result = []\n    while left and right:\n'


class Cached:
    """A decoder over a latent pool, fed chunk by chunk, with tree nodes where asked for."""

    def __init__(self, config: ModelConfig, tensors: dict[str, torch.Tensor], tp: int = 1) -> None:
        meeting = Meeting(tp)
        groups = [TensorParallel(r, tp, meeting.of(r)) for r in range(tp)]
        self.ranks = [Decoder(config, tensors, group) for group in groups]
        self.config, self.length = config, 0
        row_dim = config.kv_lora_rank + config.qk_rope_head_dim
        self.pools = [torch.zeros(config.num_hidden_layers, 4096, row_dim) for _ in self.ranks]
        self.slots = torch.randperm(4095, generator=torch.Generator().manual_seed(0)) + 1

    def __call__(self, tokens: torch.Tensor, mask: TreeMask | DraftTree, path: list[int] | None = None) -> torch.Tensor:
        """Final hidden states [n, hidden]; `path` (default all) is committed."""
        n, config = len(tokens), self.config
        heads = config.num_attention_heads // len(self.ranks)
        own = self.slots[self.length : self.length + n]
        plan = VerifyPlan(MlaGeometry(heads, config.kv_lora_rank, config.qk_rope_head_dim), 1, 1024, 4096, "cpu")
        plan.update([VerifyRequest(self.slots[: self.length], own, mask)])
        positions = torch.from_numpy(self.length + mask.depths.astype(np.int64))
        hidden = run_ranks(self.ranks, self.pools, tokens, positions, own, plan, config.softmax_scale)
        kept = own[path] if path is not None else own
        rest = own[[i for i in range(n) if path is not None and i not in path]]
        self.slots[self.length : self.length + n] = torch.cat([kept, rest])
        self.length += len(kept)
        return hidden


class Meeting:
    """The collectives of threads, one a rank."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size), [None] * size

    def of(self, rank: int) -> "Member":
        return Member(self, rank)


@dataclass
class Member:
    meeting: Meeting
    rank: int

    def prepare_allgather(self, x: torch.Tensor, rows: Sequence[int], out: torch.Tensor) -> Callable[[], None]:
        assert len(x) == rows[self.rank]
        return lambda: torch.cat(self._all(x), out=out)

    def prepare_alltoall(self, x: torch.Tensor, rows: Sequence[int], out: torch.Tensor) -> Callable[[], None]:
        assert len(x) == sum(rows)
        return lambda: out.copy_(torch.stack(self._all(x), dim=1).split(list(rows))[self.rank])

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.parts[self.rank] = x
        self.meeting.barrier.wait(60)
        parts = list(self.meeting.parts)
        self.meeting.barrier.wait(60)
        return parts


def run_ranks(ranks, pools, tokens, positions, slots, plan, scale) -> torch.Tensor:
    """All ranks of a group, one thread each."""

    def run(rank: int) -> torch.Tensor:
        def attend(layer, rows, q):
            pools[rank][layer, slots] = rows
            out, lse = torch.empty(*q.shape[:2], 512), torch.empty(q.shape[:2])
            plan.run(q, pools[rank][layer], out, lse, scale)
            return out

        return ranks[rank](tokens, positions, attend, ())

    with ThreadPoolExecutor(len(ranks)) as pool:
        first, *others = pool.map(run, range(len(ranks)))
    assert all(torch.equal(other, first) for other in others)
    return first


@pytest.fixture(scope="module")
def tiny():
    return load_checkpoint("tiny")


@pytest.fixture(scope="module")
def oracle():
    from tpverify.model.checkpoint import resolve

    return transformers.DeepseekV3ForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.float64).eval()


def test_logits_match_transformers(tiny, oracle):
    tokens = torch.tensor(list(TEXT * 7))[:600]
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    model = Cached(*tiny)
    hidden = torch.cat([model(chunk, TreeMask.chain(len(chunk))) for chunk in tokens.split(256)])
    logits = model.ranks[0].logits(hidden)
    scale = expected.abs().max()
    assert (logits - expected).abs().max() < 2e-5 * scale
    assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_logits_of_tree_nodes_match_transformers_on_their_paths(tiny, oracle):
    """SGLang #29907, rmagur1203 §11.5: siblings share a position; a node's logits are those of its path decoded
    alone."""
    prompt = torch.tensor(list(TEXT))
    parents = [-1, 0, 0, 1, 2, 1, 3, 4, 4]
    tokens = list(b"\n ruw  he"[:9])
    tree = DraftTree.from_parents(tokens, parents)
    model = Cached(*tiny)
    model(prompt, TreeMask.chain(len(prompt)))
    logits = model.ranks[0].logits(model(torch.tensor(tokens), tree, [0]))
    for node in range(len(parents)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        with torch.no_grad():
            alone = torch.cat([prompt, torch.tensor([tokens[i] for i in path[::-1]])])
            expected = oracle(alone[None]).logits[0, -1]
        assert (logits[node] - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_hidden_states_have_the_same_bits_for_any_tp_and_chunking(tiny, tp):
    tokens = torch.tensor(list(TEXT * 3))[:200]
    whole = Cached(*tiny)(tokens, TreeMask.chain(200))
    model = Cached(*tiny, tp=tp)
    chunks = [model(chunk, TreeMask.chain(len(chunk))) for chunk in tokens.split([100, 1, 1, 1, 30, 67])]
    assert torch.equal(torch.cat(chunks), whole)


def test_accepted_off_spine_path_continues_as_if_decoded(tiny):
    """V7: accepted nodes [0, 2, 4] of a width-2 tree; what follows must read node 4's row, not row 2 of the tree."""
    prompt = torch.tensor(list(TEXT))
    tree = DraftTree.from_parents(list(b"abcde"), [-1, 0, 0, 1, 2])
    model, plain = Cached(*tiny), Cached(*tiny)
    model(prompt, TreeMask.chain(len(prompt)))
    model(torch.tensor(tree.tokens), tree, [0, 2, 4])
    after = model(torch.tensor(list(b"xyz")), TreeMask.chain(3))
    expected = plain(torch.cat([prompt, torch.tensor(list(b"acexyz"))]), TreeMask.chain(len(prompt) + 6))[-3:]
    assert torch.equal(after, expected)


@pytest.mark.parametrize("q_lora_rank, interleave, tied", OTHERS)
def test_other_shapes_of_the_architecture_match_transformers(q_lora_rank, interleave, tied, tmp_path):
    """Random weights, 12 heads over tp 3."""
    oracle = save_random(tmp_path, q_lora_rank, interleave, tied)
    config, tensors = load_checkpoint(tmp_path)
    assert (config.q_lora_rank, config.rope_interleave, config.tie_word_embeddings) == (q_lora_rank, interleave, tied)
    tokens = torch.randint(0, 300, (90,))
    with torch.no_grad():
        expected = oracle.double()(tokens[None]).logits[0]
    model = Cached(config, tensors, tp=3)
    logits = model.ranks[0].logits(model(tokens, TreeMask.chain(90)))
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_tp_must_divide_the_heads(tiny):
    with pytest.raises(ArgumentError, match="^tp: expected a divisor of the 8 heads, got 3"):
        Decoder(*tiny, TensorParallel(0, 3, Meeting(3).of(0)))


def test_what_is_saved_is_what_is_loaded(tiny, tmp_path):
    save_checkpoint(tmp_path, *tiny)
    config, tensors = load_checkpoint(tmp_path)
    assert config == tiny[0] and all(torch.equal(tensors[name], tensor) for name, tensor in tiny[1].items())
