"""Entry point of `python -m megatronapp_operator.controller`."""

import os
import signal
import sys

if __name__ == "__main__":
    if os.getpid() == 1:
        # The first process of a container does not get what it has no handler for. The event loop has one later on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from megatronapp_operator.controller.main import main

    sys.exit(main())
