"""``python -m megatronapp_trainer.launch -- <Megatron arguments>``."""

import sys

from megatronapp_trainer.launch.main import main

if __name__ == "__main__":
    sys.exit(main())
