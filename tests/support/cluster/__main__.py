"""`PYTHONPATH=tests/support python -m cluster up|down`: keep the cluster of tests/e2e up, to look around in it."""

import sys

from cluster.runtime import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
