"""The command `megatronapp data ...`: its parser imports little, the work is imported when it runs."""

import argparse
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions, PrepareSummary

_DESCRIPTION = """\
Turn text into the token files that training reads: PREFIX_text_document.bin and .idx (Megatron's format).

Input is JSONL (.jsonl, .ndjson, .json: one object per line) or plain text (anything else: one document per file; a file
above 4 MiB is split at line ends into several). To resume a stopped run, give the same command again.
"""
_EPILOG = """\
examples:
  megatronapp data prepare --input corpus.jsonl --output data/corpus --append-eod --tokenizer-file tokenizer.json
  megatronapp data prepare --input src/ --pattern '*.py' --output data/code --train-tokenizer --vocab-size 8192
"""
_WRONG_COMMAND_LINE = 2
_INTERRUPTED = 130


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `data` and its subcommands."""
    data = subparsers.add_parser("data", help="prepare training data", description="Prepare training data.")
    commands = data.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="text to Megatron's .bin/.idx",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_files(prepare)
    _add_tokenizer(prepare)
    _add_spellings(prepare)
    prepare.set_defaults(func=run_prepare)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE|DIR|GLOB", help="text to read; directories recursively")
    add("--output", "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_text_document.bin and .idx")
    add(
        "--pattern", action="append", metavar="GLOB", help="files to take from directories, such as '*.py' (repeatable)"
    )
    add("--format", choices=("auto", "jsonl", "text"), default="auto", help="default: by the file's suffix")
    add(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys that hold text (default: text)",
    )
    add("--skip-bad-lines", action="store_true", help="skip lines that cannot be read, and count them")
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add(
        "--workers",
        type=_positive,
        default=None,
        metavar="N",
        help="tokenising processes (default: all cores, at most 8)",
    )
    add("--overwrite", action="store_true", help="replace output that was made from other input or options")


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokenizer (one of)").add_argument
    text = "a tokenizer.json, or its folder"
    add("--tokenizer-file", "--tokenizer-model", type=_tokenizer_file, metavar="FILE", help=text)
    add("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, with --merge-file")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt, with --vocab-file")
    add("--train-tokenizer", action="store_true", help="learn a byte-level BPE; saved as tokenizer.json next to PREFIX")
    add("--vocab-size", type=_positive, metavar="N", help="size of the learned vocabulary")


_BERT = "BERT cannot be trained here yet; prepare a corpus for GPT with the tokenizer of its model"
_NO_TYPE = "only tokenizers of tokenizer.json, and GPT-2's of vocab.json and merges.txt, are read"
_TYPES: Mapping[str, str | None] = {
    "GPT2BPETokenizer": None,
    "HuggingFaceTokenizer": None,
    "BertWordPieceLowerCase": _BERT,
    "BertWordPieceCase": _BERT,
}
"""Values of --tokenizer-type, with the reason of a refusal; None: accepted, because the files say the same."""


def _add_spellings(parser: argparse.ArgumentParser) -> None:
    """Add options of Megatron-LM's tools/preprocess_data.py beyond those that have the same name here."""
    add = parser.add_argument
    add("--tokenizer-type", action=_TokenizerType, help=argparse.SUPPRESS)
    notes = {
        "--partitions": "workers share all files, and one run writes one corpus: --workers alone says how many",
        "--log-interval": "progress is always shown",
    }
    for flag, text in notes.items():
        add(flag, action=_IgnoredOption, text=text, help=argparse.SUPPRESS)
    add(
        "--keep-sequential-samples",
        action=_IgnoredOption,
        nargs=0,
        text="documents keep their order",
        help=argparse.SUPPRESS,
    )
    for flag, nargs in (("--split-sentences", 0), ("--keep-newlines", 0), ("--lang", None)):
        add(flag, action=_RejectedOption, nargs=nargs, text=_BERT, help=argparse.SUPPRESS)


class _IgnoredOption(argparse.Action):
    """Accepts an option that is not needed here, and prints why."""

    def __init__(self, *arguments: Any, text: str, **keywords: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*arguments, **keywords)
        self.text = text

    def __call__(self, _parser: Any, _namespace: Any, _values: Any, option: str | None = None) -> None:  # noqa: ANN401
        """Print why the option is not needed."""
        print(f"note: {option}: {self.text}", file=sys.stderr)


class _RejectedOption(_IgnoredOption):
    """Refuses an option with the reason."""

    def __call__(self, parser: Any, _namespace: Any, _values: Any, option: str | None = None) -> None:  # noqa: ANN401
        """End the command with the reason."""
        parser.error(f"{option}: {self.text}")


