"""``python -m megatronapp_trainer.training.check --world-size N -- ARGUMENTS``: can these arguments be trained?

Checks the flags, the tokenizer's files and the corpora without torch, so that a wrong command line is refused in a
fraction of a second before anything is started. Prints one JSON object, ``{"problems": [...]}``; a problem is
``{"code", "flags", "value", "message"}``: the exit code that a rank would end with, the flags that it is about (the
likeliest first), the value of the flag where there are several, and a sentence. The exit code is that of the first
problem, or 0. Resources of the node (GPUs, ports, memory) are checked by the ranks.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from megatronapp_common.names import ExitCode
from megatronapp_trainer.checkpoint import foreign
from megatronapp_trainer.checkpoint.directory import CheckpointDirectory
from megatronapp_trainer.config import TrainerConfig, parse
from megatronapp_trainer.config.checks import check_world
from megatronapp_trainer.data.corpus_check import CorpusFacts, inspect_corpus
from megatronapp_trainer.data.datasets import DatasetRequest, check_size, check_tokens, check_training_has_data
from megatronapp_trainer.data.request import dataset_request
from megatronapp_trainer.data.sft.answers import template_of
from megatronapp_trainer.data.sft.conversations import check_conversations
from megatronapp_trainer.data.streaming.sources import load_arguments
from megatronapp_trainer.data.vocabulary import Vocabulary, load_vocabulary
from megatronapp_trainer.errors import DataError, TrainerError, UsageError, UsageErrors
from megatronapp_trainer.parallel.layout import check_divides

_FLAG = re.compile(r"--[a-z][\w-]*")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArgumentProblem:
    """One reason why a run cannot begin."""

    code: int
    flags: tuple[str, ...]
    message: str
    value: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m megatronapp_trainer.training.check", description="Check arguments and data."
    )
    return print_problems(find_problems, parser, arguments)


def print_problems(
    find: Callable[[Sequence[str], int], list[ArgumentProblem]],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """Print what `find` returns for the arguments after ``--`` and the number of ranks; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the whole run")
    found = find(given[split + 1 :], parser.parse_args(given[:split]).world_size)
    print(json.dumps({"problems": [dataclasses.asdict(problem) for problem in found]}))
    return found[0].code if found else ExitCode.OK


def find_problems(arguments: Sequence[str], world_size: int) -> list[ArgumentProblem]:
    """Return why `world_size` ranks with these arguments could not train: the first problem of the flags, or all of the
    data.

    Raises nothing: unreadable files are problems, too.
    """
    if {"-h", "--help"} & set(arguments):
        return [
            ArgumentProblem(code=ExitCode.USAGE, flags=("--help", "-h"), message="--help trains nothing; leave it out")
        ]
    try:
        config = parse(arguments)
        data_size = _data_size(config, world_size)
        check_world(config, data_size)
        if (problem := _foreign_load(config)) is not None:
            return [problem]
        if config.data.mock_data or config.data.hf_dataset is not None:
            load_vocabulary(config.data)
            _check_streams(config)
            return []
        request = dataset_request(config, data_size)
        check_training_has_data(request)
    except UsageErrors as error:
        return [problem_of(UsageError(text), flags=()) for text in error.problems]
    except TrainerError as error:
        return [problem_of(error, flags=("--split",) if isinstance(error, DataError) else ())]
    return list(_data_problems(config, request))


def _data_size(config: TrainerConfig, world_size: int) -> int:
    """Return the replicas that these ranks train. Raises UsageError if the ranks are not whole replicas."""
    fbd = config.fbd_world(world_size)
    if fbd is not None:
        return fbd.trained.data
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    check_divides(world_size, tensor_size=tensor, pipeline_size=pipeline, context_size=context)
    return world_size // (tensor * context * pipeline)


def _foreign_load(config: TrainerConfig) -> ArgumentProblem | None:
    """Refuse another program's checkpoint where a rank would read one: first in --save, then in --load."""
    folders = {"--save": config.checkpoint.save, "--load": config.checkpoint.load}
    for flag, folder in folders.items():
        if folder is None:
            continue
        directory = CheckpointDirectory(pathlib.Path(folder))
        if directory.has_whole():
            return None
        if (reason := foreign.answer(directory.path)) is not None:
            return ArgumentProblem(code=ExitCode.DATA, flags=(flag,), message=reason)
        if directory.checkpoints():  # damaged ones, which a rank reports
            return None
    return None


def _check_streams(config: TrainerConfig) -> None:
    for flag, paths in {
        "--hf-dataset": config.data.hf_dataset,
        "--hf-valid-dataset": config.data.hf_valid_dataset,
    }.items():
        if paths is not None:
            load_arguments(flag, paths)


def _data_problems(config: TrainerConfig, request: DatasetRequest) -> Iterator[ArgumentProblem]:
    vocabulary = None
    try:
        vocabulary = load_vocabulary(config.data)
    except (TrainerError, OSError) as error:
        yield problem_of(
            error, flags=("--vocab-file",) if config.data.vocab_file is not None else ("--tokenizer-file",)
        )
    if request.conversations is not None:
        try:
            template_of(request.conversations.prompt_format, config.data)
        except (TrainerError, OSError) as error:
            yield problem_of(error, flags=("--sft-tokenizer-prompt-format",))
    for prefix in request.prefixes:
        try:
            if request.conversations is not None:
                check_conversations(prefix)
            else:
                _check_corpus(inspect_corpus(prefix), request, vocabulary)
        except (TrainerError, OSError) as error:
            yield problem_of(error, flags=(_flag_of(prefix, config),), value=prefix)


def _check_corpus(corpus: CorpusFacts, request: DatasetRequest, vocabulary: Vocabulary | None) -> None:
    if vocabulary is not None:
        check_tokens(corpus, vocabulary)
    check_size(request, corpus)


def _flag_of(prefix: str, config: TrainerConfig) -> str:
    """Return the flag that names this corpus."""
    data = config.data
    flags = {"--train-data-path": data.train_data_path, "--valid-data-path": data.valid_data_path}
    named = (flag for flag, values in flags.items() if prefix in (values or ()))
    return "--data-path" if data.data_path is not None else next(named, "--test-data-path")


def problem_of(error: TrainerError | OSError, *, flags: tuple[str, ...], value: str | None = None) -> ArgumentProblem:
    """Convert an error to a problem about `flags`, unless its text begins with one; empty: about those in its text."""
    if isinstance(error, OSError):
        return ArgumentProblem(
            code=ExitCode.DATA, flags=flags, value=value, message=f"{error.filename}: {error.strerror}"
        )
    message = str(error)
    mentioned = tuple(_FLAG.findall(message))
    return ArgumentProblem(
        code=error.exit_code,
        flags=mentioned if not flags or message.startswith("--") else flags,
        value=value,
        message=message,
    )


if __name__ == "__main__":
    sys.exit(main())
