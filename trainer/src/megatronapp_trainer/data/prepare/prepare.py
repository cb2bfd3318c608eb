"""The command `megatronapp data prepare`: text in, Megatron's .bin/.idx out, in one pass over the input.

Worker processes parse and tokenise; this process reads ahead and writes in input order, so that the result does not
depend on the number of workers. `corpus` describes how a stopped run resumes.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.prepare.documents import BadLine, EncodeOptions, parse
from megatronapp_trainer.data.prepare.pool import encode_in_order
from megatronapp_trainer.data.prepare.progress import progress
from megatronapp_trainer.data.prepare.sources import (
    CHUNK_BYTES,
    DEFAULT_PATTERNS,
    START,
    DocumentBatch,
    DocumentFormat,
    InputFile,
    InputPosition,
    batches,
    find_sources,
)
from megatronapp_trainer.errors import DataError, StorageError
from megatronapp_trainer.utils.atomic_files import sync_directory, write_atomically

TRAINING_BYTES = 256 << 20
_COMMIT_BYTES = 64 << 20
_FINISHED = "finished.json"
"""Name in the working directory; exists once all files are complete, while they are renamed."""
_SMALL_VOCABULARY = 65500  # below this megatron-core stores 16-bit tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Inputs, tokenizer and output of a preparation."""

    inputs: tuple[str, ...]
    output: str
    json_keys: tuple[str, ...] = ("text",)
    patterns: tuple[str, ...] = DEFAULT_PATTERNS
    format: DocumentFormat | None = None
    workers: int = 1
    append_eod: bool = False
    skip_bad_lines: bool = False
    overwrite: bool = False
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_file: str | None = None
    train_vocab_size: int | None = None
    tokenizer_type: str | None = None
    sentences_of: str | None = None
    """Language (ISO 639) by whose rules documents are split into sentences; None: they are not."""

    @property
    def sequence(self) -> str:
        """Return the name of a sequence of tokens, as the names of files have it."""
        return "document" if self.sentences_of is None else "sentence"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareSummary:
    """Result of a run, per JSON key in the order given. `reused`: it existed already."""

    prefixes: tuple[str, ...]
    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    vocab_size: int
    tokenizer_digest: str
    trained_tokenizer: str | None
    bad_lines: int
    empty_documents: int
    eod: int | None = None
    """Token that ends each document; None: none does, or an earlier release made the corpus and did not record it."""
    reused: bool = False


def prepare(options: PrepareOptions) -> PrepareSummary:
    """Run the whole preparation, or the rest of one that was stopped.

    Raises:
        DataError: input or tokenizer is missing, empty or corrupt.
        StorageError: the output cannot be written; finished work is preserved, and the same command resumes it.
    """
    output = pathlib.Path(options.output)
    sources = find_sources(options.inputs, options.patterns, options.format, made=_made(options))
    if options.output.endswith("/") or output.is_dir():
        raise DataError(f"--output {options.output} is a directory; give a prefix such as {output / 'corpus'}")
    with _storage_errors(output), _working_directory(output) as directory:
        summary = _Preparation(options, sources, directory).summary()
        shutil.rmtree(directory)
    return summary


def _made(options: PrepareOptions) -> Callable[[pathlib.Path], bool]:
    """Return a function that says whether a preparation with these options makes a file: such files are no input."""
    output = pathlib.Path(os.path.abspath(options.output))
    working = working_path(output)
    made = {
        pathlib.Path(f"{output}_{key}_{sequence}{suffix}")
        for key in options.json_keys
        for sequence in ("document", "sentence")
        for suffix in (".bin", ".idx", ".json")
    }
    if options.train_vocab_size is not None:
        made.add(output.parent / "tokenizer.json")

    def is_made(path: pathlib.Path) -> bool:
        whole = pathlib.Path(os.path.abspath(path))
        return whole in made or working in whole.parents

    return is_made


