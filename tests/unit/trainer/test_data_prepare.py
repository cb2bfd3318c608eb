"""`megatronapp data prepare` from end to end: same result however it runs, restarts, refusals."""

import argparse
import json
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from megatronapp_trainer.data import cli
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.corpus_check import inspect_corpus
from megatronapp_trainer.data.prepare import pool, prepare, sources
from megatronapp_trainer.data.prepare.progress import progress

VOCABULARY = ["stage", "rank", "step", "loss", "gradient", "pipeline", "tensor", "micro", "batch", "optimizer"]


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    """A hundred documents as JSONL."""
    generator = random.Random(1)
    texts = [" ".join(generator.choices(VOCABULARY, k=generator.randint(1, 40))) for _ in range(100)]
    path = tmp_path / "input" / "corpus.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def tokenizer_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tokenizer.json"
    tokenizers.train(VOCABULARY * 10, 300).backend.save(str(path))
    return path


Run = Callable[..., int]


@pytest.fixture
def run(corpus: pathlib.Path, tokenizer_file: pathlib.Path, tmp_path: pathlib.Path) -> Run:
    """Run the command on the corpus; more arguments may follow, which override."""

    def prepare_with(*more: str, output: str = "out/corpus", tokenizer: bool = True) -> int:
        parser = argparse.ArgumentParser()
        cli.register(parser.add_subparsers())
        command = ["data", "prepare", "--input", str(corpus), "--output", str(tmp_path / output), "--workers", "1"]
        if tokenizer:
            command += ["--tokenizer-file", str(tokenizer_file)]
        args = parser.parse_args([*command, *more])
        return int(args.func(args))

    return prepare_with


def documents(prefix: pathlib.Path) -> list[list[int]]:
    facts = inspect_corpus(str(prefix))
    ids = np.fromfile(f"{prefix}.bin", dtype=facts.token_type)
    return [part.tolist() for part in np.split(ids, np.cumsum(facts.lengths)[:-1])]


def texts_of(corpus: pathlib.Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text().splitlines()]


def test_the_corpus_holds_the_documents(
    run: Run, corpus: pathlib.Path, tokenizer_file: pathlib.Path, tmp_path: pathlib.Path, capsys: Any
) -> None:
    assert run("--append-eod") == 0
    tokenizer = tokenizers.load_file(tokenizer_file)
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts_of(corpus)]
    assert documents(tmp_path / "out" / "corpus_text_document") == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "corpus_text_document.bin",
        "corpus_text_document.idx",
        "corpus_text_document.json",
    ]
    assert "100 documents" in capsys.readouterr().out


def test_megatron_reads_it(run: Run, tmp_path: pathlib.Path) -> None:
    assert run() == 0
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = tmp_path / "out" / "corpus_text_document"
    dataset = IndexedDataset(str(prefix))
    assert [dataset[index].tolist() for index in range(len(dataset))] == documents(prefix)
    assert len(dataset.document_indices) == 101


