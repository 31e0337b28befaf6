"""Reading and refusing checkpoints; the shipped files as transformers sees them."""

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import (
    ModelConfig,
    expected_shapes,
    find_checkpoint,
    load_checkpoint,
    resolve,
    save_checkpoint,
)
from tpverify.model.tiny.train import load

SMALL = ModelConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=6, v_head_dim=4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


def weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in expected_shapes(config).items()}


def write_config(path: Path, **changes: Any) -> None:
    raw = SMALL.to_dict() | changes
    (path / "config.json").write_text(json.dumps(raw))


def test_round_trip(tmp_path: Path) -> None:
    tensors = weights(SMALL)
    save_checkpoint(tmp_path, SMALL, tensors)
    config, got = load_checkpoint(tmp_path)
    assert config == SMALL
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in got)
    assert (tmp_path / "model.safetensors").stat().st_mode & stat.S_IROTH


@pytest.mark.parametrize("q_lora_rank", [None, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_transformers(q_lora_rank: int | None, tied: bool) -> None:
    config = replace(SMALL, q_lora_rank=q_lora_rank, tie_word_embeddings=tied)
    raw = {key: value for key, value in config.to_dict().items() if key not in ("architectures", "dtype")}
    theirs = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**raw)).state_dict()
    if tied:
        theirs.pop("lm_head.weight", None)
    assert {name: tuple(t.shape) for name, t in theirs.items()} == expected_shapes(config)


def test_shipped_model_keeps_its_size_and_its_dtype() -> None:
    config, tensors = load_checkpoint("tiny")
    assert sum(t.numel() for t in tensors.values()) <= 4_500_000
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert tensors.keys() == expected_shapes(config).keys()
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.num_attention_heads) == (512, 64, 8)


def test_training_model_is_the_shipped_one_as_transformers_loads_it() -> None:
    """The same logits and layer outputs, float32, on real text and at positions beyond a short prompt."""
    path = resolve("tiny")
    target, drafter = load(path, "cpu")
    oracle = transformers.DeepseekV3ForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = torch.tensor([list(Path(transformers.__file__).read_bytes()[:300])])
    with torch.no_grad():
        theirs = oracle(text, output_hidden_states=True)
        streams = target.residuals(text)
        torch.testing.assert_close(target(text), theirs.logits, atol=2e-4, rtol=1e-4)
    features = torch.cat([theirs.hidden_states[layer] for layer in (1, 2)], -1)  # the last one is normed there
    torch.testing.assert_close(target.features(streams, (1, 2)), features, atol=2e-4, rtol=1e-4)
    assert drafter.feature_layers == (1, 2, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"),
        ("model_type", None),
        ("first_k_dense_replace", 1),  # a MoE layer
        ("rope_scaling", {"type": "yarn", "factor": 40}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("num_key_value_heads", 1),
        ("num_hidden_layers", 2 * 10**9),  # names of its tensors alone would fill the memory
        ("kv_lora_rank", 0),
        ("kv_lora_rank", "512"),
        ("kv_lora_rank", None),
        ("q_lora_rank", -1),
        ("qk_rope_head_dim", 5),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_interleave", 1),
        ("vocab_size", True),
        ("hidden_size", 2**31),
        ("rope_theta", 10**400),
        ("rope_parameters", "default"),
        ("rope_parameters", [1e4]),
        ("eos_token_id", 32),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", "</s>"),
        ("eos_token_id", True),
    ],
)
def test_a_config_that_is_not_computed_names_its_field(tmp_path: Path, field: str, value: Any) -> None:
    write_config(tmp_path, **{field: value})
    with pytest.raises(ArgumentError) as error:
        load_checkpoint(tmp_path)
    assert error.value.argument == field


def test_absent_rope_interleave_means_true_and_theta_may_lie_in_rope_parameters() -> None:
    raw = SMALL.to_dict()
    del raw["rope_interleave"], raw["rope_theta"]
    config = ModelConfig.from_dict(raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert config.rope_interleave is True and config.rope_theta == 5e5


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "null", "[" * 10**5])
def test_a_broken_config_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArgumentError, match=r"config\.json"):
        load_checkpoint(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    torch.save(weights(SMALL), tmp_path / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"pytorch_model\.bin"):
        load_checkpoint(tmp_path)


def test_no_weights_and_no_directory(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(ArgumentError, match="no weights"):
        load_checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="tiny"):
        resolve("no such model")


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, SMALL, weights(SMALL))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ArgumentError, match=r"model\.safetensors"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, change: str) -> None:
    tensors, name = weights(SMALL), "model.layers.1.self_attn.kv_b_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name].T.contiguous()
    save_checkpoint(tmp_path, SMALL, tensors)
    for look in (load_checkpoint, find_checkpoint):
        with pytest.raises(ArgumentError) as error:
            look(tmp_path)
        assert error.value.argument == name


def test_a_look_at_a_checkpoint_reads_no_weights(tmp_path: Path) -> None:
    """NaN weights pass, as nothing but a header was read; every file is found."""
    tensors = weights(SMALL)
    tensors["model.norm.weight"][:] = torch.nan
    save_checkpoint(tmp_path, SMALL, tensors)
    config, places = find_checkpoint(tmp_path)
    assert config == SMALL and set(places.values()) == {tmp_path / "model.safetensors"}
    with pytest.raises(ArgumentError, match="^model.norm.weight: expected finite weights"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', "\x00",
     '{"weight_map": {"model.norm.weight": "\\ud800.safetensors"}}',
     '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "b\\u0000.safetensors"}}', '{"weight_map": {}}'],
)  # fmt: skip
def test_a_broken_index_is_one_clear_error(tmp_path: Path, text: str) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ArgumentError, match="expected "):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("wrong", ["dtype", "NaN"])
def test_weights_that_cannot_be_computed_with_are_named(tmp_path: Path, wrong: str) -> None:
    tensors = weights(SMALL)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].int() if wrong == "dtype" else torch.full_like(tensors[name], torch.nan)
    save_checkpoint(tmp_path, SMALL, tensors)
    with pytest.raises(ArgumentError, match=f"^{name}: expected (float32|finite)"):
        load_checkpoint(tmp_path)


def shard(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, str(path / file))
    return {name: file for file, part in parts.items() for name in part}


def test_tensors_that_no_layer_needs_are_left_out(tmp_path: Path) -> None:
    """Some writers store a tied head once more."""
    tensors = weights(SMALL)
    save_checkpoint(tmp_path, SMALL, tensors | {"lm_head.weight": torch.full((32, 16), torch.nan)})
    assert load_checkpoint(tmp_path)[1].keys() == tensors.keys()


def test_shards_are_joined(tmp_path: Path) -> None:
    write_config(tmp_path)
    tensors = weights(SMALL)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard(tmp_path, tensors)}))
    _, got = load_checkpoint(tmp_path)
    assert got.keys() == tensors.keys() and all(torch.equal(got[name], tensors[name]) for name in got)


def test_a_shard_that_is_absent_lacks_a_tensor_or_lies_elsewhere(tmp_path: Path) -> None:
    write_config(tmp_path)
    index = shard(tmp_path, weights(SMALL))
    name, file = next(iter(index.items()))
    other = next(f for f in index.values() if f != file)
    for wrong, named in (
        ("gone.safetensors", "gone"),
        (other, name),
        ("../x.safetensors", r"\.\."),
        ("x.bin", "x.bin"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {name: wrong}}))
        with pytest.raises(ArgumentError, match=named):
            load_checkpoint(tmp_path)
