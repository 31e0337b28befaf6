"""Checkpoints in DeepSeek-V3's Hugging Face layout: config.json beside safetensors. Nothing here executes a pickle."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tpverify.config import check_int, check_type
from tpverify.errors import ArgumentError
from tpverify.model.files import (
    MAX_LAYERS,
    SINGLE,
    Places,
    check_fields,
    check_tensors,
    find_tensors,
    read_object,
    read_tensors,
)

PACKAGED = {"tiny": Path(__file__).parent / "tiny"}


@dataclass(frozen=True)
class ModelConfig:
    """The fields of config.json a dense MLA decoder needs, under their Hugging Face names.

    rope_interleave: the rope dims of q and k are stored interleaved; split them into halves, then rotate halves.
    eos_token_id: the token, or the tokens, that end a text.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    q_lora_rank: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_interleave: bool = True
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_int("num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS)
        if self.q_lora_rank is not None:
            check_int("q_lora_rank", self.q_lora_rank, 1, 2**31 - 1)
        for token in self.eos_tokens:
            check_int("eos_token_id", token, 0, self.vocab_size - 1)
        if self.qk_rope_head_dim % 2:
            raise ArgumentError("qk_rope_head_dim", "an even number", self.qk_rope_head_dim)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def eos_tokens(self) -> list[int]:
        if self.eos_token_id is None:
            return []
        return self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Parse a config.json's object. Raises ArgumentError naming the first field this project does not compute."""
        if raw.get("model_type") != "deepseek_v3":
            raise ArgumentError("model_type", "deepseek_v3", raw.get("model_type"))
        values = {f.name: raw[f.name] for f in fields(cls) if raw.get(f.name) is not None}
        rope = raw.get("rope_parameters") or {}
        check_type("rope_parameters", rope, dict, "an object")
        values.setdefault("rope_theta", rope.get("rope_theta", cls.rope_theta))
        for field in fields(cls):
            if field.default is MISSING and field.name not in values:
                raise ArgumentError(field.name, "a value in config.json", "none")
        config = cls(**values)
        _refuse_what_is_not_computed(raw, rope, config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """The object `transformers` reads as a DeepseekV3Config with only dense layers."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "bfloat16",
            "attention_bias": False,
            "first_k_dense_replace": self.num_hidden_layers,
            "hidden_act": "silu",
            "num_key_value_heads": self.num_attention_heads,
            "bos_token_id": None,
        } | asdict(self)


def _refuse_what_is_not_computed(raw: dict[str, Any], rope: dict[str, Any], config: ModelConfig) -> None:
    dense = raw.get("first_k_dense_replace", 0)
    if type(dense) is not int or dense < config.num_hidden_layers:
        raise ArgumentError("first_k_dense_replace", f"{config.num_hidden_layers} (all layers dense)", dense)
    computed = {"attention_bias": False, "hidden_act": "silu", "num_key_value_heads": config.num_attention_heads}
    for name, only in computed.items():
        if raw.get(name, only) != only:
            raise ArgumentError(name, only, raw[name])
    for name in ("rope_scaling", "quantization_config"):
        if raw.get(name):
            raise ArgumentError(name, "null", raw[name])
    if rope.get("rope_type", "default") != "default":
        raise ArgumentError("rope_parameters", "rope_type default", rope["rope_type"])


def resolve(name: str | Path) -> Path:
    """The directory of a packaged model ("tiny") or of a path that holds a config.json. ArgumentError otherwise."""
    check_type("model", name, (str, os.PathLike), f"one of {sorted(PACKAGED)} or a directory")
    path = PACKAGED.get(str(name), Path(name))
    try:
        found = (path / "config.json").is_file()
    except OSError:  # a name that no file can have
        found = False
    if not found:
        raise ArgumentError("model", f"one of {sorted(PACKAGED)} or a directory with a config.json", str(name))
    return path


def load_config(path: str | Path) -> ModelConfig:
    """The config.json of a packaged model or a directory. Raises ArgumentError naming what is not computed here."""
    return ModelConfig.from_dict(read_object(resolve(path) / "config.json", "config.json"))


def find_checkpoint(path: str | Path) -> tuple[ModelConfig, Places]:
    """Config, and the file of every tensor, checked without reading weights: cheap however large the model is.

    Raises ArgumentError when the config asks for something not computed here, when there is no safetensors file
    (.bin and .pt are pickles and are not read), and when a shard, a tensor or a shape is missing or wrong.
    """
    directory, config = resolve(path), load_config(path)
    places = find_tensors(directory)
    check_tensors(places, expected_shapes(config))
    return config, places


def load_checkpoint(path: str | Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Config and tensors by name (stored dtype, CPU) from one safetensors file or from a sharded set with its index.

    Raises what `find_checkpoint` raises, and ArgumentError for weights that are not finite.
    """
    config, places = find_checkpoint(path)
    return config, read_tensors(places, expected_shapes(config))


def save_checkpoint(path: str | Path, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors; tensors are stored in the dtype they have."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(directory / SINGLE, stored)


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file that others may read: the library itself creates it for its owner alone."""
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o644)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape, in the order a forward pass meets them."""
    c, heads = config, config.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for index in range(c.num_hidden_layers):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm": (c.hidden_size,)}
        if c.q_lora_rank is None:
            layer["self_attn.q_proj"] = (heads * c.qk_head_dim, c.hidden_size)
        else:
            layer["self_attn.q_a_proj"] = (c.q_lora_rank, c.hidden_size)
            layer["self_attn.q_a_layernorm"] = (c.q_lora_rank,)
            layer["self_attn.q_b_proj"] = (heads * c.qk_head_dim, c.q_lora_rank)
        layer |= {
            "self_attn.kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size),
            "self_attn.kv_a_layernorm": (c.kv_lora_rank,),
            "self_attn.kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            "self_attn.o_proj": (c.hidden_size, heads * c.v_head_dim),
            "post_attention_layernorm": (c.hidden_size,),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (c.hidden_size,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes
