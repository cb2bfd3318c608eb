"""Streamed data sets of the package `datasets`: samples, resumes within documents, and other numbers of replicas."""

import json
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import small_training

from megatronapp_trainer.errors import DataError, UsageError

RunRanks = Callable[..., list[Any]]

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 4 --lr 1e-3 --eval-iters 1 --hidden-dropout 0 --attention-dropout 0"
)
NOUNS = ["river", "king", "gradient", "pipeline", "step", "loss"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with tokenizer.json, three files of JSON lines, and the same texts in one Parquet file."""
    import pyarrow
    from pyarrow import parquet

    from megatronapp_trainer.data import tokenizer

    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(7)
    documents = [" ".join(draw.choices(NOUNS, k=draw.randint(2, 25))) for _ in range(36)]
    for number in range(3):
        lines = [json.dumps({"id": 0, "text": text}) + "\n" for text in documents[number * 12 : number * 12 + 12]]
        (folder / f"part{number}.jsonl").write_text("".join(lines))
    parquet.write_table(pyarrow.table({"text": documents}), folder / "whole.parquet", row_group_size=5)
    tokenizer.train(documents, 300).backend.save(str(folder / "tokenizer.json"))
    return folder


def flags_of(texts: pathlib.Path) -> str:
    files = " ".join(str(texts / f"part{number}.jsonl") for number in range(3))
    return f"{FLAGS} --tokenizer-file {texts}/tokenizer.json --hf-dataset {files}"


def read(flags: str, microbatches: int, state: str | None, consumed_samples: int) -> tuple[list[list[int]], str]:
    """Tokens of the next microbatches of this rank, row by row, and the state after them."""
    from megatronapp_trainer.training.build import build_iterators

    run = small_training.prepare(flags)
    iterators = build_iterators(run.config, run.layout, consumed_samples, stream_state=state)
    rows = [row for _ in range(microbatches) for row in next(iterators.train)["tokens"].tolist()]
    assert iterators.stream_state is not None
    return rows, iterators.stream_state()


def expected_rows(texts: pathlib.Path, name: str, count: int) -> list[list[int]]:
    """The first samples of a file that is read again and again."""
    from megatronapp_trainer.data import tokenizer

    loaded = tokenizer.load_file(texts / "tokenizer.json")
    documents = [json.loads(line)["text"] for line in (texts / name).read_text().splitlines()]
    tokens = [token for text in documents for token in (*loaded.tokenize(text), loaded.eod)] * 20
    return [tokens[16 * number : 16 * number + 16] for number in range(count)]


@pytest.mark.torch
def test_a_stream_is_resumed_in_the_middle_of_a_document(texts: pathlib.Path, run_ranks: RunRanks) -> None:
    flags = f"{flags_of(texts)} --hf-dataset {texts}/part1.jsonl"

    def call(world: int, *arguments: Any) -> list[Any]:
        return run_ranks(world, read, *arguments, environment=OFFLINE)

    ((whole, _),) = call(1, flags, 24, None, 0)
    assert whole == expected_rows(texts, "part1.jsonl", 48), "in order, and again from the beginning"
    ((first, state),) = call(1, flags, 9, None, 0)
    ((later, _),) = call(1, flags, 15, state, 18)
    assert [*first, *later] == whole
    ((ahead, _),) = call(1, f"{flags} --num-workers 0", 24, None, 0)
    assert ahead == whole


@pytest.mark.torch
def test_readers_are_shared_by_any_number_of_replicas(texts: pathlib.Path, run_ranks: RunRanks) -> None:
    """Two readers of one replica, or of two, give the same microbatches, also where it changes after a checkpoint."""
    flags = f"{flags_of(texts)} --hf-readers 2"

    def call(world: int, *arguments: Any) -> list[Any]:
        return run_ranks(world, read, *arguments, environment=OFFLINE)

    ((alone, state),) = call(1, flags, 8, None, 0)
    together = call(2, flags, 4, None, 0)
    pairs = [row for step in range(4) for rows, _ in together for row in rows[2 * step : 2 * step + 2]]
    assert pairs == alone
    assert {found for _, found in together} == {state}
    ((_, after_first),) = call(1, flags, 1, None, 0)  # then the second reader has its turn, on the first replica
    resumed = call(2, flags, 2, after_first, 2)
    assert [row for step in range(2) for rows, _ in resumed for row in rows[2 * step : 2 * step + 2]] == alone[2:10]


def requested_hosts(flags: str) -> list[str]:
    """Names of hosts that are requested while local files are read, without variables that forbid it."""
    import socket

    from megatronapp_trainer.training.build import build_iterators

    run, hosts = small_training.prepare(flags), []

    def refuse(host: str, *_arguments: object, **_options: object) -> None:
        hosts.append(host)
        raise OSError(f"{host} is requested")

    socket.getaddrinfo = refuse  # type: ignore[assignment]
    next(build_iterators(run.config, run.layout, 0).train)
    return hosts


@pytest.mark.torch
def test_local_files_need_no_network(texts: pathlib.Path, run_ranks: RunRanks) -> None:
    (hosts,) = run_ranks(1, requested_hosts, flags_of(texts), environment={"HF_HUB_OFFLINE": "0"})
    assert hosts == []


def trained(flags: str) -> list[float]:
    """Losses of a run that resumes where it can."""
    run, manager = small_training.resumed(flags)
    recorder = small_training.train(run, checkpoints=manager)
    return [] if recorder is None else recorder.losses


@pytest.mark.torch
def test_a_resumed_training_is_the_same_to_the_last_bit(
    texts: pathlib.Path, run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    flags = f"{flags_of(texts)} --hf-dataset {texts}/whole.parquet --hf-valid-dataset {texts}/part0.jsonl --save"
    (whole,) = run_ranks(1, trained, f"{flags} {tmp_path} --save-interval 2 --eval-interval 2", environment=OFFLINE)
    assert len(whole) == 4
    shutil.rmtree(tmp_path / "iter_0000004")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (resumed,) = run_ranks(1, trained, f"{flags} {tmp_path}", environment=OFFLINE)
    assert resumed == whole[2:]


def losses_until(flags: str, steps: int) -> tuple[int, list[float]]:
    """Train to a step and end as after a kill; return where the run began, and its losses."""
    run, manager = small_training.resumed(flags)
    trainer, began = small_training.trainer_of(run, checkpoints=manager), run.state.iteration
    found = []
    while run.state.iteration < steps:
        outcome = trainer.step()
        found.append(outcome.loss.mean)
        trainer._at_boundary(outcome)
        manager.memory.saves.finish()
    return began, found


@pytest.mark.torch
@pytest.mark.full("the state of readers is one of the values that a save in memory has")
def test_a_training_resumed_from_memory_continues_its_stream(
    texts: pathlib.Path, run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    flags = f"{flags_of(texts)} --hf-dataset {texts}/whole.parquet --save {tmp_path}/save"
    memory = f"--non-persistent-save-interval 2 --non-persistent-local-ckpt-dir {tmp_path}"
    ((_, whole),) = run_ranks(1, losses_until, f"{flags} {memory}", 3, environment=OFFLINE)
    ((began, resumed),) = run_ranks(1, losses_until, f"{flags} {memory}", 3, environment=OFFLINE)
    assert (began, resumed) == (2, whole[2:])


def test_documents_have_their_positions() -> None:
    import numpy as np

    from megatronapp_trainer.data.streaming.readers import TextForm, sample_of

    form = TextForm(flag="--hf-dataset", field="text", sequence_length=6, eod_mask_loss=True, restarts_positions=True)
    sample = sample_of(np.array([5, 0, 7, 8, 0, 9, 4]), 0, form)
    assert sample["position_ids"].tolist() == [0, 1, 0, 1, 2, 0]
    assert sample["loss_mask"].tolist() == [1, 0, 1, 1, 0, 1]
    assert sample["labels"].tolist() == [0, 7, 8, 0, 9, 4]


def failures(cases: list[tuple[str, str | None, int]]) -> list[str]:
    found = []
    for flags, state, consumed in cases:
        try:
            read(flags, 1, state, consumed)
        except (DataError, UsageError) as error:
            found.append(str(error))
        else:
            found.append("")
    return found


@pytest.mark.torch
def test_streams_that_cannot_be_read_are_refused(texts: pathlib.Path, run_ranks: RunRanks) -> None:
    flags = flags_of(texts)
    (texts / "empty.jsonl").write_text("")
    (texts / "broken.jsonl").write_text('{"text": "river"}\n{"text": "king\n')
    other = json.dumps({"microBatchSize": 1, "readers": {"0": None}})
    source = {"names": [f"part{number}.jsonl" for number in range(3)], "split": "train"}
    same = json.dumps({"microBatchSize": 2, "source": source, "readers": {"0": None}})
    cases = {
        (f"{flags} --hf-text-field words", None, 0): "no text in the field 'words', but id, text",
        (f"{flags} --hf-dataset {texts}/none.jsonl {texts}/part0.jsonl", None, 0): "none.jsonl does not exist",
        (
            f"{flags} --hf-dataset {texts}/part0.jsonl {texts}/whole.parquet",
            None,
            0,
        ): "a single format, not json, parquet",
        (f"{flags} --hf-dataset {texts}/tokenizer.json.odd", None, 0): "tokenizer.json.odd does not exist",
        (f"{flags} --hf-dataset none.jsonl", None, 0): "none.jsonl does not exist",
        (f"{flags} --hf-dataset {texts} {texts}", None, 0): "takes a single folder",
        (f"{flags} --hf-dataset {texts}/empty.jsonl", None, 0): "empty.jsonl is empty",
        (f"{flags} --hf-dataset {texts}/broken.jsonl", None, 0): "--hf-dataset cannot be read: JSON parse error",
        (f"{flags} --hf-split odd", None, 0): "cannot be opened with --hf-split odd: Bad split",
        (flags, None, 2): "no state of --hf-dataset",
        (flags, other, 0): "--micro-batch-size was 1",
        (f"{flags} --hf-dataset {texts}/whole.parquet", same, 0): "not of whole.parquet (split train)",
        (f"{flags} --hf-readers 2", same, 0): "--hf-readers is 2, but the stream of the checkpoint has 1",
    }
    (found,) = run_ranks(1, failures, list(cases), environment=OFFLINE)
    for text, expected in zip(found, cases.values(), strict=True):
        assert expected in text


def test_missing_files_are_found_before_anything_starts(texts: pathlib.Path) -> None:
    from megatronapp_trainer.training.check import find_problems

    assert find_problems(flags_of(texts).split(), 1) == []
    (problem,) = find_problems([*flags_of(texts).split(), "--hf-valid-dataset", f"{texts}/part9.jsonl"], 1)
    assert problem.flags == ("--hf-valid-dataset",)
    assert "part9.jsonl does not exist" in problem.message


REFUSALS = {
    "--hf-dataset a": "needs the tokenizer",
    "--data-path b --hf-text-field body": "--hf-text-field needs --hf-dataset",
    "--hf-dataset a --data-path b --tokenizer-file t": "a data path cannot be combined",
    "--hf-dataset a --tokenizer-file t --full-validation": "--full-validation cannot be combined",
    "--hf-dataset a --tokenizer-file t --hf-readers 3": "must divide the microbatches",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_flags_that_exclude_streams_are_refused(flags: str) -> None:
    from megatronapp_trainer.config import parse

    with pytest.raises(UsageError, match=REFUSALS[flags]):
        parse(f"{FLAGS} --vocab-size 8 {flags}".split())


@pytest.fixture
def loaded(texts: pathlib.Path) -> Any:
    """The tokenizer of the texts."""
    from megatronapp_trainer.data import tokenizer

    return tokenizer.load_file(texts / "tokenizer.json")


def reader(loaded: Any, path: pathlib.Path, state: Any = None, length: int = 8) -> Any:
    """A reader of a whole data set."""
    from megatronapp_trainer.data.streaming.readers import TextForm, TextReader
    from megatronapp_trainer.data.streaming.sources import open_parts

    form = TextForm(
        flag="--hf-dataset", field="text", sequence_length=length, eod_mask_loss=False, restarts_positions=False
    )
    open_part = open_parts("--hf-dataset", [str(path)], "train", 1)
    return TextReader(lambda: open_part(0), loaded, form, state)


def documents_of(loaded: Any, path: pathlib.Path, tokens: int) -> list[str]:
    """The documents among the first tokens of a stream, of which the last one may be a part."""
    found = reader(loaded, path, length=tokens).next_sample()["tokens"].tolist()
    return str(loaded.detokenize(found)).split("<|endoftext|>")


@pytest.mark.parametrize("whole_folder", [False, True])
def test_a_text_file_is_a_document_with_its_lines(loaded: Any, tmp_path: pathlib.Path, whole_folder: bool) -> None:
    contents = ["river king\n\n  step\n", "loss\n"]
    for number, text in enumerate(contents):
        (tmp_path / f"{number}.txt").write_text(text)
    if whole_folder:
        assert documents_of(loaded, tmp_path, 80)[:3] == [*contents, contents[0]]
    else:
        assert documents_of(loaded, tmp_path / "0.txt", 60)[:2] == [contents[0]] * 2


def test_a_text_file_that_is_too_large_is_refused(
    loaded: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatronapp_trainer.data.streaming import sources

    monkeypatch.setattr(sources, "_LARGEST_TEXT_BYTES", 1 << 20)
    (tmp_path / "a.txt").write_text("king " * (1 << 18))
    for path in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(UsageError, match=r"a\.txt has 1 MiB: a \.txt is a single document.*data prepare"):
            reader(loaded, path)


def test_text_cannot_forge_the_end_of_a_document(loaded: Any, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "river <|endoftext|> king"}) + "\n")
    tokens = reader(loaded, tmp_path / "a.jsonl", length=80).next_sample()["tokens"].tolist()
    assert loaded.detokenize(tokens[: tokens.index(loaded.eod)]) == "river <|endoftext|> king"


def test_examples_without_text_are_skipped_and_counted(
    loaded: Any, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(name: str, texts: list[str | None]) -> pathlib.Path:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return tmp_path / name

    with_nulls = write("nulls.jsonl", ["river king", None, None, "step loss gradient", *[None] * 9, "king"])
    plain = write("plain.jsonl", ["river king", "step loss gradient", "king"])
    expected = reader(loaded, plain)
    rows = [expected.next_sample()["tokens"].tolist() for _ in range(12)]
    ours, states = reader(loaded, with_nulls), []
    for row in rows:
        states.append(ours.state())
        assert ours.next_sample()["tokens"].tolist() == row
    for number, state in enumerate(states):
        again = reader(loaded, with_nulls, json.loads(json.dumps(state)))
        assert [again.next_sample()["tokens"].tolist() for _ in rows[number:]] == rows[number:]
    assert "1 examples skipped, whose 'text' is null" in caplog.text
    assert "10 examples skipped" in caplog.text
    with pytest.raises(DataError, match="no examples with text"):
        reader(loaded, write("none.jsonl", [None] * 3)).next_sample()


@pytest.mark.torch
def test_a_folder_that_changed_is_another_source(
    texts: pathlib.Path, run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "a"
    (folder / "train").mkdir(parents=True)
    for number in range(2):
        shutil.copy(texts / f"part{number}.jsonl", folder / "train")
    flags = f"{flags_of(texts)} --hf-dataset"

    def resumed() -> str:
        (tmp_path / "b").mkdir(exist_ok=True)
        (found,) = run_ranks(1, failures, [(f"{flags} {tmp_path}/b/a", state, 2)], environment=OFFLINE)
        return str(found[0])

    ((_, state),) = run_ranks(1, read, f"{flags} {folder}", 1, None, 0, environment=OFFLINE)
    shutil.copytree(folder, tmp_path / "b" / "a")
    (tmp_path / "b" / "a" / "README.md").write_text("no data")
    assert resumed() == "", "another place of the folder is the same source"
    shutil.copy(texts / "part2.jsonl", tmp_path / "b" / "a" / "train")
    assert "a (split train), 3 files of" in resumed()
    (tmp_path / "b" / "a" / "train" / "part2.jsonl").unlink()
    (tmp_path / "b" / "a" / "train" / "part1.jsonl").rename(tmp_path / "b" / "a" / "train" / "part3.jsonl")
    assert "not of the files there now, whose names or sizes differ, so it cannot be continued" in resumed()


@pytest.mark.torch
def test_a_stream_of_lines_of_text_is_not_continued(
    texts: pathlib.Path, run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "a.txt").write_text("river\nking\n")
    earlier = {"microBatchSize": 2, "source": {"names": ["a.txt"], "split": "train"}, "readers": {"0": None}}
    case = (f"{flags_of(texts)} --hf-dataset {tmp_path}/a.txt", json.dumps(earlier), 2)
    (found,) = run_ranks(1, failures, [case], environment=OFFLINE)
    assert "each line of a .txt was a document" in found[0]
