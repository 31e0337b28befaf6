"""The target model on one rank, and on rank 0 its choices and the drafter: one decode step, one answer."""

import time
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_NODES, MlaGeometry
from tpverify.kv.log import Replica
from tpverify.model.checkpoint import load_checkpoint
from tpverify.model.cpu_drafter import CpuDrafter
from tpverify.model.cpu_step import CpuSteps, Target
from tpverify.model.decoder import Decoder
from tpverify.model.drafter import Drafter
from tpverify.model.gpu_accept import rank_tokens
from tpverify.model.parallel import TensorParallel
from tpverify.ops import host
from tpverify.ops.attention import VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.runtime.comm import SocketComm
from tpverify.runtime.frames import digest_of, frame_of
from tpverify.runtime.messages import (
    Decode,
    Decoded,
    DecodedRequest,
    DecodeRequest,
    Frame,
    HiddenDigest,
    HiddenStates,
    Work,
)
from tpverify.runtime.moves import Kept
from tpverify.tree import DraftTree, accept_walk, sample_token, softmax, uniform


class DecoderOptions(msgspec.Struct, frozen=True):
    """checkpoint: directory. drafter: whether it has one to load."""

    checkpoint: str
    num_slots: int
    max_batch: int
    drafter: bool


class DecoderWorker:
    """Rank r of tp. Every rank keeps, by slot, the latent rows of all layers, the final hidden state and the features
    that the drafter reads, so that any of them could take over from rank 0."""

    def __init__(self, comm: SocketComm, device: str, options: dict[str, Any]) -> None:
        shape = msgspec.convert(options, DecoderOptions)
        torch.set_num_threads(1)  # ranks share cores
        torch.set_grad_enabled(False)
        config, tensors = load_checkpoint(shape.checkpoint)
        self.comm, self.config = comm, config
        group = TensorParallel(comm.rank, comm.size, comm)
        self.decoder = Decoder(config, tensors, group)
        self.local_heads = config.num_attention_heads // comm.size
        geometry = MlaGeometry(self.local_heads, config.kv_lora_rank, config.qk_rope_head_dim)
        self.plan = VerifyPlan(geometry, shape.max_batch, MAX_NODES, shape.num_slots * shape.max_batch, device)
        self.pool = torch.zeros(config.num_hidden_layers, shape.num_slots, geometry.row_dim)
        self.hidden = torch.zeros(shape.num_slots, config.hidden_size)
        self.drafter = None
        self.kept = Kept(self.pool, self.hidden)
        if shape.drafter:
            drafter = Drafter.load(shape.checkpoint, self.decoder.embed)
            self.drafter = CpuDrafter(drafter, config.max_position_embeddings)
            self.features = torch.zeros(shape.num_slots, self.drafter.feature_dim)
            self.context = torch.zeros(shape.num_slots, self.drafter.context_dim)
            # Context rows are rank 0's, which drafts. (Not a method: the pool would wait for the cycle collector.)
            self._write_context = partial(_write_context, self.drafter, self.features, self.context)
            derive = self._write_context if comm.rank == 0 else None
            self.kept = Kept(self.pool, self.hidden, self.features, own=(self.context,), derive=derive)
        self.layers = () if self.drafter is None else self.drafter.feature_layers
        self.steps = None
        if host.takes(self.pool[0], config.kv_lora_rank):
            features = None if self.drafter is None else self.features
            self.steps = CpuSteps(Target(self.decoder, self.pool, self.hidden, features, self.layers))

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        if isinstance(work, Decode):
            return self._decode(work, replica), []
        if isinstance(work, HiddenDigest):
            return digest_of(self.hidden[_long(replica.prefix_slots(work.seq)[: work.count])]), []
        if isinstance(work, HiddenStates):
            rows = self.hidden[_long(replica.prefix_slots(work.seq)[: work.count])]
            return None, [frame_of(rows)] if self.comm.rank == 0 else []
        raise TypeError(f"a decoder rank cannot do {type(work).__name__}")

    def _decode(self, work: Decode, replica: Replica) -> Decoded | None:
        trees = [_tree(request) for request in work.requests]
        prefixes = [_long(replica.prefix_slots(request.seq)) for request in work.requests]
        slots = [_long(replica.tree_slots(request.seq)) for request in work.requests]
        start = time.perf_counter()
        self._forward(trees, prefixes, slots)
        seconds = {"verify": time.perf_counter() - start, "accept": 0.0, "draft": 0.0}
        if self.comm.rank != 0:
            return None
        answers = []
        for request, tree, prefix, own in zip(work.requests, trees, prefixes, slots, strict=True):
            start = time.perf_counter()
            path, bonus = self._accept(request, tree, len(prefix), own)
            accepted = time.perf_counter()
            logprobs, token_ids = self._draft(request, prefix, own[torch.from_numpy(path).long()], bonus)
            seconds["accept"] += accepted - start
            seconds["draft"] += time.perf_counter() - accepted
            answers.append(DecodedRequest(path.tobytes(), bonus, logprobs.tobytes(), token_ids.tobytes()))
        return Decoded(answers, seconds)

    def _forward(self, trees: list[DraftTree], prefixes: list[Tensor], slots: list[Tensor]) -> None:
        """All layers over all nodes; leaves latent rows, features and final hidden states at the nodes' slots."""
        if self.steps is not None:
            self.steps(trees, prefixes, slots)
            return
        self.plan.update([VerifyRequest(p, s, tree) for p, s, tree in zip(prefixes, slots, trees, strict=True)])
        tokens = torch.from_numpy(np.concatenate([tree.tokens for tree in trees]))
        positions = torch.from_numpy(
            np.concatenate([t.positions(len(p)) for t, p in zip(trees, prefixes, strict=True)])
        )
        rows = torch.cat(slots)
        out = torch.empty(len(tokens), self.local_heads, self.config.kv_lora_rank)
        lse = torch.empty(len(tokens), self.local_heads)

        def attend(layer: int, latents: Tensor, q: Tensor) -> Tensor:
            self.pool[layer, rows] = latents
            self.plan.run(q, self.pool[layer], out, lse, self.config.softmax_scale)
            return out

        states = self.decoder(tokens, positions, attend, self.layers)
        self.hidden[rows] = states[:, -self.config.hidden_size :]
        if self.drafter is not None:
            self.features[rows] = states[:, : -self.config.hidden_size]

    def _accept(self, request: DecodeRequest, tree: DraftTree, committed: int, slots: Tensor) -> tuple[np.ndarray, int]:
        if request.prompt:
            path = np.arange(len(tree), dtype=np.int32)
            last = self.decoder.logits(self.hidden[slots[-1:]])[0]
            return path, _choose(last, request, committed + len(tree))
        logits = self.decoder.logits(self.hidden[slots])
        accepted = accept_walk(
            tree, lambda node: _choose(logits[node], request, committed + int(tree.depths[node]) + 1)
        )
        return accepted.path, accepted.bonus

    def _draft(self, request: DecodeRequest, prefix: Tensor, path: Tensor, bonus: int) -> tuple[np.ndarray, np.ndarray]:
        """The drafter's most probable tokens at each depth below `bonus`, once `path` is committed.

        Context rows are written for whoever drafts after these tokens, if only a later sequence.
        """
        if self.drafter is not None:
            self._write_context(path, len(prefix))
        if self.drafter is None or request.candidates == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        committed = len(prefix) + len(path)
        window = torch.cat([prefix, path])[-self.drafter.window :]
        logits = self.drafter(self.context[window], bonus, committed)
        logprobs, token_ids = rank_tokens(logits, request.candidates)
        return logprobs.numpy(), token_ids.numpy()


def _write_context(drafter: CpuDrafter, features: Tensor, context: Tensor, slots: Tensor, first: int) -> None:
    """Context rows of committed positions first, first + 1, ... from their features."""
    context[slots] = drafter.context(features[slots], first)


def _choose(logits: Tensor, request: DecodeRequest, position: int) -> int:
    """The target's token at `position`: argmax (the lowest id of equals) or the draw that belongs to that position."""
    row = logits.numpy()
    if not np.isfinite(row.max()):
        raise ValueError(f"logits: expected finite numbers, got a maximum of {row.max()} at position {position}")
    if request.temperature == 0.0:
        return int(row.argmax())
    return sample_token(softmax(row, request.temperature), uniform(request.seed, position))


def _tree(request: DecodeRequest) -> DraftTree:
    return DraftTree.from_parents(np.frombuffer(request.tokens, "<i8"), np.frombuffer(request.parents, "<i4"))


def _long(slots: np.ndarray) -> Tensor:
    return torch.from_numpy(slots.astype(np.int64))
