"""Entry point of `python -m megatronapp_operator.controller`."""

import sys

from megatronapp_operator.controller.main import main

if __name__ == "__main__":
    sys.exit(main())
