"""Recorded steps against the decoder called layer by layer: the same bits wherever they leave them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from test_decoder import Meeting

from tpverify import native
from tpverify.config import MlaGeometry
from tpverify.model.checkpoint import load_checkpoint
from tpverify.model.cpu_step import KEPT, RECORDED_NODES, CpuSteps, Target
from tpverify.model.decoder import Decoder
from tpverify.model.parallel import TensorParallel
from tpverify.ops.attention import VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.tree import DraftTree

LAYERS, SLOTS = (1, 3), 1024


@pytest.fixture(autouse=True)
def library(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)


class Rank:
    """The memory that a rank keeps by slot, and its decoder."""

    def __init__(self, config, tensors, group):
        self.decoder = Decoder(config, tensors, group)
        self.pool = torch.randn(config.num_hidden_layers, SLOTS, 576, generator=torch.Generator().manual_seed(0))
        self.hidden, self.features = torch.zeros(SLOTS, 256), torch.zeros(SLOTS, 512)
        self.steps = CpuSteps(Target(self.decoder, self.pool, self.hidden, self.features, LAYERS))

    def layer_by_layer(self, trees, prefixes, slots):
        config = self.decoder.config
        heads = config.num_attention_heads // self.decoder.group.size
        plan = VerifyPlan(MlaGeometry(heads), 8, 1024, 1 << 20, "cpu")
        plan.update([VerifyRequest(*request) for request in zip(prefixes, slots, trees, strict=True)])
        rows = torch.cat(slots)

        def attend(layer, latents, q):
            self.pool[layer, rows] = latents
            out, lse = q.new_empty(*q.shape[:2], 512), q.new_empty(q.shape[:2])
            plan.run(q, self.pool[layer], out, lse, config.softmax_scale)
            return out

        tokens = torch.from_numpy(np.concatenate([tree.tokens for tree in trees]))
        positions = [torch.from_numpy(t.positions(len(p))) for t, p in zip(trees, prefixes, strict=True)]
        states = self.decoder(tokens, torch.cat(positions), attend, LAYERS)
        self.hidden[rows], self.features[rows] = states[:, 512:], states[:, :512]


def requests(sizes, seed):
    """Random trees, prefixes and slots."""
    random = np.random.default_rng(seed)
    slots = torch.from_numpy(random.permutation(SLOTS))
    trees, prefixes, own = [], [], []
    for size in sizes:
        parents = [-1, *(int(random.integers(0, i)) for i in range(1, size))]
        trees.append(DraftTree.from_parents(random.permutation(256)[:size], parents))
        length = int(random.integers(0, 100))
        prefixes.append(slots[:length])
        own.append(slots[length : length + size])
        slots = slots[length + size :]
    return trees, prefixes, own


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_replay_has_the_bits_of_the_layers(tp):
    meeting = Meeting(tp)
    ranks = [Rank(*load_checkpoint("tiny"), TensorParallel(r, tp, meeting.of(r))) for r in range(tp)]
    plain = Rank(*load_checkpoint("tiny"), TensorParallel())
    with ThreadPoolExecutor(tp) as threads:
        for seed, sizes in enumerate([(33,), (5, 1, 12), (33,), (1,), (5, 1, 12), (33,), (RECORDED_NODES + 1,)]):
            step = requests(sizes, seed)
            plain.layer_by_layer(*step)
            list(threads.map(lambda rank, step=step: rank.steps(*step), ranks))
            for rank in ranks:
                for name in ("pool", "hidden", "features"):
                    assert torch.equal(getattr(rank, name), getattr(plain, name)), (seed, name)


def test_only_the_latest_recordings_are_kept():
    rank = Rank(*load_checkpoint("tiny"), TensorParallel())
    for size in [*range(1, KEPT + 3), 4]:
        rank.steps(*requests((size,), size))
    assert list(rank.steps._recorded) == [(3,), *((size,) for size in range(5, KEPT + 3)), (4,)]
