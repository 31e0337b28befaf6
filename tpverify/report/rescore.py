"""Emitted tokens scored again by teacher forcing: the proof where rounding differs by shape, as it does on GPUs.

The reference is the decoder of CPU ranks, float32 from the stored weights, alone. Logits that are off by at most e
choose a token whose exact logit is at most 2 e below the largest; e is measured, over the same text, as the difference
of the ranks' own logits from the reference's (which is within 2e-5 of float64, relative to the largest logit).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_NODES, MlaGeometry
from tpverify.model.checkpoint import load_checkpoint
from tpverify.model.decoder import Decoder
from tpverify.model.parallel import TensorParallel
from tpverify.ops.attention import TreeMask, VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.tree import sample_token, softmax, uniform

CHUNK = 256
SOUND = 1 / 32  # of the largest logit: an error above this is none of bf16's rounding, and allows nothing


@dataclass(frozen=True)
class Score:
    """Of `tokens` emitted ones: how many are the reference's own choice, and the largest gap.

    Greedy: a gap is how far a token's logit is below the largest. Sampled: how far, in probability, a draw is from the
    token's interval. error: the ranks' logits, from the reference's. allowed: twice what moved, logits or intervals.
    """

    tokens: int
    exact: int
    gap: float
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.gap <= self.allowed


class Reference:
    """The float32 decoder of a checkpoint, in this process."""

    def __init__(self, checkpoint: str | Path) -> None:
        self.config, tensors = load_checkpoint(checkpoint)
        self.decoder = Decoder(self.config, tensors, TensorParallel())

    @torch.no_grad()
    def hidden_states(self, tokens: Sequence[int]) -> Tensor:
        """float32 [n, hidden]: final hidden states of a text."""
        c, n = self.config, len(tokens)
        geometry = MlaGeometry(c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim)
        pool = torch.zeros(c.num_hidden_layers, n, geometry.row_dim)
        plan = VerifyPlan(geometry, 1, MAX_NODES, n, "cpu")
        text, slots = torch.tensor(tokens), torch.arange(n)
        chunks = []
        for own in slots.split(CHUNK):
            plan.update([VerifyRequest(slots[: own[0]], own, TreeMask.chain(len(own)))])

            def attend(layer: int, rows: Tensor, q: Tensor, own: Tensor = own) -> Tensor:
                pool[layer, own] = rows
                out, lse = torch.empty(*q.shape[:2], c.kv_lora_rank), torch.empty(q.shape[:2])
                plan.run(q, pool[layer], out, lse, c.softmax_scale)
                return out

            chunks.append(self.decoder(text[own], own, attend, ()))
        return torch.cat(chunks)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.decoder.logits(hidden)


def score(
    reference: Reference,
    prompt: Sequence[int],
    emitted: Sequence[int],
    temperature: float,
    seed: int,
    hidden: np.ndarray,
) -> Score:
    """emitted: what was generated after the prompt. hidden: the ranks' final hidden states float32 [n, hidden] of both
    but for the last emitted token; see Engine.hidden_states."""
    exact = reference.logits(reference.hidden_states([*prompt, *emitted[:-1]]))
    theirs = reference.logits(torch.from_numpy(hidden.copy()))
    error = (theirs - exact).abs().max().item()
    sound = min(error, SOUND * exact.abs().max().item())
    rows, their_rows = (logits[len(prompt) - 1 :].double().numpy()[: len(emitted)] for logits in (exact, theirs))
    if temperature == 0.0:
        gaps = [float(row.max() - row[token]) for row, token in zip(rows, emitted, strict=True)]
        same = sum(int(row.argmax()) == token for row, token in zip(rows, emitted, strict=True))
        return Score(len(emitted), same, max(gaps, default=0.0), error, 2 * sound)
    gaps, same, shift = [], 0, 0.0
    for position, (row, their_row, token) in enumerate(zip(rows, their_rows, emitted, strict=True), len(prompt)):
        weights, draw = softmax(row, temperature), uniform(seed, position)
        ends = weights.cumsum()
        gaps.append(max(0.0, draw - ends[token], ends[token] - weights[token] - draw))
        same += sample_token(weights, draw) == token
        shift = max(shift, float(np.abs(softmax(their_row, temperature).cumsum() - ends).max()))
    # A weight is off by a factor of e^(2 error / temperature) at most, once all are divided by their sum.
    allowed = min(2 * shift, math.expm1(min(2 * sound / temperature, 1.0)))
    return Score(len(emitted), same, float(max(gaps, default=0.0)), error, allowed)
