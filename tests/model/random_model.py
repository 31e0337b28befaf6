"""Small random models of the architecture in other shapes than the shipped one's, by transformers."""

from pathlib import Path

import torch
import transformers

# q_lora_rank, rope_interleave, tie_word_embeddings: a low-rank query path, half-split rope, an untied head.
OTHERS = [(48, True, False), (None, False, False), (32, False, True)]


def save_random(folder: Path, q_lora_rank: int | None, interleave: bool, tied: bool) -> transformers.PreTrainedModel:
    """Saved there, and as transformers has it: 12 heads, 300 tokens."""
    raw = transformers.DeepseekV3Config(
        vocab_size=300, hidden_size=96, num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=12,
        intermediate_size=128, kv_lora_rank=512, q_lora_rank=q_lora_rank, qk_nope_head_dim=16, qk_rope_head_dim=64,
        v_head_dim=24, first_k_dense_replace=2, max_position_embeddings=512, rope_interleave=interleave,
        tie_word_embeddings=tied, attention_bias=False, rope_scaling=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(raw).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model
