"""`python -m tpverify` is the `tpverify` command."""

import sys

from tpverify.cli import main

sys.exit(main())
