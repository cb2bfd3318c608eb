"""Entry point of `python -m megatronapp_trainer.serve`."""

import sys

from megatronapp_trainer.serve.program import main

if __name__ == "__main__":
    sys.exit(main())
