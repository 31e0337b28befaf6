"""The drafter against a float64 rewrite in numpy, and the promises of its interface."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.model.checkpoint import load_checkpoint, load_config, resolve
from tpverify.model.cpu_drafter import CpuDrafter
from tpverify.model.drafter import Drafter, DrafterConfig, find_drafter


@pytest.fixture(scope="module")
def embed() -> torch.Tensor:
    return load_checkpoint("tiny")[1]["model.embed_tokens.weight"].float()


@pytest.fixture(scope="module")
def drafter(embed: torch.Tensor) -> Drafter:
    return Drafter.load(resolve("tiny"), embed)


def features(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 768, generator=torch.Generator().manual_seed(seed)) * 2


def oracle(embed: torch.Tensor, rows: np.ndarray, first: int, root: int, at: int) -> np.ndarray:
    """Logits [15, vocab] in float64, one query, head and layer at a time. rows [count, 768] from position first on."""
    w = {name: t.double().numpy() for name, t in load_file(str(resolve("tiny") / "drafter/model.safetensors")).items()}
    table = embed.double().numpy()

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        angle = position * 10000.0 ** (-np.arange(0, 32, 2) / 32)
        pair = (x[:16] + 1j * x[16:]) * np.exp(1j * angle)
        return np.concatenate([pair.real, pair.imag])

    context = norm(rows @ w["feature_proj.weight"].T, w["feature_norm.weight"])
    x = np.concatenate([table[root][None], w["mask_embedding"]])
    for layer in range(2):
        p = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
        inner = norm(x, p["input_layernorm.weight"])
        sources = [(row, first + i) for i, row in enumerate(context)] + [(row, at + i) for i, row in enumerate(inner)]
        attended = np.zeros((16, 256))
        for head in range(8):
            s = slice(head * 32, head * 32 + 32)
            keys = np.array([rope(norm(p["k_proj.weight"][s] @ row, p["k_norm.weight"]), pos) for row, pos in sources])
            values = np.array([p["v_proj.weight"][s] @ row for row, _ in sources])
            for i in range(16):
                query = rope(norm(p["q_proj.weight"][s] @ inner[i], p["q_norm.weight"]), at + i)
                score = keys @ query / np.sqrt(32)
                share = np.exp(score - score.max())
                attended[i, s] = share @ values / share.sum()
        x = x + attended @ p["o_proj.weight"].T
        inner = norm(x, p["post_attention_layernorm.weight"])
        gate = inner @ p["gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (inner @ p["up_proj.weight"].T)) @ p["down_proj.weight"].T
    return (norm(x, w["norm.weight"]) @ table.T)[1:]


@pytest.mark.parametrize(("count", "at"), [(0, 0), (1, 1), (5, 5), (128, 128), (128, 700), (40, 3000)])
def test_against_float64(drafter: Drafter, embed: torch.Tensor, count: int, at: int) -> None:
    rows = features(count)
    context = torch.full((1, 128, drafter.context_dim), float("nan"))
    context[0, :count] = drafter.context(rows, torch.arange(at - count, at))
    got = drafter(context, torch.tensor([count]), torch.tensor([65]), torch.tensor([at]))
    wanted = oracle(embed, rows.double().numpy(), at - count, 65, at)
    assert got.shape == (1, 15, 256) and got.dtype == torch.float32
    np.testing.assert_allclose(got[0].double().numpy(), wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("native_library", [True, False])
@pytest.mark.parametrize(("count", "at"), [(0, 0), (1, 1), (128, 128), (40, 3000)])
def test_cpu_ranks_draft_the_same(
    drafter: Drafter,
    embed: torch.Tensor,
    count: int,
    at: int,
    native_library: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = request.getfixturevalue("host_library") if native_library else None
    monkeypatch.setattr(native, "host", lambda: library)
    rows = features(count)
    on_cpu = CpuDrafter(drafter, 8192)
    context = on_cpu.context(rows, at - count)
    assert context.shape == (count, on_cpu.context_dim)
    got = on_cpu(context, 65, at)
    np.testing.assert_allclose(
        got.double().numpy(), oracle(embed, rows.double().numpy(), at - count, 65, at), atol=2e-3, rtol=1e-3
    )


def test_a_request_does_not_depend_on_its_neighbours(drafter: Drafter) -> None:
    context = drafter.context(features(256), torch.arange(256)).view(2, 128, -1)
    pairs = (torch.tensor([128, 17]), torch.tensor([10, 32]), torch.tensor([128, 145]))
    both = drafter(context, *pairs)
    for i in range(2):
        alone = drafter(context[i : i + 1], *(t[i : i + 1] for t in pairs))
        assert torch.equal(alone[0], both[i])
    torch.testing.assert_close(drafter.draft(context, *pairs), both, atol=1e-3, rtol=1e-3)


def test_only_distance_matters(drafter: Drafter) -> None:
    rows = features(20)
    logits = []
    for shift in (0, 1000):
        context = drafter.context(rows, torch.arange(shift, shift + 20))[None]
        logits.append(drafter(context, torch.tensor([20]), torch.tensor([9]), torch.tensor([shift + 20])))
    torch.testing.assert_close(*logits, atol=5e-3, rtol=1e-3)


def test_size_and_names(drafter: Drafter) -> None:
    assert sum(p.numel() for p in drafter.parameters()) <= 1_600_000
    assert (drafter.block_size, drafter.window, drafter.feature_layers, drafter.feature_dim) == (
        16,
        128,
        (1, 2, 4),
        768,
    )
    assert not any(p.requires_grad for p in drafter.parameters())


def test_round_trip(drafter: Drafter, embed: torch.Tensor, tmp_path: Path) -> None:
    drafter.save(tmp_path)
    again = Drafter.load(tmp_path, embed)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_what_does_not_fit_is_named(embed: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="drafter/config.json"):
        Drafter.load(tmp_path, embed)
    with pytest.raises(ArgumentError, match="embed"):
        Drafter.load(resolve("tiny"), embed[:, :128])
    shutil.copytree(resolve("tiny") / "drafter", tmp_path / "drafter")
    file = tmp_path / "drafter/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(ArgumentError, match=r"layers\.1"):
        Drafter.load(tmp_path, embed)


BAD_DRAFTERS: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 1}, "drafter/block_size"), ({"block_size": 66}, "drafter/block_size"),
    ({"head_dim": 31}, "drafter/head_dim"), ({"window": 0}, "drafter/window"), ({"window": "128"}, "drafter/window"),
    ({"rms_norm_eps": None}, "drafter/rms_norm_eps"), ({"hidden_size": 128}, "drafter/hidden_size"),
    ({"feature_layers": []}, "drafter/feature_layers"), ({"feature_layers": [1, 5]}, "drafter/feature_layers"),
    ({"feature_layers": [0]}, "drafter/feature_layers"), ({"feature_layers": 3}, "drafter/feature_layers"),
    ({"feature_layers": ["1"]}, "drafter/feature_layers"), ({"layers": 2}, "drafter/config.json"),
    ({"num_hidden_layers": 2 * 10**9}, "drafter/num_hidden_layers"), ({"head_dim": 2**30}, "drafter/head_dim"),
    ({"num_attention_heads": 2**31 - 1}, "drafter/num_attention_heads"),
    ({"num_hidden_layers": 3}, "drafter/layers.2"), ({"intermediate_size": 100}, "drafter/layers.0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "argument"), BAD_DRAFTERS)
def test_a_bad_drafter_is_found_without_reading_weights(tmp_path: Path, change: dict[str, Any], argument: str) -> None:
    shutil.copytree(resolve("tiny") / "drafter", tmp_path / "drafter")
    file = tmp_path / "drafter/config.json"
    good = json.loads(file.read_text())
    target = load_config("tiny")
    assert find_drafter(tmp_path, target) == DrafterConfig.read(tmp_path)
    file.write_text(json.dumps(good | change))
    with pytest.raises(ArgumentError, match=f"^{argument}"):
        find_drafter(tmp_path, target)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 10**5])
def test_a_broken_drafter_config_is_one_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter/config.json").write_text(text)
    with pytest.raises(ArgumentError, match="^drafter/config.json: expected "):
        find_drafter(tmp_path, load_config("tiny"))


def test_a_drafter_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter/config.json").write_bytes((resolve("tiny") / "drafter/config.json").read_bytes())
    with pytest.raises(ArgumentError, match="no weights"):
        find_drafter(tmp_path, load_config("tiny"))
