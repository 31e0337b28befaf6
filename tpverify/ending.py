"""How a command ends, and a script of bench/: an exit code, and one line for what went wrong."""

import os
import sys
from collections.abc import Callable

from tpverify.errors import ArgumentError, ClusterError, PoolFull, RankFailure

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def ended(name: str, run: Callable[[], int | None], said: Callable[[ArgumentError], str] = str) -> int:
    """The exit code of `run`, after what it has written. name: of the command, which its line begins with. said: the
    line for a bad argument."""
    try:
        code = run() or OK
        sys.stdout.flush()
        return code
    except ArgumentError as error:
        return fail(name, USAGE, said(error))
    except (ClusterError, PoolFull, RankFailure) as error:
        return fail(name, FAILED, str(error))
    except KeyboardInterrupt:
        return fail(name, INTERRUPTED, "interrupted")
    except OSError as error:
        _drop_unwritable()
        reader_left = isinstance(error, BrokenPipeError)
        return FAILED if reader_left else fail(name, FAILED, str(error))


def fail(name: str, code: int, line: str) -> int:
    print(f"{name}:", " ".join(line.split()), file=sys.stderr)
    return code


def _drop_unwritable() -> None:
    """Output that is still to be written but cannot be: Python would try once more when it ends, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
