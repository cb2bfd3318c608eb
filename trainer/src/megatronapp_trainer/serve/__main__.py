"""Entry point of `python -m megatronapp_trainer.serve`."""

import sys

from megatronapp_trainer.serve.rank_main import main

if __name__ == "__main__":
    sys.exit(main())
