"""Entry point of `python -m megatronapp_analyzer.agent`."""

import signal
import sys

if __name__ == "__main__":
    # Held until there are handlers: the first process of a container does not get what it has no handler for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from megatronapp_analyzer.agent.main import main

    sys.exit(main())
