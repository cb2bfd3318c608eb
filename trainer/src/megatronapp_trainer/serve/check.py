"""``python -m megatronapp_trainer.serve.check --world-size N -- <arguments>``: can this checkpoint be served?

As `megatronapp_trainer.training.check` for training, with the same output: flags, checkpoint and tokenizer are
checked, without torch and before anything is started.
"""

import argparse
import sys
from collections.abc import Sequence

from megatronapp_trainer.data.vocabulary import load_vocabulary
from megatronapp_trainer.errors import TrainerError, UsageError
from megatronapp_trainer.serve.settings import configure, read_command
from megatronapp_trainer.training.check import ArgumentProblem, print_problems, problem_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_trainer.serve.check", description="Check arguments and checkpoint."
    )
    return print_problems(find_problems, parser, arguments)


def find_problems(arguments: Sequence[str], world_size: int) -> list[ArgumentProblem]:
    """Return the first reason why `world_size` ranks with these arguments could not serve. Raises nothing."""
    try:
        command = read_command(arguments)
        config = configure(command)
        parallel = config.parallel
        needed = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        if world_size != needed:
            raise UsageError(f"{world_size} ranks cannot serve one replica of {needed}; start {needed}")
        longest, positions = command.options.max_length, config.model.positions
        if longest is not None and config.model.position_embedding_type == "learned_absolute" and longest > positions:
            raise UsageError(f"--max-length {longest} is over the model's {positions} learned positions")
        load_vocabulary(config.data)
    except TrainerError as error:
        return [problem_of(error, flags=())]
    return []


if __name__ == "__main__":
    sys.exit(main())
