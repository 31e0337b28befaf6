"""A decode step at fixed addresses: what comes from the host in one copy, and what goes back once it is there."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tpverify.ops.staging import Request
from tpverify.runtime.graphs import Bucket
from tpverify.runtime.messages import DecodedRequest, DecodeRequest
from tpverify.tree import uniform
from tpverify.tree.ancestry import checked_ancestry


@dataclass(frozen=True)
class Layout:
    """The sizes that all buckets share.

    window: committed rows that a draft reads. longest: nodes of a path, root included, at most. depth: drafted tokens
    below a root. ranked: candidates of each that are sent back. hidden, features, vocab: widths.
    """

    window: int
    longest: int
    depth: int
    ranked: int
    hidden: int
    features: int
    vocab: int


class StepRequest:
    """One request of a step with what its rank knows of it: n nodes after a prefix of S tokens."""

    def __init__(self, request: DecodeRequest, prefix: np.ndarray, slots: np.ndarray) -> None:
        """prefix int32 [S], slots int32 [n]. Raises ArgumentError for parents that are no tree's, ValueError
        for fields that do not fit each other."""
        self.seq, self.prompt, self.candidates = request.seq, request.prompt, request.candidates
        self.temperature, self.seed = request.temperature, request.seed
        self.prefix, self.slots = prefix, slots
        self.tokens = np.frombuffer(request.tokens, "<i8")
        self.parents = np.frombuffer(request.parents, "<i4")
        self.depths, self.words = _ancestry(request.parents)
        if not len(self.tokens) == len(self.parents) == len(slots):
            raise ValueError(f"a node's token, parent and slot: {len(self.tokens)}, {len(self.parents)}, {len(slots)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def verify(self) -> Request:
        """For VerifyPlan.stage."""
        return Request(self.prefix, self.slots, self.words, self.depths)

    @property
    def committed(self) -> int:
        return len(self.prefix)

    def check_tokens(self, vocab_size: int) -> None:
        """Raise ValueError for a token that would be read beyond a table on the device, which no process survives."""
        tokens = self.tokens.tolist()
        lowest, highest = min(tokens), max(tokens)
        if not 0 <= lowest <= highest < vocab_size:
            got = lowest if lowest < 0 else highest
            raise ValueError(f"tokens: expected ids from 0 to {vocab_size - 1}, got {got}")

    def draws(self) -> np.ndarray:
        """float64 [n]: the draw that belongs to the position after each node (of a prompt, after the last)."""
        if self.prompt:
            return np.full(len(self), uniform(self.seed, self.committed + len(self)))
        by_depth = [uniform(self.seed, self.committed + 1 + depth) for depth in range(int(self.depths.max()) + 1)]
        return np.array(by_depth)[self.depths]


_ancestry = functools.lru_cache(maxsize=256)(checked_ancestry)  # chains are the same at every step


class StepBuffers:
    """Of one bucket: the host stages `tokens`, `positions`, ... [nodes] and `tail` [batch, window], the step fetches
    them, leaves features, logits, path, last and bonus for its later stages, and results in `accepted` and `drafted`.

    All rows of a bucket are computed. Those that no request has write to slot 0, which nobody reads.
    """

    def __init__(self, bucket: Bucket, layout: Layout, device: torch.device, dtype: torch.dtype) -> None:
        self.bucket, self.layout = bucket, layout
        self.rows = 0  # of the bucket's, that the requests have nodes for
        (batch, nodes), pinned = bucket, device.type == "cuda"
        sizes = dict.fromkeys(("tokens", "positions", "slots", "parents", "cells", "draws", "temperatures"), nodes)
        sizes |= {"start": batch, "earlier": batch, "tail": batch * layout.window}
        self._host = torch.empty(sum(sizes.values()), dtype=torch.int64, pin_memory=pinned)
        self._device = torch.zeros_like(self._host, device=device, pin_memory=False)
        self._fields = {name: part.numpy() for name, part in _split(self._host, sizes).items()}
        fields = _split(self._device, sizes)
        self.tokens, self.positions, self.slots = fields["tokens"], fields["positions"], fields["slots"]
        self.parents, self.cells = fields["parents"], fields["cells"]
        self.draws, self.temperatures = fields["draws"], fields["temperatures"]
        self.start, self.earlier, self.tail = fields["start"], fields["earlier"], fields["tail"].view(batch, -1)
        self._fields["parents"][:] = np.arange(nodes)
        for name in self._fields.keys() - {"parents"}:
            self._fields[name][:] = 0
        self._fields["cells"][:] = batch * layout.longest
        self._blank = self._host.numpy().copy()

        self.features = torch.zeros(nodes, layout.features, dtype=dtype, device=device)
        self.logits = torch.zeros(nodes, layout.vocab, device=device)
        self.path = torch.zeros(batch, layout.longest, dtype=torch.int64, device=device)
        self.last, self.bonus = torch.zeros(2, batch, dtype=torch.int64, device=device)
        choices, ranked = batch * (1 + layout.longest), batch * layout.depth * layout.ranked
        self._reply = torch.zeros(choices + 2 * ranked, dtype=torch.int32, device=device)
        self._answer = torch.zeros_like(self._reply, device="cpu", pin_memory=pinned)
        self.accepted = self._reply[:choices].view(batch, -1)  # bonus, then path, of each request
        self.drafted = self._reply[choices:].view(2, batch, layout.depth, layout.ranked)  # bits of logprobs; ids

    def stage(self, requests: Sequence[StepRequest]) -> None:
        """Write the requests where `fetch` finds them. The step before has been waited for, as every step is."""
        self._host.numpy()[:] = self._blank
        field, longest, row = self._fields, self.layout.longest, 0
        tail = field["tail"].reshape(-1, self.layout.window)
        for index, request in enumerate(requests):
            rows, earlier = slice(row, row + len(request)), request.prefix[-self.layout.window :]
            field["tokens"][rows], field["slots"][rows] = request.tokens, request.slots
            field["positions"][rows] = request.depths + request.committed
            if request.prompt:
                field["start"][index] = rows.stop - 1
                earlier = np.concatenate([earlier, request.slots])[-self.layout.window :]
            else:
                field["parents"][rows] = np.maximum(request.parents, 0) + row
                field["cells"][rows] = request.depths + index * longest
                field["start"][index] = row
            field["earlier"][index] = len(earlier)
            tail[index, self.layout.window - len(earlier) :] = earlier
            if request.temperature > 0:
                field["temperatures"][rows], field["draws"][rows] = request.temperature, request.draws()
            row = rows.stop
        self.rows = row

    # A copy is part of the graph whose work it is: to ask torch for one takes as long as to launch a graph.

    def fetch(self) -> None:
        self._device.copy_(self._host, non_blocking=True)

    def give_accepted(self) -> None:
        """To the host, where `answers` reads it once the step has been waited for."""
        count = self.accepted.numel()
        self._answer[:count].copy_(self._reply[:count], non_blocking=True)

    def give_drafted(self) -> None:
        count = self.accepted.numel()
        self._answer[count:].copy_(self._reply[count:], non_blocking=True)

    def answers(self, requests: Sequence[StepRequest]) -> list[DecodedRequest]:
        """Raises ValueError where a choice was made from logits that are not finite."""
        reply = self._answer.numpy()
        accepted = reply[: self.accepted.numel()].reshape(self.accepted.shape)
        logprobs, token_ids = reply[self.accepted.numel() :].reshape(self.drafted.shape)
        found, row = [], 0
        for index, request in enumerate(requests):
            bonus, path = int(accepted[index, 0]), accepted[index, 1:]
            if bonus < 0:
                raise ValueError(f"logits: expected finite numbers, got others in sequence {request.seq}")
            path = np.arange(len(request), dtype=np.int32) if request.prompt else path[path >= 0] - row
            top = slice(0, request.candidates)
            ids = token_ids[index, :, top].astype("<i8").tobytes()
            found.append(DecodedRequest(path.tobytes(), bonus, logprobs[index, :, top].tobytes(), ids))
            row += len(request)
        return found


def _split(flat: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    """int64 parts by name; draws and temperatures are the bits of float64."""
    parts = dict(zip(sizes, flat.split(list(sizes.values())), strict=True))
    return parts | {name: parts[name].view(torch.float64) for name in ("draws", "temperatures")}
