"""How a script of bench/ ends: what tpverify refuses is one line, with the exit codes of its commands."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tpverify.errors import ArgumentError, ClusterError, PoolFull, RankFailure


def end(main: Callable[[], int | None]) -> NoReturn:
    """Run main and exit with what it returns; 2 for a bad argument, 1 for a failed run."""
    try:
        sys.exit(main())
    except (ArgumentError, PoolFull, ClusterError, RankFailure) as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)
