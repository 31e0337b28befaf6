"""Results as tables and proof lines."""

from collections.abc import Sequence

from rich.table import Table

from tpverify.report.generation import PLAIN, STAGES, STRATEGIES, Comparison, costs
from tpverify.report.parity import Outcome


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
    runs = comparison.of(PLAIN)
    tokens = sum(len(run.result.tokens) for run in runs)
    digests = " ".join(run.result.stats["hidden_digest"] for run in runs)
    sizes = ", ".join(map(str, comparison.sizes))
    return [
        _proof(
            "equal to autoregressive", comparison.strategy_differences(), f" ({tokens} tokens, hidden states {digests})"
        ),
        _proof(f"equal across tp {sizes}", comparison.tp_differences(), ""),
    ]


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
