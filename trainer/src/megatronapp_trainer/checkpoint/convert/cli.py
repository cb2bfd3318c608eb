"""The command `megatronapp checkpoint ...`: its parser imports little, the work is imported when it runs."""

import argparse
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatronapp_trainer.checkpoint.convert.spellings import (
    COMMAND,
    SPELLINGS,
    LegacyOption,
    translate,
    translate_option,
)
from megatronapp_trainer.errors import TrainerError, UsageError

if TYPE_CHECKING:
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions, ConversionSummary

_DESCRIPTION = """\
Convert weights between a Hugging Face folder (GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen2.5, Qwen2-MoE, Qwen3;
config.json and *.safetensors) and checkpoints of this trainer, in the direction that --load-dir says; or from
checkpoints of Megatron-LM (torch_dist, or mp_rank_XX) to those of this trainer. Nothing is downloaded, numbers keep
their bits unless --dtype is given, and the tokenizer's files are copied along. The options of Megatron's
tools/checkpoint/convert.py are accepted.
"""
_EPILOG = """\
examples:
  megatronapp checkpoint convert --load-dir Qwen2.5-0.5B --save-dir checkpoints/qwen
  megatronapp checkpoint convert --load-dir checkpoints/qwen --save-dir Qwen2.5-0.5B-tuned --dtype bf16
"""
_WRONG_COMMAND_LINE = 2
_INTERRUPTED = 130
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"(\d+) ?([KMG]B|)")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `checkpoint` and its subcommands."""
    checkpoint = subparsers.add_parser("checkpoint", help="convert weights", description="Work with checkpoints.")
    commands = checkpoint.add_subparsers(dest="checkpoint_command", metavar="COMMAND", required=True)
    convert = commands.add_parser(
        "convert",
        help="from Hugging Face and back, and from Megatron-LM",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(convert)
    for spelling in SPELLINGS:
        convert.add_argument(
            spelling.flag,
            dest="spelled",
            action=_LegacyOptionAction,
            spelling=spelling,
            nargs=0 if spelling.takes is None else None,
            help=argparse.SUPPRESS,
        )
    convert.set_defaults(func=run_convert, spelled=())


class _LegacyOptionAction(argparse.Action):
    """Collects options of Megatron's tools in their order."""

    def __init__(self, *args: Any, spelling: LegacyOption, **keywords: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*args, **keywords)
        self._spelling = spelling

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _flag: str | None = None) -> None:  # noqa: ANN401
        value = values if isinstance(values, str) else None
        namespace.spelled = (*namespace.spelled, (self._spelling, value))


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--load-dir", metavar="DIR", help="folder of Hugging Face, this trainer or Megatron-LM (required)")
    add("--save-dir", metavar="DIR", help="new folder to write (required)")
    add(
        "--from",
        dest="source",
        choices=("hf", "megatronapp", "megatron"),
        help="refuse a --load-dir with other content",
    )
    add("--to", choices=("hf", "megatronapp"), help="default: the other one")
    add(
        "--family",
        choices=("gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe"),
        help="default: by config.json or the checkpoint",
    )
    add("--dtype", choices=("fp32", "fp16", "bf16"), help="type of the numbers; default: unchanged")
    add("--tokenizer-model", metavar="PATH", help="tokenizer to copy instead of the source's")
    add("--iteration", type=_whole, metavar="N", help="which checkpoint; default: the newest whole one")
    add(
        "--max-shard-size",
        type=_bytes,
        default=_bytes("5GB"),
        metavar="SIZE",
        help="limit of a Hugging Face file (default: 5GB)",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=_positive,
        default=128,
        metavar="N",
        help="padding of ours (default: 128)",
    )
    add("--true-vocab-size", type=_positive, metavar="N", help="tokens without padding, of a Megatron-LM checkpoint")
    add("--target-tensor-parallel-size", type=_positive, default=1, metavar="N", help="TP to check for; any TP loads")
    add("--target-pipeline-parallel-size", type=_positive, default=1, metavar="N", help="PP to check for; any PP loads")
    add("--position-embedding-type", metavar="TYPE", help="refuse a model that has other positions")
    add("--overwrite", action="store_true", help="replace what an earlier conversion has written to --save-dir")


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 5GB, 500MB or a number of bytes")
    return int(match[1]) * _UNITS[match[2]]


