"""What a person sees: streamed text and tables on stdout, progress on stderr. As JSON, one object on stdout alone."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:  # the doctor prints where torch or Ray may be missing
    from tpverify.report.generation import Case

PLAIN_WIDTH = 140  # columns where the output is a file or a job's log


def new_console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


class Screen:
    """Also a Listener of comparisons."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out, self.err = new_console(), new_console(stderr=True)
        self._progress: Progress | None = None

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """While something without steps goes on."""
        with self.err.status(what):
            yield

    @contextmanager
    def progress(self, what: str, steps: int) -> Iterator[None]:
        """A bar that `advance` moves; gone when it is full."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.err, transient=True, disable=not self.err.is_terminal) as self._progress:
            self._progress.add_task(what, total=steps)
            yield
        self._progress = None

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])

    def json(self, value: dict[str, Any]) -> None:
        print(json.dumps(_finite(value), allow_nan=False))

    def print(self, *values: Any) -> None:
        """Tables and lines, one below another; a line is never folded."""
        if not self.as_json:
            for value in values:
                self.out.print(value, soft_wrap=isinstance(value, str), markup=False)

    def begin(self, case: "Case") -> None:
        if not self.as_json:
            how = f"temperature {case.temperature:g}" if case.temperature else "greedy"
            self.out.rule(f"{case.name}, {how}", align="left")
            self._write(case.prompt, "dim")

    def text(self, text: str) -> None:
        if not self.as_json:
            self._write(text, "bold")

    def _write(self, text: str, style: str) -> None:
        # A model may say anything, terminal escapes too.
        text = text.replace("\r\n", "\n")
        text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        self.out.print(Text(text, style), end="", soft_wrap=True)
        self.out.file.flush()


def _finite(value: Any) -> Any:
    """JSON has no NaN: null stands for what is not a finite number."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
