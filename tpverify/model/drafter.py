"""DFlash drafter (arXiv 2602.06036): one pass denoises a block of masked tokens given the target's hidden states.

The block [root, MASK, ..., MASK] attends to itself in both directions and to a window of the last committed positions.
A committed position enters as keys and values projected from the target's features there (the residual stream after
some of its layers, concatenated), which never change: `context` makes that row once, the runtime keeps it by slot.
Logits come from the target's tied head.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpverify.config import MAX_DEPTH, check_int
from tpverify.errors import ArgumentError, describe
from tpverify.model.checkpoint import ModelConfig, save_tensors
from tpverify.model.files import (
    MAX_LAYERS,
    Places,
    check_fields,
    check_tensors,
    find_tensors,
    read_object,
    read_tensors,
)


@dataclass(frozen=True)
class DrafterConfig:
    """Stored as drafter/config.json. feature_layers count from 1: layer 1's output is the first decoder layer's."""

    hidden_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    head_dim: int = 32
    intermediate_size: int = 560
    block_size: int = 16
    window: int = 128
    feature_layers: tuple[int, ...] = (1, 2, 4)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        check_fields(self, "drafter/")
        check_int("drafter/block_size", self.block_size, 2, MAX_DEPTH + 1)
        check_int("drafter/num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS)
        for name in ("num_attention_heads", "head_dim"):  # torch multiplies them in 63 bits
            check_int(f"drafter/{name}", getattr(self, name), 1, 4096)
        if self.head_dim % 2:
            raise ArgumentError("drafter/head_dim", "an even number", self.head_dim)
        if not self.feature_layers:
            raise ArgumentError("drafter/feature_layers", "one layer or more", "none")
        for layer in self.feature_layers:
            check_int("drafter/feature_layers", layer, 1, 2**31 - 1)

    @classmethod
    def read(cls, path: str | Path) -> DrafterConfig | None:
        """The config of the drafter in `path`/drafter; None where there is none. Raises ArgumentError."""
        file = Path(path) / "drafter" / "config.json"
        if not file.is_file():
            return None
        raw = read_object(file, "drafter/config.json")
        unknown = sorted(raw.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ArgumentError("drafter/config.json", "the fields of a DrafterConfig", unknown[0])
        layers = raw.get("feature_layers", list(cls.feature_layers))
        if not isinstance(layers, list):
            raise ArgumentError("drafter/feature_layers", "a list of layers", describe(layers))
        return cls(**raw | {"feature_layers": tuple(layers)})


def find_drafter(path: str | Path, target: ModelConfig) -> DrafterConfig | None:
    """The config of the drafter in `path`/drafter, None where there is none; its weights are looked at, not read.

    Raises ArgumentError when the files do not fit each other or the target.
    """
    config = DrafterConfig.read(path)
    if config is None:
        return None
    if config.hidden_size != target.hidden_size:
        raise ArgumentError("drafter/hidden_size", f"the model's, {target.hidden_size}", config.hidden_size)
    if max(config.feature_layers) > target.num_hidden_layers:
        limit = f"layers from 1 to {target.num_hidden_layers}"
        raise ArgumentError("drafter/feature_layers", limit, list(config.feature_layers))
    with torch.device("meta"):
        _find_weights(path, Drafter(config, torch.empty(target.vocab_size, target.hidden_size)))
    return config


def _find_weights(path: str | Path, drafter: Drafter) -> tuple[Places, dict[str, tuple[int, ...]]]:
    """The file and the shape of each of its parameters. Raises ArgumentError for a missing, odd or further tensor."""
    places = find_tensors(Path(path) / "drafter")
    shapes = {name: tuple(parameter.shape) for name, parameter in drafter.state_dict().items()}
    check_tensors(places, shapes, "drafter/")
    if further := sorted(places.keys() - shapes.keys()):
        raise ArgumentError(f"drafter/{further[0]}", "no such tensor", "one")
    return places, shapes


class Drafter(nn.Module):
    """embed: the target's [vocab, hidden] float32 embedding, which is also the head; it is not a parameter here."""

    embed: Tensor

    def __init__(self, config: DrafterConfig, embed: Tensor) -> None:
        super().__init__()
        self.config = config
        self.block_size, self.window, self.feature_layers = config.block_size, config.window, config.feature_layers
        self.feature_dim = len(config.feature_layers) * config.hidden_size
        self.context_dim = config.num_hidden_layers * 2 * config.num_attention_heads * config.head_dim
        self.register_buffer("embed", embed, persistent=False)
        self.mask_embedding = nn.Parameter(torch.empty(config.block_size - 1, config.hidden_size))
        self.feature_proj = nn.Linear(self.feature_dim, config.hidden_size, bias=False)
        self.feature_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @classmethod
    def load(cls, path: str | Path, embed: Tensor) -> Drafter:
        """The drafter in `path`/drafter, its bf16 weights widened to float32 on embed's device.

        Raises ArgumentError when the files are absent or do not fit each other or the embedding.
        """
        config = DrafterConfig.read(path)
        if config is None:
            raise ArgumentError("drafter", "drafter/config.json beside the model", str(path))
        if embed.ndim != 2 or embed.shape[1] != config.hidden_size:
            raise ArgumentError("embed", f"shape [vocab, {config.hidden_size}]", list(embed.shape))
        drafter = cls(config, embed.float())
        tensors = read_tensors(*_find_weights(path, drafter))
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return drafter.to(embed.device).eval().requires_grad_(False)

    def save(self, path: str | Path) -> None:
        """Write drafter/config.json and drafter/model.safetensors under `path`, tensors rounded to bf16."""
        directory = Path(path) / "drafter"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(asdict(self.config), indent=2) + "\n")
        tensors = {name: t.detach().cpu().to(torch.bfloat16).contiguous() for name, t in self.state_dict().items()}
        save_tensors(directory / "model.safetensors", tensors)

    def context(self, features: Tensor, positions: Tensor) -> Tensor:
        """features [n, feature_dim] at absolute positions int64 [n] -> rows [n, context_dim] to keep and attend to.

        A row is, for each layer, its rotated keys and then its values. It depends on its own token's features alone.
        """
        hidden = self.feature_norm(self.feature_proj(features))
        rope = rotation(positions, self.config)
        return torch.cat([torch.cat(layer.keys_values(hidden, rope), -2).flatten(-2) for layer in self._layers()], -1)

    @torch.no_grad()
    def forward(self, context: Tensor, lengths: Tensor, root_tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [b, block_size - 1, vocab] float32; row i of a request is the token at its position + 1 + i.

        context [b, W, context_dim]: the last committed rows, left-aligned and oldest first; lengths int64 [b]: how many
        rows are valid (0 to W; what lies beyond them is ignored, NaN included); root_tokens int64 [b]; positions
        int64 [b]: the root's absolute position S. Requests run one by one, so none depends on its neighbours.
        """
        requests = zip(context, lengths.tolist(), root_tokens.split(1), positions.split(1), strict=True)
        return torch.cat([self._logits(rows[None, :count], root, at) for rows, count, root, at in requests])

    @torch.no_grad()
    def draft(self, context: Tensor, lengths: Tensor, root_tokens: Tensor, positions: Tensor) -> Tensor:
        """`forward` with all requests in one go: equal to rounding, faster on a GPU; its bits depend on the batch."""
        valid = torch.arange(context.shape[1], device=context.device) < lengths[:, None]
        rows = context.masked_fill(~valid[:, :, None], 0.0)
        mask = F.pad(valid, (0, self.block_size), value=True)[:, None, None, :].expand(-1, 1, self.block_size, -1)
        return self._logits(rows, root_tokens, positions, mask)

    def _logits(self, rows: Tensor, root_tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        block = positions[:, None, None] + torch.arange(self.block_size, device=rows.device)
        return self.logits(self.blocks(rows, root_tokens[:, None], block, mask)[:, 0])

    def blocks(self, context: Tensor, roots: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states [b, k, block_size - 1, hidden] of k blocks a sequence that share its context rows.

        context [b, W, context_dim]; roots int64 [b, k]; positions int64 [b, k, block_size];
        mask bool, broadcastable to [b, 1, k * block_size, W + k * block_size]: True where a query sees a key; None:
        everywhere.
        """
        b, k = roots.shape
        masks = self.mask_embedding.expand(b, k, -1, -1)
        root = F.embedding(roots, self.embed).unsqueeze(2)
        hidden = torch.cat([root, masks.to(root.dtype)], 2).flatten(1, 2)
        rope = rotation(positions.flatten(1), self.config)
        heads = (self.config.num_attention_heads, self.config.head_dim)
        for layer, rows in zip(self._layers(), context.chunk(self.config.num_hidden_layers, -1), strict=True):
            keys, values = rows.unflatten(-1, (2, *heads)).unbind(-3)
            hidden = layer(hidden, rope, keys, values, mask)
        return hidden.unflatten(1, (k, self.block_size))[:, :, 1:]

    def _layers(self) -> list[DraftLayer]:
        return cast("list[DraftLayer]", list(self.layers))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.norm(hidden), self.embed)


