"""The decoder that GPUs run, on the CPU over the reference attention, against transformers and over ranks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoding import Meeting
from random_model import OTHERS, save_random

from tpverify.config import MlaGeometry
from tpverify.model.checkpoint import ModelConfig, load_checkpoint, resolve
from tpverify.model.gpu_decoder import GpuDecoder, virtual_shards
from tpverify.ops.attention import TreeMask, VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.tree import DraftTree

TEXT = b'def merge(left, right):\n    """Merge two sorted lists."""\n    result = []\n    while left and right:\n'
CPU = torch.device("cpu")
PADDING = 5


class Cached:
    """tp ranks in threads, each with its pool, fed chunk by chunk; rows of padding follow every chunk's."""

    def __init__(
        self, config: ModelConfig, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32, tp: int = 1
    ) -> None:
        meeting = Meeting(tp)
        self.ranks = [
            GpuDecoder(config, tensors, CPU, dtype, rank, tp, meeting.rank(rank).allgather_into) for rank in range(tp)
        ]
        self.config, self.length = config, 0
        self.pools = [torch.zeros(config.num_hidden_layers, 1024, 576, dtype=dtype) for _ in range(tp)]
        self.slots = torch.randperm(1023, generator=torch.Generator().manual_seed(0)) + 1

    def __call__(self, tokens: torch.Tensor, mask: TreeMask | DraftTree, path: list[int] | None = None) -> torch.Tensor:
        """Logits float32 [n, vocab], the same on all ranks; `path` (default all) is committed."""
        n = len(tokens)
        own = self.slots[self.length : self.length + n]
        padded, slots = torch.cat([tokens, torch.zeros(PADDING).long()]), torch.cat([own, torch.zeros(PADDING).long()])
        positions = torch.cat([torch.from_numpy(self.length + np.asarray(mask.depths).astype(np.int64)), slots[n:]])
        request = VerifyRequest(self.slots[: self.length], own, mask)

        def run(rank: int) -> torch.Tensor:
            plan = VerifyPlan(MlaGeometry(self.config.num_attention_heads // len(self.ranks)), 1, 1024, 1024, "cpu")
            plan.update([request])

            def attend(layer: int, rows: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
                self.pools[rank][layer].index_copy_(0, slots, rows)
                out[n:] = 0
                pool, lse = self.pools[rank][layer], torch.empty(n, q.shape[1])
                plan.run(q[:n], pool, out[:n], lse, self.config.softmax_scale)

            decoder = self.ranks[rank]
            with torch.no_grad():
                return decoder.logits(decoder(padded, positions, attend, (), None))[:n]

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            first, *others = pool.map(run, range(len(self.ranks)))
        assert all(torch.equal(other, first) for other in others)
        kept = own if path is None else own[path]
        rest = own[[node for node in range(n) if path is not None and node not in path]]
        self.slots[self.length : self.length + n] = torch.cat([kept, rest])
        self.length += len(kept)
        return first


@pytest.fixture(scope="module")
def tiny() -> Any:
    return load_checkpoint("tiny")


def oracle(dtype: torch.dtype) -> Any:
    return transformers.DeepseekV3ForCausalLM.from_pretrained(resolve("tiny"), dtype=dtype).eval()


@torch.no_grad()
def test_logits_match_transformers(tiny: Any) -> None:
    """In float32 to rounding; in bfloat16 no worse than 1.5 times transformers' own bfloat16."""
    tokens = torch.tensor(list(TEXT * 4))[:400]
    exact, plain = (oracle(dtype)(tokens[None]).logits[0].double() for dtype in (torch.float64, torch.bfloat16))
    for dtype, allowed in ((torch.float32, 2e-5 * exact.abs().max()), (torch.bfloat16, 1.5 * (plain - exact).abs())):
        model = Cached(*tiny, dtype)
        logits = torch.cat([model(chunk, TreeMask.chain(len(chunk))) for chunk in tokens.split(256)])
        error = (logits - exact).abs()
        assert error.max() < allowed.max() and error.mean() < allowed.mean() + 1e-5
        assert (logits.argmax(1) == exact.argmax(1)).double().mean() > 0.97


@torch.no_grad()
def test_logits_of_tree_nodes_match_transformers_on_their_paths(tiny: Any) -> None:
    """And what follows an accepted path reads its rows, not those beside them."""
    exact, prompt = oracle(torch.float64), list(TEXT)
    parents, tokens = [-1, 0, 0, 1, 2, 1, 3, 4, 4], list(b"\n ruwyhes")
    tree = DraftTree.from_parents(tokens, parents)
    model = Cached(*tiny)
    model(torch.tensor(prompt), TreeMask.chain(len(prompt)))
    logits = model(torch.tensor(tokens), tree, [0, 2, 4, 7])
    for node in range(len(parents)):
        path = [node]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        expected = exact(torch.tensor([prompt + [tokens[i] for i in path[::-1]]])).logits[0, -1]
        assert (logits[node] - expected).abs().max() < 2e-5 * expected.abs().max()
    after = model(torch.tensor(list(b"xyz")), TreeMask.chain(3))
    expected = exact(torch.tensor([prompt + [tokens[i] for i in (0, 2, 4, 7)] + list(b"xyz")])).logits[0, -3:]
    assert (after - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", [2, 8])
def test_tp_changes_no_bit(tiny: Any, tp: int, dtype: torch.dtype) -> None:
    tokens = torch.tensor(list(TEXT))
    one, many = (Cached(*tiny, dtype, size) for size in (1, tp))
    for chunk in tokens.split([40, 1, len(tokens) - 41]):
        assert torch.equal(*(model(chunk, TreeMask.chain(len(chunk))) for model in (one, many)))


@pytest.mark.parametrize("q_lora_rank, interleave, tied", OTHERS)
def test_other_shapes_of_the_architecture_match_transformers(
    q_lora_rank: int | None, interleave: bool, tied: bool, tmp_path: Any
) -> None:
    """Random weights, 12 heads in 4 shards over tp 2."""
    model = save_random(tmp_path, q_lora_rank, interleave, tied)
    config, tensors = load_checkpoint(tmp_path)
    assert virtual_shards(config.num_attention_heads) == 4
    tokens = torch.randint(0, 300, (90,))
    with torch.no_grad():
        expected = model.double()(tokens[None]).logits[0]
    logits = Cached(config, tensors, tp=2)(tokens, TreeMask.chain(90))
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_what_no_bf16_product_reads_is_as_the_checkpoint_has_it(tied: bool, tmp_path: Any) -> None:
    """A float32 checkpoint's norms, embeddings and head came rounded to bfloat16."""
    save_random(tmp_path, 48, True, tied)
    config, tensors = load_checkpoint(tmp_path)
    decoder = GpuDecoder(config, tensors, CPU, torch.bfloat16)

    def same(kept: torch.Tensor, name: str) -> bool:
        return kept.dtype == torch.float32 and torch.equal(kept, tensors[f"{name}.weight"].float())

    assert tensors["model.norm.weight"].dtype == torch.float32
    assert same(decoder.embed, "model.embed_tokens") and same(decoder.norm, "model.norm")
    assert same(decoder.head, "model.embed_tokens" if tied else "lm_head")
    for index, layer in enumerate(decoder.layers):
        below = f"model.layers.{index}."
        assert same(layer.input_norm, f"{below}input_layernorm") and same(
            layer.kv_a_norm, f"{below}self_attn.kv_a_layernorm"
        )
        assert same(layer.post_attention_norm, f"{below}post_attention_layernorm")
        assert layer.q_a is not None and same(layer.q_a[1], f"{below}self_attn.q_a_layernorm")
        assert layer.o_proj.dtype == layer.kv_a.dtype == torch.bfloat16


@torch.no_grad()
def test_features_are_the_residual_stream_after_their_layers(tiny: Any) -> None:
    config, tensors = tiny
    tokens = torch.tensor(list(TEXT))[:50]
    streams = oracle(torch.float32)(tokens[None], output_hidden_states=True).hidden_states
    features = torch.zeros(50, 2 * config.hidden_size)
    plan = VerifyPlan(MlaGeometry(8), 1, 50, 50, "cpu")
    plan.update([VerifyRequest(torch.arange(0), torch.arange(50), TreeMask.chain(50))])

    def attend(layer: int, rows: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
        plan.run(q, rows, out, torch.empty(50, 8), config.softmax_scale)

    GpuDecoder(config, tensors, CPU, torch.float32)(tokens, torch.arange(50), attend, (3, 1), features)
    expected = torch.cat([streams[3][0], streams[1][0]], 1)
    assert (features - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("heads", "shards"), [(1, 1), (8, 8), (12, 4), (64, 8), (100, 4), (7, 1)])
def test_virtual_shards(heads: int, shards: int) -> None:
    assert virtual_shards(heads) == shards
