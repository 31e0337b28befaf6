"""Stage two: the target writes the text its drafter will learn from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tpverify.model.tiny.corpus import Corpus, joined
from tpverify.model.tiny.target import Target


@dataclass(frozen=True)
class GenerateRecipe:
    """Each sequence is a training prompt and the target's continuation of it, `length` bytes together.

    A short_share of the prompts has 1 to short_prompt bytes, the rest short_prompt to long_prompt. Half of the
    continuations are greedy, a quarter is sampled for up to half_sampled bytes before it turns greedy (greedy text of a
    small model loops; this keeps it fresh), a quarter is sampled throughout. Sampling is at temperature 1.
    """

    sequences: int = 40960
    batch: int = 4096
    length: int = 512
    short_share: float = 0.2
    short_prompt: int = 64
    long_prompt: int = 400
    half_sampled: int = 160
    seed: int = 1


@dataclass(frozen=True)
class Generated:
    """tokens uint8 [n, length]; prompts int64 [n]: how many bytes of each were given."""

    tokens: Tensor
    prompts: Tensor


@torch.no_grad()
def generate(target: Target, corpus: Corpus, recipe: GenerateRecipe) -> Generated:
    """Draw the prompts and continue them all. Batches hold prompts of similar length, since their bytes cost a step."""
    device = target.device
    generator = torch.Generator().manual_seed(recipe.seed)
    n = recipe.sequences
    data = joined(corpus.train)
    lines = torch.cat([torch.zeros(1, dtype=torch.int64), (data == ord("\n")).nonzero()[:, 0] + 1])
    lines = lines[lines < len(data) - recipe.length]
    starts = lines[torch.randint(len(lines), (n,), generator=generator)]
    shift = torch.rand(n, generator=generator) < 0.2  # some prompts begin inside a line
    starts = starts + shift * torch.randint(40, (n,), generator=generator)
    starts.clamp_(max=len(data) - recipe.length)
    prompts = torch.randint(recipe.short_prompt, recipe.long_prompt + 1, (n,), generator=generator)
    short = torch.rand(n, generator=generator) < recipe.short_share
    prompts = torch.where(short, torch.randint(1, recipe.short_prompt + 1, (n,), generator=generator), prompts)
    kind = torch.randint(4, (n,), generator=generator)
    sampled = torch.where(kind == 2, torch.randint(1, recipe.half_sampled + 1, (n,), generator=generator), 0)
    sampled = torch.where(kind == 3, recipe.length, sampled)
    order = prompts.argsort(stable=True)
    starts, prompts, sampled = starts[order], prompts[order], sampled[order]
    noise = torch.Generator(device).manual_seed(recipe.seed)
    out = []
    for rows in torch.arange(n).split(recipe.batch):
        tokens = data[starts[rows, None] + torch.arange(recipe.length)].to(device).long()
        out.append(continued(target, tokens, prompts[rows].to(device), sampled[rows].to(device), noise))
    return Generated(torch.cat(out), prompts.to(device))


def continued(target: Target, tokens: Tensor, prompts: Tensor, sampled: Tensor, noise: torch.Generator) -> Tensor:
    """tokens int64 [b, length] with all that follows each row's prompt replaced by the target's text, as uint8.

    prompts int64 [b] >= 1; sampled int64 [b]: how many bytes after the prompt are drawn rather than the most likely.
    """
    batch, length = tokens.shape
    cache = Cache(target, batch, length)
    cuda = tokens.is_cuda
    start = int(prompts.min())
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=cuda):
        logits = cache.extend(tokens[:, :start])
        for at in range(start, length):
            uniform = torch.rand(logits.shape, generator=noise, device=tokens.device).clamp_(1e-20, 1 - 1e-7)
            gumbel = -(-uniform.log()).log()
            drawn = (logits.float() + gumbel * (at < prompts + sampled)[:, None]).argmax(-1)
            tokens[:, at] = torch.where(at < prompts, tokens[:, at], drawn)
            if at + 1 < length:
                logits = cache.extend(tokens[:, at : at + 1])
    return tokens.to(torch.uint8)


class Cache:
    """Expanded keys and values of a batch that grows in step."""

    def __init__(self, target: Target, batch: int, length: int) -> None:
        self.target, self.length = target, 0
        c, device = target.config, target.device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = (c.num_hidden_layers, batch, c.num_attention_heads, length)
        self.keys = torch.empty(*shape, c.qk_head_dim, device=device, dtype=dtype)
        self.values = torch.empty(*shape, c.v_head_dim, device=device, dtype=dtype)

    def extend(self, tokens: Tensor) -> Tensor:
        """Append int64 [b, t] (one column, or the first t of all) and return the last column's logits [b, vocab]."""
        start, end = self.length, self.length + tokens.shape[1]
        assert start == 0 or tokens.shape[1] == 1

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[index, :, :, start:end], self.values[index, :, :, start:end] = k, v
            keys, values = self.keys[index, :, :, :end], self.values[index, :, :, :end]
            return F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, is_causal=start == 0)

        positions = torch.arange(start, end, device=tokens.device).expand_as(tokens)
        stream = self.target.residuals(tokens, positions, attend)[-1]
        self.length = end
        return self.target.head(stream[:, -1])
