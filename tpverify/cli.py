"""The `tpverify` command. Every failure is one line; exit code 2 for a bad argument, 1 for a run that failed."""

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tpverify.config import DEVICES, MAX_NODES
from tpverify.ending import FAILED, OK, USAGE, ended, fail
from tpverify.errors import ArgumentError

NAME = "tpverify"
START_DEADLINE_S = 60.0

EXAMPLES = {
    "generate": """examples:
  tpverify generate --prompt 'def add(a, b):' --tp 2
  tpverify generate --compare                     three packaged prompts, greedy and sampled, with proof
  tpverify generate --prompt-file notes.py --strategy chain --temperature 0.8 --seed 7 --json""",
    "parity": """examples:
  tpverify parity --tp 8
  tpverify parity --tp 2 --cases 12 --seed 1 --json
  tpverify parity --tp 8 --device cuda --oversubscribe            on as many GPUs as there are
  ray job submit --working-dir . -- python -m tpverify.jobs.parity --tp 8      see cluster/README.md""",
    "bench": """examples:
  tpverify bench                                  all of bench/
  tpverify bench verify                           the verify kernel beside its peers, on a GPU
  tpverify bench step --json""",
    "doctor": """examples:
  tpverify doctor
  tpverify doctor --json""",
    "report": """examples:
  tpverify report kv                              a pool of slots before and after defrag, in numbers
  tpverify report kv --out kv.png                 and as a picture
  tpverify report kv --json""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code (argparse's --help exits by itself)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this: what is opened next would take its number
            setattr(sys, name, open(os.devnull, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is no reason to fail
    args = None

    def run() -> int:
        nonlocal args
        args = parser().parse_args(argv)
        return args.run(args)

    return ended(NAME, run, lambda error: _as_option(error, args))


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="tpverify", description="Tree-speculative verification for MLA models over tensor-parallel ranks."
    )
    commands = top.add_subparsers(metavar="command")
    top.set_defaults(run=_no_command)

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=EXAMPLES[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
        sub.set_defaults(run=run)
        return sub

    def ranks(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--tp", type=_integer(1, 1024), default=8, metavar="N", help="ranks (8)")
        sub.add_argument("--device", type=_one_of(DEVICES), default="auto", help="auto, cpu or cuda (auto)")
        sub.add_argument("--oversubscribe", action="store_true", help="let ranks share GPUs where these are too few")

    sub = command("generate", _generate, "continue a prompt, losslessly, with draft trees")
    source = sub.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="text to continue (packaged Python of ours)")
    source.add_argument("--prompt-file", metavar="FILE", help="file with the text to continue")
    sub.add_argument("--model", default="tiny", help="'tiny', the shipped model, or a checkpoint directory (tiny)")
    ranks(sub)
    sub.add_argument("--strategy", default="ddtree", help="ddtree, chain or autoregressive (ddtree)")
    sub.add_argument("--budget", type=_budget, default=32, metavar="B", help="drafted tokens of a tree, or auto (32)")
    sub.add_argument("--temperature", type=_number, default=0.0, metavar="T", help="0 for greedy (0)")
    sub.add_argument("--seed", type=_integer(0, 2**64 - 1), default=0, help="of the draws at a temperature (0)")
    sub.add_argument("--max-new-tokens", type=_integer(1, 2**31 - 1), default=64, metavar="N", help="at most (64)")
    sub.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    compare = "also decode in the other ways and on fewer ranks; print what each costs and whether all are equal"
    sub.add_argument("--compare", action="store_true", help=compare)

    sub = command("parity", _parity, "check attention on many ranks against one rank and against float64")
    ranks(sub)
    sub.add_argument("--cases", type=_integer(1, 100_000), default=24, metavar="N", help="random cases (24)")
    sub.add_argument("--seed", type=_integer(0, 2**64 - 1), default=0, help="of the cases (0)")

    sub = command("bench", _bench, "run the benchmarks of the source checkout")
    sub.add_argument("names", nargs="*", metavar="name", help="which of bench/bench_<name>.py (all)")

    command("doctor", _doctor, "say what this machine has of what the runtime needs, and why a part is missing")

    sub = command("report", _report, "show on a scripted example what the host's part does")
    sub.add_argument("what", type=_one_of(("kv",)), help="kv: the slots of a pool before and after defrag")
    sub.add_argument("--out", metavar="FILE", help="PNG file to draw them in")
    return top


def _no_command(args: argparse.Namespace) -> int:
    raise ArgumentError("command", f"one of {', '.join(EXAMPLES)}", "none: see tpverify --help")


def _generate(args: argparse.Namespace) -> int:
    from tpverify.report.generation import STRATEGIES, decode, score_runs
    from tpverify.report.screen import Screen
    from tpverify.report.tables import score_lines
    from tpverify.runtime.engine import Engine
    from tpverify.runtime.generation import GenerationOptions
    from tpverify.runtime.ranks import RankGroup
    from tpverify.runtime.setup import EngineSetup

    # All that can be wrong is checked before ranks are started.
    setup = EngineSetup(args.model, args.tp, device=args.device)
    cases = _cases(args)
    options = {name: getattr(args, name) for name in ("max_new_tokens", "budget", "seed", "stop")}
    for strategy in (args.strategy, *(STRATEGIES if args.compare else ())):
        for case in cases:
            wanted = GenerationOptions(strategy=strategy, temperature=case.temperature, **options)
            setup.prepare({"prompt": case.prompt}, wanted)

    screen = Screen(args.json)
    with screen.working(f"starting {args.tp} ranks"):
        group = RankGroup(args.tp, setup.device, START_DEADLINE_S, oversubscribe=args.oversubscribe)
    with group:
        if args.compare:
            return _compare(args, group, cases, options, screen)
        with Engine(args.model, args.tp, group=group) as engine:
            run = decode(engine, cases[0], args.strategy, options, screen)
            scores = score_runs(engine, [run], args.seed) if group.device == "cuda" else []
    if args.json:
        screen.json(
            _header(args)
            | _run_row(run)
            | {"device": group.device, "scores": _score_rows([run] * len(scores), scores)}
            | {"recoveries": engine.stats()["recoveries"]}
        )
    else:
        lengths = run.result.accept_lengths
        tau = f"tau {sum(lengths) / len(lengths):.2f}, " if lengths else ""
        count = len(run.result.tokens)
        screen.print(f"{count} tokens in {len(lengths)} steps, {tau}{count / run.seconds:.1f} tokens/s")
        screen.print(*score_lines([run] * len(scores), scores))
    return OK if all(score.ok for score in scores) else FAILED


def _compare(args: argparse.Namespace, group: Any, cases: list[Any], options: dict[str, Any], screen: Any) -> int:
    from tpverify.report.generation import STRATEGIES, Comparison, compare, costs, divisors, score_runs
    from tpverify.report.tables import cost_table, length_table, proof_lines
    from tpverify.runtime.engine import Engine

    ways = len(STRATEGIES) + len(divisors(args.tp)) - 1
    going = compare(group, args.model, args.tp, cases, options, screen)
    runs = [next(going) for _ in cases]
    with screen.progress("the other ways, and on fewer ranks", (ways - 1) * len(cases)):
        for run in going:
            runs.append(run)
            screen.advance()
    scored, scores = [run for run in runs if run.tp == args.tp], []
    if group.device == "cuda":
        with Engine(args.model, args.tp, group=group) as engine, screen.working("scoring the tokens again in float32"):
            scores = score_runs(engine, scored, args.seed)
    comparison = Comparison(args.tp, cases, runs, scores)
    if args.json:
        proofs = {"strategies": comparison.strategy_differences(), "tp": comparison.tp_differences()}
        screen.json(
            _header(args)
            | {"runs": [_run_row(run) for run in runs], "equal": comparison.equal, "differences": proofs}
            | {"device": group.device, "scores": _score_rows(scored[: len(scores)], scores)}
            | {"costs": {strategy: costs(comparison.of(strategy)) for strategy in STRATEGIES}}
        )
    else:
        screen.print(cost_table(comparison), length_table(comparison), *proof_lines(comparison))
    return OK if comparison.equal else FAILED


def _cases(args: argparse.Namespace) -> list[Any]:
    from tpverify.report.generation import Case
    from tpverify.report.prompts import PROMPTS, SAMPLED_AT

    if args.prompt is not None:
        return [Case("prompt", args.prompt, args.temperature)]
    if args.prompt_file is not None:
        try:
            text = Path(args.prompt_file).read_bytes().decode()  # as it is: text mode would rewrite its line ends
            return [Case(args.prompt_file, text, args.temperature)]
        except (OSError, ValueError) as error:
            raise ArgumentError("prompt_file", "a readable text file", error) from error
    cases = [Case(name, text, args.temperature) for name, text in PROMPTS.items()]
    return [*cases, replace(cases[0], temperature=SAMPLED_AT)] if args.compare else cases[:1]


def _header(args: argparse.Namespace) -> dict[str, Any]:
    from tpverify import __version__

    names = ("model", "tp", "budget", "seed", "max_new_tokens")
    return {"version": __version__} | {name: getattr(args, name) for name in names}


def _run_row(run: Any) -> dict[str, Any]:
    return {
        "case": run.case.name,
        "temperature": run.case.temperature,
        "strategy": run.strategy,
        "tp": run.tp,
        "seconds": run.seconds,
        "prompt": run.case.prompt,
        **vars(run.result),
    }


def _score_rows(runs: Sequence[Any], scores: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"case": run.case.name, "strategy": run.strategy, "ok": score.ok, **vars(score)}
        for run, score in zip(runs, scores, strict=True)
    ]


def _parity(args: argparse.Namespace) -> int:
    from tpverify import __version__
    from tpverify.report import parity
    from tpverify.report.screen import Screen
    from tpverify.report.tables import parity_table
    from tpverify.runtime.ranks import RankGroup

    device = parity.device_for(args.device, args.tp)
    screen = Screen(args.json)
    with screen.working(f"starting {args.tp} ranks"):
        group = RankGroup(args.tp, device, START_DEADLINE_S, oversubscribe=args.oversubscribe)
    cases = parity.draw_cases(args.cases, args.tp, args.seed, parity.DTYPES[group.device])
    outcomes = []
    with group, screen.progress("parity", len(cases)):
        for outcome in parity.check(group, args.tp, cases):
            outcomes.append(outcome)
            screen.advance()
    missed = [outcome for outcome in outcomes if not outcome.ok]
    if args.json:
        rows = [outcome.row() for outcome in outcomes]
        header = {"version": __version__, "tp": args.tp, "device": group.device, "seed": args.seed}
        header["collectives"] = group.collectives
        screen.json(header | {"cases": rows, "missed": len(missed), "ok": not missed})
    else:
        screen.print(parity_table(outcomes, args.tp))
        equal = sum(outcome.same_out and outcome.same_lse for outcome in outcomes)
        screen.print(
            f"{len(cases) - len(missed)} of {len(cases)} ok; bits equal to one rank's in {equal} (seed {args.seed})",
            f"ranks on {group.device}, results gathered by {group.collectives['backend']}",
        )
    return FAILED if missed else OK


def _bench(args: argparse.Namespace) -> int:
    import tpverify

    folder = Path(tpverify.__file__).parents[1] / "bench"
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}
    if not scripts:
        return fail(NAME, FAILED, f"bench: the benchmarks come with a source checkout, and {folder} has none")
    results: dict[str, Any] = {}
    for name in args.names or scripts:
        if name not in scripts:
            raise ArgumentError("name", f"one of {', '.join(scripts)}", repr(name))
    for name in args.names or scripts:
        print(f"bench/{scripts[name].name}", file=sys.stderr if args.json else sys.stdout, flush=True)
        command = [sys.executable, str(scripts[name]), *(["--json"] if args.json else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE if args.json else None, text=True)
        if done.returncode:
            return fail(NAME, FAILED, f"bench: {scripts[name].name} ended with exit code {done.returncode}")
        if args.json:
            results[name] = json.loads(done.stdout)
    if args.json:
        print(json.dumps(results))
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from tpverify import doctor
    from tpverify.report.screen import Screen

    findings = doctor.inspect()
    runs = doctor.can_run(findings)
    screen = Screen(args.json)
    if args.json:
        screen.json({"can_run": runs, "findings": [vars(finding) for finding in findings]})
    else:
        screen.print(doctor.table(findings))
        screen.print("The runtime can run." if runs else "The runtime cannot run: something required is missing.")
    return OK if runs else FAILED


def _report(args: argparse.Namespace) -> int:
    from tpverify.report import kv
    from tpverify.report.screen import Screen

    kv.show(args.out, Screen(args.json))
    return OK


REWORDED = (  # argparse's messages, in the form of all others
    ("^argument ", ""),
    (r"^unrecognized arguments: (.*)", r"arguments: expected those in --help, got \1"),
    (r"^(.*): invalid choice: ('.*') \(choose from (.*)\)", r"\1: expected one of \3, got \2"),
    (r"^(.*): not allowed with argument (.*)", r"\1: expected no other source of text, got \2 as well"),
    ("^the following arguments are required: (.*)", r"\1: expected a value, got none"),
    ("expected one argument$", "expected a value, got none"),
)


class Parser(argparse.ArgumentParser):
    """Errors of one line, raised like all others; no abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file, flush=True)  # argparse's own hides that it cannot be written

    def error(self, message: str) -> NoReturn:
        for said, meant in REWORDED:
            message = re.sub(said, meant, message)
        self.exit(USAGE, f"{NAME}: {message}\n")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected an int from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def _budget(text: str) -> int | str:
    return text if text == "auto" else _integer(0, MAX_NODES - 1)(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _one_of(values: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(values)}, got {text!r}")
        return text

    return parse


def _as_option(error: ArgumentError, args: argparse.Namespace | None) -> str:
    """The error's line, with the option's name where the library said the parameter's."""
    if args is None or not hasattr(args, error.argument):
        return str(error)
    return "--" + error.argument.replace("_", "-") + str(error).removeprefix(error.argument)
