"""Parsing of the command line to a configuration. Unknown flags are refused with the nearest name, never ignored."""

import argparse
import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

from megatronapp_common.migration.megatron_flags import ANSWERS, megatron_flags
from megatronapp_common.migration.names import FLAGS
from megatronapp_trainer.config.batch_size import with_steps
from megatronapp_trainer.config.checks import find_problems
from megatronapp_trainer.config.fields import StrictParser, add_section, read_section
from megatronapp_trainer.config.root import TrainerConfig
from megatronapp_trainer.config.rules.data_files import with_data_files
from megatronapp_trainer.errors import UsageError, UsageErrors

OTHER_SPELLINGS = {
    "--learning-rate": "--lr",
    "--min-learning-rate": "--min-lr",
    "--warmup-steps": "--lr-warmup-iters",
    "--warmup-iters": "--lr-warmup-iters",
    "--batch-size": "--micro-batch-size",
    "--train-batch-size": "--global-batch-size",
    "--epochs": "--train-iters",
    "--max-steps": "--train-iters",
    "--steps": "--train-iters",
    "--iterations": "--train-iters",
    "--tp": "--tensor-model-parallel-size",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
    "--pp": "--pipeline-model-parallel-size",
    "--pipeline-parallel-size": "--pipeline-model-parallel-size",
    "--num-heads": "--num-attention-heads",
    "--heads": "--num-attention-heads",
    "--hidden": "--hidden-size",
    "--hidden-dim": "--hidden-size",
    "--layers": "--num-layers",
    "--seq-len": "--seq-length",
    "--sequence-length": "--seq-length",
    "--max-seq-len": "--seq-length",
    "--tokenizer": "--tokenizer-file",
    "--data": "--data-path",
    "--max-grad-norm": "--clip-grad",
    "--checkpoint-dir": "--save",
    "--output-dir": "--save",
}
"""Names of our flags in other trainers: too far from ours to be found as the nearest spelling."""
_NEAR = 0.75
"""Minimum similarity, as a fraction of equal letters, at which a name is taken for a typing error."""
ALL_FLAGS = "python -m megatronapp_trainer.pretrain --help lists all"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    parser = StrictParser(
        prog="python -m megatronapp_trainer.pretrain",
        description="Train a GPT or BERT model. Flags have the names of Megatron-LM.",
        allow_abbrev=False,
    )
    for section in _sections().values():
        add_section(parser, section)
    return parser


def parse(arguments: Sequence[str]) -> TrainerConfig:
    """Parse and check a command line.

    Raises UsageErrors that names every wrong flag, and what to write instead.
    """
    parser = build_parser()
    namespace, problems = _read(parser, list(arguments))
    config = TrainerConfig(**{name: read_section(section, namespace) for name, section in _sections().items()})
    try:
        config = dataclasses.replace(config, data=with_data_files(config.data))
    except UsageError as error:
        problems.append(str(error))
    problems += find_problems(config, problems)
    if problems:
        raise UsageErrors(problems)
    return with_steps(config)


def _read(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the values of a command line, unreadable ones at their defaults, and why they cannot be read."""
    problems: list[str] = []
    parser.exit_on_error = False
    while True:
        try:
            namespace, unknown = parser.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            problems.append(str(error))
            rest = _without(arguments, set((error.argument_name or "").split("/")))
            if len(rest) == len(arguments):
                return parser.parse_args([]), problems
            arguments = rest
        else:
            return namespace, [*problems, *_refusals(unknown, _flags(parser))]


def _without(arguments: list[str], flags: set[str]) -> list[str]:
    """Return the command line without these flags and their values."""
    rest, dropping = [], False
    for argument in arguments:
        dropping = argument.partition("=")[0] in flags if _is_flag(argument) else dropping
        if not dropping:
            rest.append(argument)
    return rest


def _is_flag(argument: str) -> bool:
    return re.match(r"-+[A-Za-z]", argument) is not None


def _refusals(unknown: list[str], known: list[str]) -> Iterator[str]:
    """Yield a sentence for each unknown flag; the arguments after it are its values."""
    shown, has_values = set(), False
    for argument in unknown:
        if _is_flag(argument) or not has_values:
            text = _refusal(argument, known)
            if text not in shown:
                yield text
            shown.add(text)
        has_values = "=" not in argument if _is_flag(argument) else has_values


def _sections() -> dict[str, type[Any]]:
    return {field.name: cast("type[Any]", field.type) for field in dataclasses.fields(TrainerConfig)}


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]


def _refusal(argument: str, known: list[str]) -> str:
    """Return why this argument is refused."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r}: every value needs a flag before it"
    if flag in ANSWERS:
        return f"{flag}: {ANSWERS[flag]}"
    if flag in FLAGS and flag not in known:
        return f"{flag}: {FLAGS[flag]}"
    if flag in megatron_flags():
        return f"{flag} is a flag of Megatron-LM that this trainer does not support yet; leave it out"
    meant = _meant(flag.replace("_", "-"), known)
    hint = f"did you mean {meant}?" if meant is not None else ALL_FLAGS
    return f"unknown flag {flag}; {hint}"


def _meant(flag: str, known: list[str]) -> str | None:
    if flag in OTHER_SPELLINGS:
        return OTHER_SPELLINGS[flag]
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=_NEAR)
    return nearest[0] if nearest else None
