"""Command line of a server: its flags, and those of the trainer, completed by the checkpoint's arguments."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatronapp_common.names import SERVE_PORT
from megatronapp_trainer.checkpoint import arguments as stored_arguments
from megatronapp_trainer.checkpoint.directory import BrokenCheckpointError, CheckpointDirectory, read_manifest
from megatronapp_trainer.checkpoint.foreign import answer
from megatronapp_trainer.config import TrainerConfig, build_parser, parse
from megatronapp_trainer.config.fields import StrictParser, add_section, option, read_section
from megatronapp_trainer.errors import CheckpointError, UsageError
from megatronapp_trainer.serve.perturbation.named_recipes import read_perturbations

LARGEST_PORT = 65535
_NO_TRAINING = ("--mock-data", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1")
"""Flags that the trainer's parser requires and a server never uses."""
_OF_TRAINING = ("use_dpp", "num_gpus", "multi_node", "node_ips", "context_parallel_size")
"""Names of flags in the parser that a server could only ignore."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of the server."""

    host: str = option("127.0.0.1", "address of the API")
    port: int = option(SERVE_PORT, "port of the API; 0: a free one")
    max_batch_size: int = option(8, "prompts that are generated together")
    max_tokens: int = option(1024, "most new tokens of a prompt")
    max_length: int | None = option(None, "most tokens of a prompt and what follows; default: the model's positions")
    queue_length: int = option(32, "prompts that may wait; the most texts of a request are these and --max-batch-size")
    prefill_chunk: int = option(512, "tokens of prompts that one forward pass reads")
    scope_plugins: tuple[str, ...] | None = option(None, "modules of your own that register places for MegaScope")
    scope_perturbations: str | None = option(None, "JSON list of recipes of perturbations that requests can name")
    precision: str | None = option(
        None, "weights and activations; default: as trained", choices=("fp32", "bf16", "fp16")
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeCommand:
    """A command line, read as far as possible without the checkpoint."""

    options: ServeOptions
    rest: tuple[str, ...]
    """Flags of the trainer, not parsed yet."""
    load: pathlib.Path


def build_serve_parser() -> StrictParser:
    """Return the parser of the server's flags."""
    parser = StrictParser(
        prog="python -m megatronapp_trainer.serve",
        description="Serve a checkpoint. Besides these flags those of megatronapp_trainer.pretrain are accepted; "
        "those that the checkpoint stores may be omitted.",
        allow_abbrev=False,
    )
    add_section(parser, ServeOptions)
    return parser


def read_command(arguments: Sequence[str]) -> ServeCommand:
    """Parse the server's flags of a command line.

    Raises UsageError that names the flag and what to write instead.
    """
    namespace, rest = build_serve_parser().parse_known_args(list(arguments))
    options = read_section(ServeOptions, namespace)
    _check(options)
    parser = build_parser()
    trainer = parser.parse_known_args(rest)[0]
    if trainer.load is None:
        raise UsageError("--load is missing; give the directory of a checkpoint")
    for name in _OF_TRAINING:
        if getattr(trainer, name) != parser.get_default(name):
            raise UsageError(f"--{name.replace('_', '-')} is for training, and a server would ignore it; leave it out")
    return ServeCommand(options=options, rest=tuple(rest), load=pathlib.Path(trainer.load))


def configure(command: ServeCommand) -> TrainerConfig:
    """Return the trainer's configuration for the newest whole checkpoint of `--load`.

    Raises:
        UsageError: flags that cannot work.
        CheckpointError: there is no whole checkpoint.
    """
    path, stored = newest_arguments(command.load)
    _check_family(stored_arguments.type_of(stored), f"{path} is a checkpoint of")
    if stored.get("--num-experts") is not None:
        raise UsageError(
            f"{path} is a model with --num-experts {stored['--num-experts']}, and such models generate no text yet; "
            "serve one without experts"
        )
    precision = _precision(command, stored)
    arguments = [
        *stored_arguments.model_flags(stored),
        *_NO_TRAINING,
        *([f"--{precision}"] if precision != "fp32" and f"--{precision}" not in command.rest else []),
        *_tokenizer_of(path, stored, command.rest),
        *command.rest,
    ]
    config = parse(arguments)
    _check_family(config.model.type, "this command has")
    return config


def _precision(command: ServeCommand, stored: Mapping[str, Any]) -> str:
    """Return the precision that the command gives in either spelling, or that of the training.

    Raises UsageError if the two spellings differ.
    """
    given = next((name for name in ("bf16", "fp16") if f"--{name}" in command.rest), None)
    chosen = command.options.precision
    if chosen and given and chosen != given:
        raise UsageError(f"--precision {chosen} and --{given} contradict each other; omit either")
    return chosen or given or stored_arguments.precision_of(stored)


def newest_arguments(directory: pathlib.Path) -> tuple[pathlib.Path, Mapping[str, Any]]:
    """Return the newest whole checkpoint of a directory, and the arguments it was made with. Raises CheckpointError."""
    flaws = []
    for path in CheckpointDirectory(directory).checkpoints():
        try:
            return path, read_manifest(path).arguments
        except BrokenCheckpointError as error:
            flaws.append(f"{path}: {error}")
    raise CheckpointError(
        answer(directory) or "; ".join(flaws) or f"--load {directory} holds no checkpoint; check the path"
    )


def _tokenizer_of(path: pathlib.Path, stored: Mapping[str, Any], rest: Sequence[str]) -> list[str]:
    """Return the flags of the tokenizer next to a checkpoint, unless the command line names one."""
    if {argument.partition("=")[0] for argument in rest} & {"--tokenizer-file", "--tokenizer-model", "--vocab-file"}:
        return []
    names = {flag: stored.get(flag) for flag in (stored_arguments.TOKENIZER_FILE, "--vocab-file", "--merge-file")}
    return [argument for flag, name in names.items() if name is not None for argument in (flag, str(path / str(name)))]


def _check_family(name: str, subject: str) -> None:
    """Raise UsageError unless models of this family generate."""
    if name != "gpt":
        raise UsageError(f"{subject} --model-type {name}, which generates no text; only gpt is served")


def _check(options: ServeOptions) -> None:
    if not 0 <= options.port <= LARGEST_PORT:
        raise UsageError(f"--port {options.port} is no port; write 1 to {LARGEST_PORT}, or 0 for a free one")
    for name in ("max_batch_size", "max_tokens", "prefill_chunk"):
        _at_least(name, getattr(options, name), 1)
    read_perturbations(options.scope_perturbations)
    _at_least("queue_length", options.queue_length, 0)
    if options.max_length is not None:
        _at_least("max_length", options.max_length, 2)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"--{name.replace('_', '-')} {value} is too small; write {least} or more")
