"""Entry point of `python -m megatronapp_operator.gateway`."""

import os
import signal
import sys

if __name__ == "__main__":
    if os.getpid() == 1:
        # The first process of a container does not get what it has no handler for. The servers have theirs later on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from megatronapp_operator.gateway.main import main

    sys.exit(main())
