"""Train the shipped model and its drafter, and print what they reach.

python -m tpverify.model.tiny.train --out DIR              the shipped recipe, on one GPU
python -m tpverify.model.tiny.train --out DIR --smoke      a miniature on the CPU; exits 1 below its bars
python -m tpverify.model.tiny.train --out DIR --eval       the table for a model that is there
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tpverify.model.checkpoint import ModelConfig, load_checkpoint, save_checkpoint
from tpverify.model.drafter import Drafter, DrafterConfig
from tpverify.model.tiny import corpus as texts
from tpverify.model.tiny import evaluate
from tpverify.model.tiny.distill import DistillRecipe, distill
from tpverify.model.tiny.generate import GenerateRecipe, generate
from tpverify.model.tiny.pretrain import PretrainRecipe, pretrain
from tpverify.model.tiny.target import SHIPPED, Target, rounded


@dataclass(frozen=True)
class Judged:
    """How much held-out text the progress lines look at: windows of each part (None: all), prompts and new bytes."""

    windows: int | None = None
    prompts: int = 64
    prompt_bytes: int = 384
    new_bytes: int = 128


@dataclass(frozen=True)
class Recipe:
    target: ModelConfig
    drafter: DrafterConfig
    pretrain: PretrainRecipe
    generate: GenerateRecipe
    distill: DistillRecipe
    judged: Judged


FULL = Recipe(
    SHIPPED,
    DrafterConfig(),
    PretrainRecipe(steps=9500),
    GenerateRecipe(),
    DistillRecipe(steps=12000),
    Judged(),
)
SMOKE = Recipe(
    replace(SHIPPED, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160, kv_lora_rank=32,
            qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
    DrafterConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=16, intermediate_size=160,
                  block_size=8, window=32, feature_layers=(1, 2)),
    PretrainRecipe(steps=300, batch_bytes=2048, context=128, long_context=256),
    GenerateRecipe(sequences=256, batch=256, length=128, short_prompt=16, long_prompt=96, half_sampled=16),
    DistillRecipe(steps=150, sequences=8, blocks=8),
    Judged(windows=64, prompts=8, prompt_bytes=96, new_bytes=32),
)  # fmt: skip
SMOKE_BARS = (2.8, 1.5)  # bits per byte at most, chain tau at least


def train(recipe: Recipe, corpus: texts.Corpus, out: Path, device: str) -> tuple[Target, Drafter]:
    """All three stages. The checkpoint under `out` is rewritten as they advance, so an interrupted run leaves one."""
    target = Target(recipe.target).to(device)

    def keep(step: int, line: str) -> None:
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in target.state_dict().items()}
        save_checkpoint(out, recipe.target, weights)
        bits = held_out_bits(rounded(target), corpus, recipe.pretrain.context, recipe.judged.windows)
        print(f"target step {step}: {line}; held out: {described(bits)}", flush=True)

    pretrain(target, corpus, recipe.pretrain, keep)
    return draft_for(rounded(target), recipe, corpus, out)


def draft_for(target: Target, recipe: Recipe, corpus: texts.Corpus, out: Path) -> tuple[Target, Drafter]:
    """The last two stages, for a target that is trained."""
    start, judged = time.monotonic(), recipe.judged
    data = generate(target, corpus, recipe.generate)
    written = int((data.tokens.shape[1] - data.prompts).sum())
    print(f"target wrote {written:,} bytes: {time.monotonic() - start:.0f} s", flush=True)
    embed = target.embed.detach()
    drafter = Drafter(recipe.drafter, embed).to(embed.device)
    given = evaluate.held_out_prompts(corpus, [judged.prompt_bytes] * (judged.prompts // 2))

    def keep(step: int, line: str) -> None:
        drafter.save(out)
        tau = evaluate.decode(target, Drafter.load(out, embed), given, judged.new_bytes, evaluate.chain).tau
        print(f"drafter step {step}: {line}; held out: chain tau {tau:.2f}", flush=True)

    distill(drafter, target, data, recipe.distill, keep)
    return target, Drafter.load(out, embed)


def load(path: Path, device: str) -> tuple[Target, Drafter]:
    config, tensors = load_checkpoint(path)
    target = Target(config).requires_grad_(False)
    target.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    target.to(device)
    return target, Drafter.load(path, target.embed.detach())


def held_out_bits(target: Target, corpus: texts.Corpus, context: int, windows: int | None) -> dict[str, float]:
    """Bits per byte of the parts of the held-out text that this standard library has."""
    parts = {"lib": corpus.lib, "test": corpus.test}
    return {name: evaluate.bits_per_byte(target, part, context, windows) for name, part in parts.items() if part}


def described(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in row.items())


def table(target: Target, drafter: Drafter, corpus: texts.Corpus, judged: Judged) -> dict[str, dict[str, float]]:
    """Print and return bits per byte and tau; `differ` counts continuations that are not plain decoding's."""
    rows = {f"bits per byte, context {c}": held_out_bits(target, corpus, c, judged.windows) for c in (1024, 4096)}
    half = judged.prompts // 2
    long = evaluate.held_out_prompts(corpus, [judged.prompt_bytes] * half)
    short = evaluate.held_out_prompts(corpus, [1 + 63 * i // max(1, half - 1) for i in range(half)])
    strategies = {"chain": evaluate.chain} | {f"B={b}": evaluate.ddtree(b) for b in evaluate.BUDGETS}
    for label, given, temperature in (
        (f"prompts of {judged.prompt_bytes}, T=0", long, 0.0),
        ("prompts of 1 to 64, T=0", short, 0.0),
        (f"prompts of {judged.prompt_bytes}, T=1", long, 1.0),
    ):
        plain = evaluate.decode(target, drafter, given, judged.new_bytes, evaluate.root_only, temperature).tokens
        row, differ = {}, 0
        for name, strategy in strategies.items():
            decoded = evaluate.decode(target, drafter, given, judged.new_bytes, strategy, temperature)
            row[name] = decoded.tau
            differ += sum(a != b for a, b in zip(decoded.tokens, plain, strict=True))
        rows[f"tau, {label}"] = row | {"differ": differ}
    for label, row in rows.items():
        print(f"{label}: {described(row)}", flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tpverify.model.tiny.train", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--corpus", type=Path, help="a standard library; default: the running interpreter's")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smoke", action="store_true", help="a miniature on the CPU with its own bars")
    mode.add_argument("--eval", action="store_true", help="only measure the checkpoint in --out")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and not args.smoke else "cpu"
    corpus = texts.load(args.corpus)
    if args.smoke:
        return smoke(corpus, args.out)
    if not args.eval and device == "cpu":
        parser.error("the shipped recipe needs a GPU; --smoke runs a miniature on the CPU")
    target, drafter = load(args.out, device) if args.eval else train(FULL, corpus, args.out, device)
    rows = table(target, drafter, corpus, FULL.judged)
    (args.out / "measured.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def smoke(corpus: texts.Corpus, out: Path) -> int:
    """The miniature, on one thread (its matrices are too small for two); 1 if it misses SMOKE_BARS."""
    torch.set_num_threads(1)
    target, drafter = train(SMOKE, corpus, out, "cpu")
    judged, (most, least) = SMOKE.judged, SMOKE_BARS
    bits = held_out_bits(target, corpus, SMOKE.pretrain.context, judged.windows)["lib"]
    given = evaluate.held_out_prompts(corpus, [judged.prompt_bytes] * (judged.prompts // 2))
    tau = evaluate.decode(target, drafter, given, judged.new_bytes, evaluate.chain).tau
    print(f"bits per byte {bits:.3f} (bar {most}), chain tau {tau:.2f} (bar {least})")
    return 0 if bits <= most and tau >= least else 1


if __name__ == "__main__":
    sys.exit(main())