class DraftLayer(nn.Module):
    """Pre-norm attention with normed queries and keys, then SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads = (config.num_attention_heads, config.head_dim)
        width, hidden, wide = config.num_attention_heads * config.head_dim, config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, width, bias=False)
        self.k_proj = nn.Linear(hidden, width, bias=False)
        self.v_proj = nn.Linear(hidden, width, bias=False)
        self.o_proj = nn.Linear(width, hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def keys_values(self, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[..., hidden] -> rotated keys and values, both [..., heads, head_dim]."""
        keys = rotate(self.k_norm(self.k_proj(hidden).unflatten(-1, self.heads)), rope)
        return keys, self.v_proj(hidden).unflatten(-1, self.heads)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        hidden = self.input_layernorm(x)
        q = rotate(self.q_norm(self.q_proj(hidden).unflatten(-1, self.heads)), rope)
        k, v = self.keys_values(hidden, rope)
        k, v = torch.cat([keys.to(k.dtype), k], 1), torch.cat([values.to(v.dtype), v], 1)
        q, k, v = (t.transpose(1, 2) for t in (q.to(v.dtype), k.to(v.dtype), v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(-2))
        hidden = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def rotation(positions: Tensor, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, head_dim / 2] float32 of int64 positions [...]."""
    steps = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None, None].float() * config.rope_theta ** (-steps / config.head_dim)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate halves of the last axis of [..., heads, head_dim]."""
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