def run_convert(args: argparse.Namespace) -> int:
    """Convert, print a report, and return the exit code: 0, 2 (options), 65 (source), 67 (storage), 130 (Ctrl-C)."""
    try:
        options = options_from(args)
        from megatronapp_trainer.checkpoint.convert.job import convert

        print(report(convert(options, _note), options))
    except TrainerError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return _WRONG_COMMAND_LINE if isinstance(error, UsageError) else int(error.exit_code)
    except KeyboardInterrupt:
        print("stopped; --save-dir is unchanged", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def options_from(args: argparse.Namespace) -> "ConversionOptions":
    """Return checked options.

    Raises UsageError, with the command to use where a spelling has no meaning here.
    """
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions

    args = _own(args)
    if args.load_dir is None or args.save_dir is None:
        raise UsageError(f"both folders are needed: {COMMAND} --load-dir FROM --save-dir TO")
    load, save = pathlib.Path(args.load_dir), pathlib.Path(args.save_dir)
    if load.resolve() == save.resolve():
        raise UsageError("--save-dir must be another folder than --load-dir")
    return ConversionOptions(
        load_dir=load,
        save_dir=save,
        source=args.source,
        to=args.to,
        family=args.family,
        dtype=args.dtype,
        tokenizer=None if args.tokenizer_model is None else pathlib.Path(args.tokenizer_model),
        shard_bytes=args.max_shard_size,
        divisible_by=args.make_vocab_size_divisible_by,
        iteration=args.iteration,
        tensor_size=args.target_tensor_parallel_size,
        pipeline_size=args.target_pipeline_parallel_size,
        positions=args.position_embedding_type,
        true_vocab_size=args.true_vocab_size,
        overwrite=args.overwrite,
    )


class _RejectLegacyValue(argparse.ArgumentParser):
    """Raises UsageError for a value of another spelling."""

    def error(self, message: str) -> Any:  # noqa: ANN401 - never returns
        raise UsageError(message)


def _own(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with those of other spellings translated."""
    parser = _RejectLegacyValue(prog=COMMAND, allow_abbrev=False)
    _add_options(parser)
    try:
        translated = translate(args.spelled, _note)
    except UsageError as error:
        raise UsageError(f"{error}\nwrite: {_command(args)}") from None
    return parser.parse_args(translated, argparse.Namespace(**vars(args)))


def _command(args: argparse.Namespace) -> str:
    """Return the command line without options that have no meaning."""
    translated: list[str] = []
    for spelling, value in args.spelled:
        try:
            translated += translate_option(spelling, value)
        except UsageError:
            continue
    places = {"--load-dir": args.load_dir, "--save-dir": args.save_dir}
    named = [part for flag, value in places.items() if flag not in translated for part in (flag, value or "DIR")]
    return shlex.join([*COMMAND.split(), *named, *_given(args), *translated])


def _given(args: argparse.Namespace) -> Sequence[str]:
    """Return the remaining options that are not at their default."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_options(parser)
    given: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default or action.dest in ("load_dir", "save_dir"):
            continue
        given += [action.option_strings[0]] if value is True else [action.option_strings[0], str(value)]
    return given


def report(summary: "ConversionSummary", options: "ConversionOptions") -> str:
    """Describe the result, and the flags that use it. Models with experts are not served."""
    from megatronapp_trainer.checkpoint.convert.options import HF

    size = f"{summary.parameters / 1e9:.2f} billion" if summary.parameters >= 10**7 else f"{summary.parameters:,}"
    lines = [f"{summary.path} written: {summary.family}, {size} parameters in {summary.dtype}"]
    if summary.written == HF:
        return lines[0]
    layout = _layout(options)
    if "--num-experts" not in summary.flags:
        lines.append(shlex.join(["serve", "with:", "megatronapp", "serve", "--load", str(summary.path), *layout]))
    elif options.tensor_size > 1:
        layout.append("--sequence-parallel")
    lines.append("train on with: " + shlex.join(["--load", str(summary.path), "--finetune", *layout]))
    lines.append("and its model: " + shlex.join([*summary.flags, *summary.tokenizer]))
    return "\n".join(lines)


def _layout(options: "ConversionOptions") -> list[str]:
    sizes = {
        "--tensor-model-parallel-size": options.tensor_size,
        "--pipeline-model-parallel-size": options.pipeline_size,
    }
    return [part for flag, size in sizes.items() if size > 1 for part in (flag, str(size))]
