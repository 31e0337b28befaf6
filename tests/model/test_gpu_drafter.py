"""The drafter that GPUs run, on the CPU, against the one that CPUs run."""

import pytest
import torch

from tpverify.model.checkpoint import load_checkpoint, resolve
from tpverify.model.drafter import Drafter
from tpverify.model.gpu_drafter import GpuDrafter

LONGEST = 16
# Committed rows before the step, rows of the step's path (0: a prompt, whose rows are all among the former).
CASES = [(200, 5), (3, 2), (0, 1), (127, 16), (128, 1), (64, 16), (700, 0), (90, 0)]


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return Drafter.load(resolve("tiny"), load_checkpoint("tiny")[1]["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_logits_of_a_batch_are_the_drafters_own(drafter: Drafter, dtype: torch.dtype, allowed: float) -> None:
    """What lies in rows that are not valid changes nothing."""
    gpu = GpuDrafter(drafter, torch.device("cpu"), dtype, 8192, LONGEST)
    features = torch.randn(800, 768, generator=torch.Generator().manual_seed(0)) * 2
    rows = torch.full((len(CASES), gpu.window + LONGEST, gpu.context_dim), 50.0, dtype=dtype)
    roots = torch.arange(len(CASES)) + 40
    expected = []
    for index, (earlier, path) in enumerate(CASES):
        total = earlier + path
        own = gpu.context(features[:total].to(dtype), torch.arange(total))
        first = max(0, earlier - gpu.window)
        rows[index, gpu.window - (earlier - first) : gpu.window] = own[first:earlier]
        rows[index, gpu.window : gpu.window + path] = own[earlier:]
        last = drafter.context(features[:total], torch.arange(total))[-gpu.window :][None]
        expected.append(
            drafter(last, torch.tensor([last.shape[1]]), roots[index : index + 1], torch.tensor([total]))[0]
        )
    earlier, path = torch.tensor(CASES).t()
    got = gpu(rows, earlier.clamp(max=gpu.window), path, roots, earlier + path)
    assert got.dtype == torch.float32 and got.shape == (len(CASES), drafter.block_size - 1, 256)
    assert (got - torch.stack(expected)).abs().max() < allowed