class _Preparation:
    """One preparation in its working directory."""

    def __init__(self, options: PrepareOptions, sources: Sequence[InputFile], directory: pathlib.Path) -> None:
        self._options = options
        self._sources = sources
        self._directory = directory
        self._prefixes = {key: f"{options.output}_{key}_{options.sequence}" for key in options.json_keys}
        self._tokenizer_target = pathlib.Path(options.output).parent / "tokenizer.json"

    def summary(self) -> PrepareSummary:
        """Run the steps that are not done yet."""
        fingerprint = self._fingerprint()
        if (done := self._already_done(fingerprint)) is not None:
            return done
        if (finished := self._finished(fingerprint)) is not None:
            self._publish(finished, fingerprint)
            return finished
        self._refuse_to_overwrite()
        (self._directory / _FINISHED).unlink(missing_ok=True)  # of other input or options
        tokenizer = self._tokenizer(fingerprint)
        return self._write(tokenizer, fingerprint)

    def _fingerprint(self) -> str:
        """Return the digest of everything the result depends on."""
        options = self._options
        named = [path for path in (options.vocab_file, options.merge_file, options.tokenizer_file) if path is not None]
        content = {
            "version": 1,
            "sources": [asdict(source) for source in self._sources],
            "tokenizer": [_file_digest(pathlib.Path(path)) for path in named] or options.train_vocab_size,
            "keys": options.json_keys,
            "eod": options.append_eod,
            "skip": options.skip_bad_lines,
        }
        # Not among the others: corpora of releases without them are still recognised.
        later: dict[str, Any] = {"type": options.tokenizer_type, "sentences": options.sentences_of}
        if options.append_eod:
            later |= {"end": self._end_unlike_before(), "divided": self._has_divided_files() or None}
        content |= {name: value for name, value in later.items() if value is not None}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def _end_unlike_before(self) -> int | None:
        """Return the token that ends documents if earlier releases took another one."""
        if self._options.train_vocab_size is not None:
            return None
        tokenizer = self._loaded_tokenizer()
        return None if tokenizer.eod == tokenizer.eod_by_name else tokenizer.eod

    def _has_divided_files(self) -> bool:
        """Return True if a file is divided into documents, of which earlier releases ended the last one alone."""
        return any(source.format is DocumentFormat.TEXT and source.size_bytes > CHUNK_BYTES for source in self._sources)

    def _already_done(self, fingerprint: str) -> PrepareSummary | None:
        files = [pathlib.Path(prefix + suffix) for prefix in self._prefixes.values() for suffix in (".bin", ".idx")]
        if self._options.train_vocab_size is not None:
            files.append(self._tokenizer_target)
        if not all(path.exists() for path in files):
            return None
        for prefix in self._prefixes.values():
            summary = _stored_summary(pathlib.Path(prefix + ".json"), fingerprint)
            if summary is None:
                return None
        return summary

    def _finished(self, fingerprint: str) -> PrepareSummary | None:
        """Return the summary of a run that was stopped between its first and its last rename."""
        found = _stored_summary(self._directory / _FINISHED, fingerprint)
        return None if found is None else replace(found, reused=False)

    def _refuse_to_overwrite(self) -> None:
        for prefix in self._prefixes.values():
            if not self._options.overwrite and (os.path.exists(prefix + ".idx") or os.path.exists(prefix + ".bin")):
                raise DataError(
                    f"{prefix}.bin exists and was made from other input, with other options, or by an earlier release "
                    "that ended documents in another way; "
                    "pass --overwrite to replace it, or choose another --output"
                )

    def _tokenizer(self, fingerprint: str) -> tokenizers.Tokenizer:
        options = self._options
        if options.train_vocab_size is None:
            return self._loaded_tokenizer()
        trained_file = self._directory / f"tokenizer-{fingerprint[:16]}.json"
        if not trained_file.exists():
            trained = tokenizers.train(self._training_texts(), options.train_vocab_size)
            write_atomically(trained_file, trained.backend.to_str(pretty=True).encode())
        target = self._tokenizer_target
        if target.exists() and target.read_bytes() != trained_file.read_bytes() and not options.overwrite:
            raise DataError(
                f"{target} exists and is another tokenizer; use it with --tokenizer-file {target}, "
                "replace it with --overwrite, or choose an --output in another directory"
            )
        return tokenizers.load_file(trained_file)

    def _loaded_tokenizer(self) -> tokenizers.Tokenizer:
        options = self._options
        return tokenizers.load(
            vocab_file=options.vocab_file,
            merge_file=options.merge_file,
            tokenizer_file=options.tokenizer_file,
            tokenizer_type=options.tokenizer_type,
        )

    def _training_texts(self) -> Iterator[str]:
        """Yield every n-th batch of the input, so that the tokenizer learns from about TRAINING_BYTES of it."""
        stride = math.ceil(sum(source.size_bytes for source in self._sources) / TRAINING_BYTES)
        for number, batch in enumerate(self._with_progress(START, "learning the tokenizer")):
            if number % stride == 0:
                parsed = parse(batch.chunks, self._options.json_keys)
                self._check_lines(parsed.bad)
                for texts in parsed.texts.values():
                    yield from texts

    def _check_lines(self, bad: Sequence[BadLine]) -> None:
        if bad and not self._options.skip_bad_lines:
            first = bad[0]
            raise DataError(
                f"{first.path} line {first.line} {first.reason}. Repair it, or pass --skip-bad-lines to skip such lines"
            )

    def _with_progress(self, start: InputPosition, title: str) -> Iterator[DocumentBatch]:
        before = sum(source.size_bytes for source in self._sources[: start.file]) + start.offset_bytes
        total = sum(source.size_bytes for source in self._sources)
        with progress(title, total_bytes=total, done_bytes=before) as advance:
            yield from batches(self._sources, start, advance)

    def _write(self, tokenizer: tokenizers.Tokenizer, fingerprint: str) -> PrepareSummary:
        from megatronapp_trainer.data.prepare.corpus import (
            CorpusFiles,  # megatron-core and torch take seconds to import
        )

        options = self._options
        encode = EncodeOptions(
            keys=options.json_keys,
            dtype="uint16" if tokenizer.vocab_size < _SMALL_VOCABULARY else "int32",
            eod=tokenizer.eod if options.append_eod else None,
            sentences_of=options.sentences_of,
        )
        has_sentences = options.sentences_of is not None
        with CorpusFiles(
            self._directory, fingerprint, options.json_keys, encode.dtype, has_sentences=has_sentences
        ) as corpus:
            work = self._with_progress(corpus.position, "tokenising")
            for batch, result in encode_in_order(work, tokenizer.backend.to_str(), encode, options.workers):
                self._check_lines(result.bad)
                corpus.add(batch, result, commit_bytes=_COMMIT_BYTES)
            journal = corpus.commit()
            self._check_not_empty(journal.documents)
            summary = PrepareSummary(
                prefixes=tuple(self._prefixes.values()),
                documents=tuple(journal.documents.values()),
                tokens=tuple(journal.tokens.values()),
                vocab_size=tokenizer.vocab_size,
                tokenizer_digest=tokenizer.digest,
                trained_tokenizer=str(self._tokenizer_target) if options.train_vocab_size is not None else None,
                bad_lines=journal.bad_lines,
                empty_documents=journal.empty_documents,
                eod=encode.eod,
            )
            corpus.finish()
        write_atomically(self._directory / _FINISHED, _sidecar(summary, fingerprint))
        self._publish(summary, fingerprint)
        return summary

    def _check_not_empty(self, documents: dict[str, int]) -> None:
        for key, count in documents.items():
            if count == 0:
                raise DataError(f"the input has no text under {key!r}; nothing was written")

    def _publish(self, summary: PrepareSummary, fingerprint: str) -> None:
        """Rename the finished files into place; continues an earlier run that was stopped here."""
        tokenizer = self._directory / f"tokenizer-{fingerprint[:16]}.json"
        if summary.trained_tokenizer is not None and tokenizer.exists():
            tokenizer.replace(summary.trained_tokenizer)
        for key, prefix in self._prefixes.items():
            data, index = self._directory / f"{key}.bin", self._directory / f"{key}.idx"
            if not index.exists():  # the last to leave
                continue
            pathlib.Path(prefix + ".idx").unlink(missing_ok=True)  # no reader may pair the old index with the new data
            if data.exists():
                data.replace(prefix + ".bin")
            write_atomically(pathlib.Path(prefix + ".json"), _sidecar(summary, fingerprint))
            index.replace(prefix + ".idx")
        sync_directory(pathlib.Path(self._options.output).parent)