class _TokenizerType(argparse.Action):
    """Accepts the types that can be recognised by their files."""

    def __call__(self, parser: Any, _namespace: Any, values: Any, option: str | None = None) -> None:  # noqa: ANN401
        """End the command if the type is another one."""
        reason = _TYPES.get(values, f"{_NO_TYPE}; give --tokenizer-file, or --vocab-file and --merge-file")
        if reason is not None:
            parser.error(f"{option} {values}: {reason}")


def _tokenizer_file(given: str) -> str:
    """Return the file of a tokenizer, which may be given by its folder, too."""
    return str(pathlib.Path(given) / "tokenizer.json") if os.path.isdir(given) else given


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare, print a report, and return the exit code: 0, 2 (flags), 65 (data), 67 (storage) or 130 (Ctrl-C)."""
    from megatronapp_trainer.data.prepare.prepare import prepare
    from megatronapp_trainer.errors import TrainerError, UsageError

    try:
        summary = prepare(options_from(args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_COMMAND_LINE
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        has_working_files = os.path.exists(f"{args.output}.preparing")
        print(f"stopped; the same command {'resumes here' if has_working_files else 'starts again'}", file=sys.stderr)
        return _INTERRUPTED
    print(report(summary, args))
    return 0


def options_from(args: argparse.Namespace) -> "PrepareOptions":
    """Return checked options.

    Raises:
        UsageError: the flags do not go together.
    """
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions
    from megatronapp_trainer.data.prepare.sources import DEFAULT_PATTERNS, DocumentFormat

    _check_tokenizer_flags(args)
    return PrepareOptions(
        inputs=tuple(args.input),
        output=args.output,
        json_keys=tuple(dict.fromkeys(args.json_keys)),
        patterns=tuple(args.pattern or DEFAULT_PATTERNS),
        format=None if args.format == "auto" else DocumentFormat(args.format),
        workers=args.workers or min(os.cpu_count() or 1, 8),
        append_eod=args.append_eod,
        skip_bad_lines=args.skip_bad_lines,
        overwrite=args.overwrite,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_file=args.tokenizer_file,
        train_vocab_size=args.vocab_size if args.train_tokenizer else None,
    )


def _check_tokenizer_flags(args: argparse.Namespace) -> None:
    from megatronapp_trainer.errors import UsageError

    gpt2 = args.vocab_file is not None or args.merge_file is not None
    if sum((gpt2, args.tokenizer_file is not None, args.train_tokenizer)) != 1:
        raise UsageError(
            "choose one tokenizer: --tokenizer-file FILE, or --vocab-file FILE --merge-file FILE, "
            "or --train-tokenizer --vocab-size N"
        )
    if gpt2 and (args.vocab_file is None or args.merge_file is None):
        raise UsageError("GPT-2's tokenizer has two files: give --vocab-file and --merge-file")
    if args.train_tokenizer != (args.vocab_size is not None):
        raise UsageError("--train-tokenizer and --vocab-size N go together")


def report(summary: "PrepareSummary", args: argparse.Namespace) -> str:
    """Describe the result, and the flags and manifest fields that use it."""
    lines: list[str] = []
    for prefix, documents, tokens in zip(summary.prefixes, summary.documents, summary.tokens, strict=True):
        state = "exist already, nothing to do" if summary.reused else "written"
        lines.append(f"{prefix}.bin and .idx {state}: {documents:,} documents, {tokens:,} tokens")
    left_out = [(summary.bad_lines, "unreadable lines"), (summary.empty_documents, "empty documents")]
    lines += [f"skipped: {count:,} {what}" for count, what in left_out if count]
    lines.append(f"train with: --data-path {summary.prefixes[0]} {_tokenizer_flags(summary, args)}")
    lines.append(f"in a manifest: spec.data.path: [{summary.prefixes[0]}], {_tokenizer_fields(summary, args)}")
    return "\n".join(lines)


def _tokenizer_flags(summary: "PrepareSummary", args: argparse.Namespace) -> str:
    file = summary.trained_tokenizer or args.tokenizer_file
    if file is not None:
        return f"--tokenizer-file {file}"
    return f"--vocab-file {args.vocab_file} --merge-file {args.merge_file}"


def _tokenizer_fields(summary: "PrepareSummary", args: argparse.Namespace) -> str:
    file = summary.trained_tokenizer or args.tokenizer_file
    if file is not None:
        return f"spec.data.tokenizer: {file}"
    return f"spec.data.vocabFile: {args.vocab_file}, spec.data.mergeFile: {args.merge_file}"
