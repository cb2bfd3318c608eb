"""Entry point of `python -m megatronapp_trainer.serve`."""

from megatronapp_trainer.serve.rank_main import main
from megatronapp_trainer.utils.process_exit import exit_with

if __name__ == "__main__":
    exit_with(main)