def _sidecar(summary: PrepareSummary, fingerprint: str) -> bytes:
    return json.dumps({"fingerprint": fingerprint, "summary": asdict(summary)}, indent=1).encode()


def _stored_summary(path: pathlib.Path, fingerprint: str) -> PrepareSummary | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if stored.get("fingerprint") != fingerprint:
        return None
    fields: dict[str, Any] = stored["summary"]
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return PrepareSummary(**{**fields, "reused": True})


def _file_digest(path: pathlib.Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"tokenizer file {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _working_directory(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """Lock `PREFIX.preparing` against a second run for the same output; removes it at the end if it has no use."""
    directory = working_path(output)
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, output)
        try:
            yield directory
        finally:
            if not _can_resume(directory):
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output: pathlib.Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageError(f"another `megatronapp data prepare` is writing {output}; wait for it") from error


def working_path(output: pathlib.Path) -> pathlib.Path:
    """Return the working directory of a preparation; it exists only while that runs or can be resumed."""
    return output.with_name(output.name + ".preparing")


def _can_resume(directory: pathlib.Path) -> bool:
    """Return True if a second run can use it: a learned tokenizer, finished files, or documents of a journal."""
    if (directory / _FINISHED).exists() or any(directory.glob("tokenizer-*.json")):
        return True
    try:
        journal = json.loads((directory / "journal.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return any(journal["documents"].values())


@contextlib.contextmanager
def _storage_errors(output: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place, working = error.filename or output, working_path(output)
        advice = "Free space or fix the permissions, then run the same command again"
        if os.path.exists(working):
            advice += f"; finished work is stored in {working}, and that command resumes it"
        raise StorageError(f"cannot read or write {place}: {error.strerror or error}. {advice}") from error
