"""``python -m megatronapp_trainer.serve.check --world-size N -- <arguments>``: can this checkpoint be served?

As `megatronapp_trainer.training.check` for training, with the same output: flags, checkpoint and tokenizer are
checked, without torch and before anything is started.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megatronapp_common.names import ExitCode
from megatronapp_trainer.data.vocabulary import load_vocabulary
from megatronapp_trainer.errors import TrainerError, UsageError
from megatronapp_trainer.serve.settings import configure, read_command
from megatronapp_trainer.training.check import ArgumentProblem, problem_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_trainer.serve.check", description="Check arguments and checkpoint."
    )
    parser.add_argument("--world-size", type=int, required=True, help="ranks that will serve")
    found = find_problems(given[split + 1 :], parser.parse_args(given[:split]).world_size)
    print(json.dumps({"problems": [dataclasses.asdict(problem) for problem in found]}))
    return found[0].code if found else ExitCode.OK


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
