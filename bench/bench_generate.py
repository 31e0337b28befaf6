"""The shipped model end to end: tokens a second by strategy and tp, accept lengths by budget, the time of one step.

    python bench/bench_generate.py [--device cpu] [--tps 1 8] [--prompts 8] [--new 128] [--json]

Prompts are pieces of standard-library modules that the model was not trained on. tau is tokens / rounds over all
prompts, the root counted. Strategies run one after another on the same ranks, prompt by prompt; medians over prompts.
On CPUs all rows have the same tokens and hidden states. On GPUs rounding differs by shape: a row says how many prompts'
tokens are those of autoregressive decoding, and each row is the same at every tp.
"""

import argparse
import json
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from tpverify.ending import ended
from tpverify.runtime.engine import Engine
from tpverify.runtime.ranks import RankGroup

BUDGETS = (8, 16, 32, 64, 128)
STEP_PREFIX, STEP_BUDGET = 1024, 32


def held_out(count: int, length: int) -> list[bytes]:
    """Pieces of the held-out library modules, spread over them."""
    import tpverify.model.tiny

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = (Path(tpverify.model.tiny.__file__).parent / "heldout.txt").read_text().split()
    texts = [(stdlib / name).read_bytes() for name in names if "/" not in name and (stdlib / name).is_file()]
    texts = [text for text in texts if len(text) > 2 * length]
    return [texts[i % len(texts)][(start := 300 + 700 * (i // len(texts))) : start + length] for i in range(count)]


def measure(engine: Engine, prompts: list[bytes], new: int, strategy: str, budget: int) -> dict[str, Any]:
    """One row, and the tokens by which rows are compared."""
    rates, rounds, tokens, seconds = [], 0, 0, dict[str, float]()
    produced = []
    for prompt in prompts:
        start = time.perf_counter()
        result = engine.generate(prompt, max_new_tokens=new, strategy=strategy, budget=budget)
        rates.append(new / (time.perf_counter() - start))
        rounds += len(result.accept_lengths)
        tokens += sum(result.accept_lengths)
        produced.append((result.tokens, result.stats["hidden_digest"]))
        for stage, value in result.stats["seconds"].items():
            seconds[stage] = seconds.get(stage, 0.0) + value
    return {
        "tp": engine.tp,
        "strategy": strategy,
        "budget": budget if strategy == "ddtree" else None,
        "tau": round(tokens / rounds, 2),
        "verify_calls_per_token": round(rounds / (len(prompts) * new), 3),
        "tokens_per_s": round(statistics.median(rates), 1),
        "ms_per_step": {stage: round(1e3 * value / rounds, 3) for stage, value in seconds.items()},
        "produced": produced,
    }


def one_step(engine: Engine, prompt: bytes, new: int) -> dict[str, Any]:
    """Wall time of the verify steps after a prompt of STEP_PREFIX tokens."""
    times, last = [], 0.0
    for _ in engine.stream(prompt, max_new_tokens=new, budget=STEP_BUDGET):
        now = time.perf_counter()
        times.append(1e3 * (now - last))
        last = now
    steps = sorted(times[1:-1])  # the first ends with the prompt, the last is the result
    return {
        "tp": engine.tp,
        "step": f"{STEP_BUDGET + 1} nodes, {STEP_PREFIX} prefix",
        "steps": len(steps),
        "p50_ms": round(statistics.median(steps), 3),
        "max_ms": round(steps[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tps", type=int, nargs="+", help="1 and 8 on CPUs, 1 on GPUs")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tps = args.tps or ([1, 8] if args.device == "cpu" else [1])
    prompts = held_out(args.prompts, 384)
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    with RankGroup(max(tps), args.device, deadline_s=120) as group:
        for tp in tps:
            engine = Engine("tiny", tp=tp, group=group, prefix_cache=False)
            runs = [("autoregressive", 0), ("chain", 0), *(("ddtree", budget) for budget in BUDGETS)]
            for run in runs:
                measure(engine, prompts[:1], 16, *run)  # warm up
            rows += [measure(engine, prompts, args.new, *run) for run in runs]
            steps.append(one_step(engine, held_out(1, STEP_PREFIX)[0], 200))
    produced = [row.pop("produced") for row in rows]
    for row, own in zip(rows, produced, strict=True):
        row["prompts_as_autoregressive"] = sum(a[0] == b[0] for a, b in zip(own, produced[0], strict=True))
    size = len(rows) // len(tps)
    equal = all(own == produced[i % size if args.device == "cuda" else 0] for i, own in enumerate(produced))
    ratios = {f"ddtree / {other}": ratio(rows, other) for other in ("chain", "autoregressive")}
    if args.json:
        print(json.dumps({"rows": rows, "steps": steps, "all_equal": equal, "ratios": ratios}, indent=2))
        return
    for row in [*rows, *steps, ratios]:
        print(" | ".join(f"{key} {value}" for key, value in row.items() if value is not None))
    print(f"tokens and hidden states of all rows{'' if args.device == 'cpu' else ', over tp,'} equal: {equal}")


def ratio(rows: list[dict[str, Any]], other: str) -> float:
    """Tokens a second of ddtree at its best budget and tp, over another strategy's best."""
    best = {name: max(row["tokens_per_s"] for row in rows if row["strategy"] == name) for name in ("ddtree", other)}
    return round(best["ddtree"] / best[other], 2)


if __name__ == "__main__":
    sys.exit(ended(Path(__file__).name, main))
