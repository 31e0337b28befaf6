"""Results as tables and proof lines."""

from collections.abc import Sequence

from rich.table import Table

from tpverify.report.generation import PLAIN, STAGES, STRATEGIES, Comparison, Run, costs
from tpverify.report.parity import Outcome
from tpverify.report.rescore import Score


def cost_table(comparison: Comparison) -> Table:
    """A row a strategy, over all cases. calls: verify steps."""
    title = f"{len(comparison.cases)} prompts on {comparison.tp} ranks; stages in ms a token"
    table = Table(title=title, title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for heading in ("tokens", "steps", "tau", "calls/token", "tokens/s", *STAGES):
        table.add_column(heading, justify="right")
    for strategy in STRATEGIES:
        cost = costs(comparison.of(strategy))
        table.add_row(
            strategy,
            str(cost["tokens"]),
            str(cost["steps"]),
            f"{cost['tau']:.2f}",
            f"{cost['verify_calls_per_token']:.3f}",
            f"{cost['tokens_per_second']:.1f}",
            *(f"{value:.2f}" for value in cost["stage_ms_per_token"].values()),
        )
    return table


def length_table(comparison: Comparison) -> Table:
    """How many steps committed 1, 2, ... tokens."""
    counts = {strategy: costs(comparison.of(strategy))["accept_lengths"] for strategy in STRATEGIES}
    table = Table(title="steps by accept length (the root counts)", title_justify="left")
    table.add_column("strategy")
    lengths = sorted({length for steps in counts.values() for length in steps})
    for length in lengths:
        table.add_column(str(length), justify="right")
    for strategy, steps in counts.items():
        table.add_row(strategy, *(str(steps.get(length, "")) for length in lengths))
    return table


def proof_lines(comparison: Comparison) -> list[str]:
    if comparison.scores:
        lines = score_lines([run for run in comparison.runs if run.tp == comparison.tp], comparison.scores)
        return [*lines, _tp_proof(comparison)]
    runs = comparison.of(PLAIN)
    tokens = sum(len(run.result.tokens) for run in runs)
    digests = " ".join(run.result.stats["hidden_digest"] for run in runs)
    return [
        _proof(
            "equal to autoregressive", comparison.strategy_differences(), f" ({tokens} tokens, hidden states {digests})"
        ),
        _tp_proof(comparison),
    ]


def score_lines(runs: Sequence[Run], scores: Sequence[Score]) -> list[str]:
    """A line for greedy runs and one for sampled ones, whose gaps are of another kind."""
    lines = []
    for kind, sampled, unit in (("greedy", False, ""), ("sampled", True, " of probability")):
        some = [score for run, score in zip(runs, scores, strict=True) if (run.case.temperature > 0) == sampled]
        if some:
            worst = max(some, key=lambda score: score.gap / max(score.allowed, 1e-30))
            lines.append(
                f"{kind} tokens scored again in float32: {'yes' if all(score.ok for score in some) else 'no'} "
                f"({sum(score.exact for score in some)} of {sum(score.tokens for score in some)} are its own choice; "
                f"largest gap {worst.gap:.2g}{unit}, {worst.allowed:.2g} allowed for logits off by {worst.error:.2g})"
            )
    return lines


def _tp_proof(comparison: Comparison) -> str:
    sizes = ", ".join(map(str, comparison.sizes))
    return _proof(f"equal across tp {sizes}", comparison.tp_differences(), "")


def _proof(claim: str, differences: Sequence[str], evidence: str) -> str:
    return f"{claim}: no ({'; '.join(differences)})" if differences else f"{claim}: yes{evidence}"


def parity_table(outcomes: Sequence[Outcome], tp: int) -> Table:
    table = Table(title=f"{tp} ranks against 1 rank and against float64", title_justify="left")
    for heading in ("prefix", "nodes", "heads", "dtype", "batch"):
        table.add_column(heading, justify="right")
    for heading in ("out error", "allowed", "lse error", "allowed", "out bits", "lse bits", ""):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        case = outcome.case
        numbers = (outcome.out_error, outcome.out_tolerance, outcome.lse_error, outcome.lse_tolerance)
        table.add_row(
            *map(str, (case.prefix, case.n, case.heads, case.dtype, case.batch)),
            *(f"{number:.1e}" for number in numbers),
            *("equal" if same else "DIFFER" for same in (outcome.same_out, outcome.same_lse)),
            "ok" if outcome.ok else "MISS",
            style=None if outcome.ok else "red",
        )
    return table
