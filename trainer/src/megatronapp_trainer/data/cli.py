"""The command `megatronapp data ...`: its parser imports little, the work is imported when it runs."""

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatronapp_trainer.config.data import WORDPIECE_TYPES

if TYPE_CHECKING:
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions, PrepareSummary

_DESCRIPTION = """\
Turn text into the token files that training reads: PREFIX_text_document.bin and .idx (Megatron's format), for BERT
(--split-sentences) PREFIX_text_sentence.bin and .idx.

Input is JSONL (.jsonl, .ndjson, .json: one object per line) or plain text (other files: one document per file; a file
above 4 MiB is split at line ends into several). To resume a stopped run, give the same command again.
"""
_EPILOG = """\
examples:
  megatronapp data prepare --input corpus.jsonl --output data/corpus --append-eod --tokenizer-file tokenizer.json
  megatronapp data prepare --input corpus.jsonl --output data/bert --split-sentences --vocab-file vocab.txt \\
    --tokenizer-type BertWordPieceLowerCase
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
    add(
        "--split-sentences",
        action="store_true",
        help="store sentences apart, as BERT takes them: PREFIX_text_sentence.bin and .idx",
    )
    add(
        "--lang",
        type=_language,
        metavar="LANGUAGE",
        help="language of the text, with --split-sentences (default: english)",
    )
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
    add("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, with --merge-file; or BERT's vocab.txt")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt, with --vocab-file")
    add("--train-tokenizer", action="store_true", help="learn a byte-level BPE; saved as tokenizer.json next to PREFIX")
    add("--vocab-size", type=_positive, metavar="N", help="size of the learned vocabulary")
    add(
        "--tokenizer-type",
        action=_TokenizerType,
        metavar="TYPE",
        help=f"{' or '.join(WORDPIECE_TYPES)}, with --vocab-file vocab.txt; other types follow from their files",
    )


_NO_TYPE = "only tokenizers of tokenizer.json, GPT-2's of vocab.json and merges.txt, and BERT's of vocab.txt, are read"
_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", *WORDPIECE_TYPES)
"""Values of --tokenizer-type. Those of GPT are accepted because the files say the same."""
_LANGUAGES: Mapping[str, str] = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
"""Languages of --lang by the names that Megatron-LM takes."""


def _add_spellings(parser: argparse.ArgumentParser) -> None:
    """Add options of Megatron-LM's tools/preprocess_data.py beyond those that have the same name here."""
    add = parser.add_argument
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
    add(
        "--keep-newlines",
        action=_IgnoredOption,
        nargs=0,
        text="sentences are stripped, and WordPiece has no token for a line end",
        help=argparse.SUPPRESS,
    )


class _IgnoredOption(argparse.Action):
    """Accepts an option that is not needed here, and prints why."""

    def __init__(self, *arguments: Any, text: str, **keywords: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*arguments, **keywords)
        self.text = text

    def __call__(self, _parser: Any, _namespace: Any, _values: Any, option: str | None = None) -> None:  # noqa: ANN401
        """Print why the option is not needed."""
        print(f"note: {option}: {self.text}", file=sys.stderr)


class _TokenizerType(argparse.Action):
    """Accepts the types that are read."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:  # noqa: ANN401
        """End the command if the type is another one."""
        if values not in _TYPES:
            parser.error(f"{option} {values}: {_NO_TYPE}; give --tokenizer-file, or --vocab-file and --merge-file")
        setattr(namespace, self.dest, values)


def _language(given: str) -> str:
    """Return the code of a language that is given by its name or its code."""
    if given in _LANGUAGES.values():
        return given
    if given not in _LANGUAGES:
        raise argparse.ArgumentTypeError(f"{given!r} is none of {', '.join(_LANGUAGES)}")
    return _LANGUAGES[given]


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
        tokenizer_type=args.tokenizer_type if args.tokenizer_type in WORDPIECE_TYPES else None,
        sentences_of=(args.lang or "en") if args.split_sentences else None,
    )


def _check_tokenizer_flags(args: argparse.Namespace) -> None:
    from megatronapp_trainer.errors import UsageError

    if args.lang is not None and not args.split_sentences:
        raise UsageError("--lang is the language of --split-sentences; add it, or leave --lang out")
    if args.tokenizer_type in WORDPIECE_TYPES:
        if args.vocab_file is None or args.merge_file or args.tokenizer_file or args.train_tokenizer:
            raise UsageError(f"--tokenizer-type {args.tokenizer_type} has one file: give --vocab-file vocab.txt alone")
        return
    gpt2 = args.vocab_file is not None or args.merge_file is not None
    if sum((gpt2, args.tokenizer_file is not None, args.train_tokenizer)) != 1:
        raise UsageError(
            "choose one tokenizer: --tokenizer-file FILE, or --vocab-file FILE --merge-file FILE, "
            "or --train-tokenizer --vocab-size N"
        )
    if gpt2 and (args.vocab_file is None or args.merge_file is None):
        raise UsageError(
            "GPT-2's tokenizer has two files: give --vocab-file and --merge-file; for BERT's vocab.txt give "
            f"--tokenizer-type {' or '.join(WORDPIECE_TYPES)}"
        )
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
    if args.tokenizer_type in WORDPIECE_TYPES:
        lines += _too_long_for_bert(summary.prefixes, split_sentences=args.split_sentences)
        return "\n".join([*lines, *_use_in_bert(summary.prefixes[0], args)])
    lines.append(f"train with: --data-path {summary.prefixes[0]} {_tokenizer_flags(summary, args)}")
    lines.append(f"in a manifest: spec.data.path: [{summary.prefixes[0]}], {_tokenizer_fields(summary, args)}")
    return "\n".join(lines)


def _too_long_for_bert(prefixes: Sequence[str], *, split_sentences: bool) -> Iterator[str]:
    """Yield how much of each corpus no sample of BERT's usual length has."""
    from megatronapp_trainer.data.corpus_check import LONGEST_SENTENCE, SPECIAL_IN_SAMPLE, inspect_corpus

    advice = "train with a longer --seq-length"
    if not split_sentences:
        advice = f"prepare with --split-sentences, or {advice}"
    for prefix in prefixes:
        sequences, tokens = inspect_corpus(prefix).tokens_beyond(LONGEST_SENTENCE - SPECIAL_IN_SAMPLE)
        if sequences:
            yield (
                f"warning: {sequences:,} sequences of {prefix} are longer than a sample of --seq-length "
                f"{LONGEST_SENTENCE}, which cuts both of their ends: {tokens:,} tokens are not trained on; {advice}"
            )


def _use_in_bert(prefix: str, args: argparse.Namespace) -> list[str]:
    """Return the flags and manifest fields of a training; without sentences apart there are no pairs to order."""
    flags = f"--model-type bert --data-path {prefix} --tokenizer-type {args.tokenizer_type}"
    flags += f" --vocab-file {args.vocab_file}"
    fields = f"spec.model.type: bert, spec.data.path: [{prefix}], spec.data.vocabFile: {args.vocab_file}"
    fields += f", spec.data.tokenizerType: {args.tokenizer_type}"
    if not args.split_sentences:
        flags += " --bert-no-binary-head"
        fields += ", spec.args: [--bert-no-binary-head]; for the order of sentences prepare with --split-sentences"
    return [f"train with: {flags}", f"in a manifest: {fields}"]


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