def test_worker_processes_give_the_same_files(run: Run, tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    assert run(output="one/corpus") == 0
    assert run("--workers", "2", output="two/corpus") == 0
    for suffix in (".bin", ".idx"):
        first, second = (tmp_path / folder / f"corpus_text_document{suffix}" for folder in ("one", "two"))
        assert first.read_bytes() == second.read_bytes()


class StopHereError(Exception):
    """Error in place of a power cut."""


@pytest.mark.parametrize("batches_before_the_stop", [1, 5, 9])
def test_a_stopped_run_continues_to_the_same_output(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, batches_before_the_stop: int
) -> None:
    monkeypatch.setattr(sources, "BATCH_BYTES", 1000)
    monkeypatch.setattr(prepare, "_COMMIT_BYTES", 3000)
    assert run(output="whole/corpus") == 0
    encode, seen = pool.encode_in_order, []

    def stopping(work: Any, *rest: Any) -> Iterator[Any]:
        for number, item in enumerate(encode(work, *rest)):
            if number == batches_before_the_stop:
                raise StopHereError
            yield item

    def counting(work: Any, *rest: Any) -> Iterator[Any]:
        for item in encode(work, *rest):
            seen.append(item)
            yield item

    monkeypatch.setattr(prepare, "encode_in_order", stopping)
    with pytest.raises(StopHereError):
        run()
    assert not (tmp_path / "out" / "corpus_text_document.bin").exists()
    monkeypatch.setattr(prepare, "encode_in_order", counting)
    assert run() == 0
    for suffix in (".bin", ".idx"):
        again, whole = (tmp_path / folder / f"corpus_text_document{suffix}" for folder in ("out", "whole"))
        assert again.read_bytes() == whole.read_bytes()
    total = len(list(sources.batches(sources.find_sources([str(tmp_path / "input")], ("*",), None), sources.START)))
    assert len(seen) == total - batches_before_the_stop // 3 * 3
    assert not (tmp_path / "out" / "corpus.preparing").exists()


@pytest.mark.parametrize("moves_before_the_stop", range(4))
@pytest.mark.parametrize("older", [False, True])
def test_a_run_stopped_between_its_renames_continues(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, moves_before_the_stop: int, older: bool
) -> None:
    """Tokenizer, .bin, .json and .idx get their names one after the other."""
    flags = ("--train-tokenizer", "--vocab-size", "290")
    if older:
        assert run("--append-eod", *flags, tokenizer=False) == 0
    move, out, moved = pathlib.Path.replace, tmp_path / "out", 0

    def stopping(self: pathlib.Path, target: Any) -> pathlib.Path:
        nonlocal moved
        if pathlib.Path(target).parent == out:
            if moved == moves_before_the_stop:
                raise StopHereError
            moved += 1
        return move(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "replace", stopping)
        with pytest.raises(StopHereError):
            run(*flags, *(["--overwrite"] if older else []), tokenizer=False)
    assert not (out / "corpus_text_document.idx").exists() or moved < 2
    assert run(*flags, tokenizer=False) == 0
    assert run(*flags, output="whole/corpus", tokenizer=False) == 0
    for name in ("corpus_text_document.bin", "corpus_text_document.idx", "tokenizer.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (out / "corpus.preparing").exists()


def test_a_run_stopped_between_its_renames_may_be_given_up(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopping(*_args: object) -> None:
        raise StopHereError

    with monkeypatch.context() as patch:
        patch.setattr(prepare._Preparation, "_publish", stopping)
        with pytest.raises(StopHereError):
            run()
    assert run("--append-eod", "--overwrite") == 0
    assert run("--append-eod", output="whole/corpus") == 0
    again, whole = (tmp_path / folder / "corpus_text_document.bin" for folder in ("out", "whole"))
    assert again.read_bytes() == whole.read_bytes()


def test_a_second_run_has_nothing_to_do(run: Run, tmp_path: pathlib.Path, capsys: Any) -> None:
    assert run() == 0
    before = (tmp_path / "out" / "corpus_text_document.bin").stat().st_mtime_ns
    assert run() == 0
    assert (tmp_path / "out" / "corpus_text_document.bin").stat().st_mtime_ns == before
    assert "nothing to do" in capsys.readouterr().out


def test_other_output_is_replaced_only_on_request(run: Run, tmp_path: pathlib.Path, capsys: Any) -> None:
    assert run() == 0
    assert run("--append-eod") == 65
    assert "--overwrite" in capsys.readouterr().err
    assert run("--append-eod", "--overwrite") == 0
    assert len(documents(tmp_path / "out" / "corpus_text_document")) == 100


def test_a_tokenizer_is_trained_and_saved(run: Run, tmp_path: pathlib.Path, capsys: Any) -> None:
    flags = ("--train-tokenizer", "--vocab-size", "290", "--append-eod")
    assert run(*flags, tokenizer=False) == 0
    trained = tokenizers.load_file(tmp_path / "out" / "tokenizer.json")
    assert 257 < trained.vocab_size <= 290
    assert documents(tmp_path / "out" / "corpus_text_document")[0][-1] == trained.eod
    output = capsys.readouterr().out
    assert f"--tokenizer-file {tmp_path}/out/tokenizer.json" in output
    assert f"spec.data.path: [{tmp_path}/out/corpus_text_document], spec.data.tokenizer: {tmp_path}/out/tok" in output
    (tmp_path / "out" / "tokenizer.json").write_text("another one")
    assert run(*flags, output="out/second", tokenizer=False) == 65
    assert "is another tokenizer" in capsys.readouterr().err


def test_source_code_as_text(run: Run, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "code" / "deep"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("step = 1\n")
    (folder / "b.py").write_text("rank = 2\n")
    (folder / "c.txt").write_text("not code")
    assert run("--input", str(tmp_path / "code"), "--pattern", "*.py") == 0
    assert len(documents(tmp_path / "out" / "corpus_text_document")) == 2


def test_bad_lines(run: Run, corpus: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    lines = corpus.read_text().splitlines()
    lines[41] = lines[41][:-3]
    corpus.write_text("\n".join(lines))
    assert run() == 65
    message = capsys.readouterr().err
    assert f"{corpus} line 42 is not JSON" in message
    assert "--skip-bad-lines" in message
    assert not (tmp_path / "out" / "corpus_text_document.bin").exists()
    assert run("--skip-bad-lines") == 0
    assert "skipped: 1 unreadable lines" in capsys.readouterr().out
    assert len(documents(tmp_path / "out" / "corpus_text_document")) == 99


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ('{"text": ""}\n', "has no text"), ("\n\n", "has no text"), ('{"txt": "x"}', "--json-keys")],
)
def test_input_without_text(run: Run, corpus: pathlib.Path, content: str, message: str, capsys: Any) -> None:
    corpus.write_text(content)
    assert run() == 65
    assert message in capsys.readouterr().err
    assert not (corpus.parents[1] / "out" / "corpus.preparing").exists()


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--train-tokenizer",),
        ("--vocab-size", "300"),
        ("--vocab-file", "v"),
        ("--tokenizer-file", "t", "--train-tokenizer", "--vocab-size", "300"),
    ],
)
def test_tokenizer_flags_that_do_not_go_together(run: Run, flags: tuple[str, ...], capsys: Any) -> None:
    assert run(*flags, tokenizer=False) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_two_concurrent_runs_for_the_same_output_are_refused(run: Run, tmp_path: pathlib.Path, capsys: Any) -> None:
    with prepare._working_directory(tmp_path / "out" / "corpus"):
        assert run() == 67
    assert "another `megatronapp data prepare` is writing" in capsys.readouterr().err


def test_a_full_disk(run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Check that existing files are kept, and that the next run continues."""
    from megatronapp_trainer.data.prepare.corpus import CorpusFiles

    def full(*_args: object, **_keywords: object) -> None:
        raise OSError(28, "No space left on device", "corpus.bin")

    with monkeypatch.context() as patch:
        patch.setattr(CorpusFiles, "commit", full)
        assert run() == 67
    message = capsys.readouterr().err
    assert "No space left on device" in message
    assert "run the same command again" in message
    assert "is stored in" not in message
    assert not (tmp_path / "out" / "corpus.preparing").exists()
    assert run() == 0
    assert len(documents(tmp_path / "out" / "corpus_text_document")) == 100


def test_a_disk_that_fills_later(
    run: Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from megatronapp_trainer.data.prepare.corpus import CorpusFiles

    def full(*_args: object, **_keywords: object) -> None:
        raise OSError(28, "No space left on device", "corpus.idx")

    monkeypatch.setattr(CorpusFiles, "finish", full)
    assert run() == 67
    assert f"is stored in {tmp_path}/out/corpus.preparing" in capsys.readouterr().err
    assert (tmp_path / "out" / "corpus.preparing" / "journal.json").exists()


def test_progress_is_printed_as_lines_without_a_terminal(capsys: Any) -> None:
    times_s = iter([0.0, 9.0, 10.5, 19.0, 21.0])
    with progress("tokenising", total_bytes=8 << 20, done_bytes=1 << 20, clock=lambda: next(times_s)) as advance:
        for _ in range(4):
            advance(1 << 20)
    assert capsys.readouterr().err.splitlines() == [
        "tokenising: 3.0 of 8.0 MiB (38%)",
        "tokenising: 5.0 of 8.0 MiB (62%)",
    ]


def test_the_command_line_is_light() -> None:
    """Registering must load neither torch nor megatron-core nor the tokenizers."""
    program = (
        "import argparse, sys; from megatronapp_trainer.data.cli import register;"
        "register(argparse.ArgumentParser().add_subparsers());"
        "print([name for name in ('torch', 'megatron', 'tokenizers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout.strip() == "[]"


def typed(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="megatronapp")
    cli.register(parser.add_subparsers())
    args = parser.parse_args(["data", "prepare", *arguments])
    return int(args.func(args))


def test_the_options_of_preprocess_data_make_the_same_files(
    corpus: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    trained = tokenizers.train([*VOCABULARY * 10], 300).backend
    trained.model.save(str(folder))
    files = ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
    common = ["--input", str(corpus), "--workers", "1", *files]
    spelled = [
        "--json-key",
        "text",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--partitions",
        "1",
        "--log-interval",
        "1000",
    ]
    assert typed(*common, "--output-prefix", str(tmp_path / "theirs"), *spelled, "--keep-sequential-samples") == 0
    message = capsys.readouterr().err
    assert all(f"note: {flag}: " in message for flag in ("--partitions", "--log-interval", "--keep-sequential-samples"))
    assert typed(*common, "--output", str(tmp_path / "ours")) == 0
    theirs, ours = (tmp_path / f"{name}_text_document.bin" for name in ("theirs", "ours"))
    assert theirs.read_bytes() == ours.read_bytes()


def test_a_tokenizer_may_be_named_by_its_folder(
    corpus: pathlib.Path, tokenizer_file: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(corpus), "--output", str(tmp_path / "out"), "--tokenizer-type", "HuggingFaceTokenizer"]
    assert typed(*arguments, "--tokenizer-model", str(tokenizer_file.parent), "--workers", "1") == 0
    assert f"--tokenizer-file {tokenizer_file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--lang klingon", "argument --lang: 'klingon' is none of czech, danish"),
        ("--tokenizer-type Llama2Tokenizer", "only tokenizers of tokenizer.json"),
    ],
)
def test_what_has_no_meaning_here_is_answered(flags: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        typed("--input", "in", "--output-prefix", "out", *flags.split())
    assert reason in capsys.readouterr().err


def test_a_folder_can_be_prepared_into_itself_again(
    run: Run, corpus: pathlib.Path, tmp_path: pathlib.Path, capsys: Any, monkeypatch: Any
) -> None:
    """Its own files, which the patterns of text match, are no input, also when the first run was stopped."""
    folder = str(corpus.parent)
    flags = ("--input", folder, "--train-tokenizer", "--vocab-size", "300")
    monkeypatch.setattr(prepare._Preparation, "_publish", stop)
    with pytest.raises(StopHereError):
        run(*flags, output="input/corpus", tokenizer=False)
    monkeypatch.undo()
    assert (corpus.parent / "corpus.preparing" / "finished.json").exists()
    for printed in ("written", "exist already"):
        assert run(*flags, output="input/corpus", tokenizer=False) == 0
        assert printed in capsys.readouterr().out
    assert (corpus.parent / "tokenizer.json").exists()
    assert len(documents(corpus.parent / "corpus_text_document")) == 100


def stop(*_arguments: object) -> None:
    raise StopHereError


def test_the_end_of_documents_is_recorded(run: Run, tokenizer_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert run("--append-eod", output="out/ended") == run(output="out/endless") == 0
    recorded = [
        json.loads((tmp_path / "out" / f"{name}_text_document.json").read_text())["summary"]["eod"]
        for name in ("ended", "endless")
    ]
    assert recorded == [tokenizers.load_file(tokenizer_file).eod, None]


def test_a_file_of_several_documents_has_an_end_of_each(
    run: Run, tokenizer_file: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 20)
    (tmp_path / "long.txt").write_text("stage rank step loss\n" * 3)
    assert run("--append-eod", "--input", str(tmp_path / "long.txt")) == 0
    tokenizer = tokenizers.load_file(tokenizer_file)
    document = [*tokenizer.tokenize("stage rank step loss\n"), tokenizer.eod]
    assert documents(tmp_path / "out" / "corpus_text_document") == [document] * 3


def test_a_corpus_that_ended_documents_with_another_token_is_not_taken_for_the_same(
    run: Run, tokenizer_file: pathlib.Path, capsys: Any
) -> None:
    assert run("--append-eod") == 0
    tokenizer_file.with_name("tokenizer_config.json").write_text('{"eos_token": "step"}')
    capsys.readouterr()
    assert run("--append-eod") == 65
    assert "an earlier release that ended documents in another way" in capsys.readouterr().err
    assert run("--append-eod", "--overwrite") == 0


def test_bad_lines_of_plain_text_are_counted(run: Run, tmp_path: pathlib.Path, capsys: Any) -> None:
    (tmp_path / "mixed.txt").write_bytes(b"stage\n\xff\nrank\n\xfe\nstep\n")
    flags = ("--input", str(tmp_path / "mixed.txt"))
    assert run(*flags) == 65
    assert "mixed.txt line 2 is not UTF-8 (byte 0xff)" in capsys.readouterr().err
    assert run(*flags, "--skip-bad-lines") == 0
    assert "skipped: 2 unreadable lines" in capsys.readouterr().out
