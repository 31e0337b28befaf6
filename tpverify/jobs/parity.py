"""`tpverify parity` as a job, from a source checkout that the cluster need not have installed:

ray job submit --working-dir . -- python -m tpverify.jobs.parity --tp 8
"""

import sys

from tpverify.cli import main

if __name__ == "__main__":
    sys.exit(main(["parity", *sys.argv[1:]]))
