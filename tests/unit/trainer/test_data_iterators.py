"""Batches of a training run over megatron-core's datasets: order, masks, resumes, evaluation, and refusals."""

import json
import os
import pathlib
import random
import shutil
import socket
import warnings
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import pytest

from megatronapp_trainer.errors import StorageError

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 6 --lr 1e-3 --eval-iters 2 --split 80,20,0"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with tokenizer.json and the corpora a and b."""
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(3)
    vocabulary = ["stage", "rank", "step", "loss", "gradient", "pipeline", "tensor", "micro", "batch", "optimizer"]
    for name in ("a", "b"):
        texts = [" ".join(generator.choices(vocabulary, k=generator.randint(3, 30))) for _ in range(60)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    common: dict[str, Any] = {"append_eod": True}
    prepare(PrepareOptions(inputs=(str(folder / "a.jsonl"),), output=str(folder / "a"), train_vocab_size=300, **common))
    tokenizer = str(folder / "tokenizer.json")
    prepare(
        PrepareOptions(inputs=(str(folder / "b.jsonl"),), output=str(folder / "b"), tokenizer_file=tokenizer, **common)
    )
    return folder


@pytest.fixture
def flags(corpus: pathlib.Path) -> str:
    return f"{FLAGS} --tokenizer-file {corpus}/tokenizer.json --data-path {corpus}/a_text_document"


@pytest.fixture
def call(run_ranks: RunRanks) -> RunRanks:
    def run(world: int, function: Callable[..., Any], *arguments: Any, **environment: str) -> list[Any]:
        return run_ranks(world, function, *arguments, environment=environment)

    return run


def open_iterators(
    flags: str,
    consumed_samples: int = 0,
    filtered: Literal["ignore", "always"] = "ignore",
    order_samples: int | None = None,
) -> Any:
    warnings.simplefilter(filtered)
    import torch.distributed as dist

    from megatronapp_trainer.config import parse
    from megatronapp_trainer.data.iterators import build_train_valid_test_iterators
    from megatronapp_trainer.training.build import layout_of

    config = parse(flags.split())
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return build_train_valid_test_iterators(config, layout_of(config), consumed_samples, order_samples=order_samples)


def rows(flags: str, microbatches: int, consumed_samples: int = 0, split: str = "train") -> list[list[int]]:
    """Tokens of this rank's next microbatches, row by row."""
    iterator = getattr(open_iterators(flags, consumed_samples), split)
    return [row for _ in range(microbatches) for row in next(iterator)["tokens"].tolist()]


def orders_of_a_ramp_up(flags: str) -> list[list[list[int]]]:
    """The first samples of a run in full batches, and of its ramp-up in the order of that run and in its own."""
    found = []
    ramp = "--rampup-batch-size 2 2 200"
    for more, order_samples in (("", None), (ramp, 60 * 8), (ramp, None)):
        iterator = open_iterators(f"{flags} --train-iters 60 {more}", order_samples=order_samples).train
        found.append([row for _ in range(12) for row in next(iterator)["tokens"].tolist()])
    return found


def interleaved(ranks: list[list[list[int]]], microbatches: int) -> list[list[int]]:
    """Rows of all replicas in the order of global samples."""
    pairs = [rank[2 * step : 2 * step + 2] for step in range(microbatches) for rank in ranks]
    return [list(row) for pair in pairs for row in pair]


def test_replicas_split_a_common_order(flags: str, call: RunRanks) -> None:
    (alone,) = call(1, rows, flags, 8)
    together = call(2, rows, flags, 4)
    assert interleaved(together, 4) == [list(row) for row in alone]


def test_a_resume_with_another_number_of_replicas_continues_the_order(flags: str, call: RunRanks) -> None:
    (alone,) = call(1, rows, flags, 8)
    later = call(2, rows, flags, 2, 8)
    assert interleaved(later, 2) == [list(row) for row in alone[8:]]


def test_reading_ahead_changes_nothing(flags: str, call: RunRanks) -> None:
    (plain,) = call(1, rows, f"{flags} --num-workers 0", 6)
    (ahead,) = call(1, rows, f"{flags} --num-workers 3", 6)
    assert plain == ahead


def test_a_ramp_up_may_keep_the_order_of_an_earlier_count(flags: str, call: RunRanks) -> None:
    ((full, continued, own),) = call(1, orders_of_a_ramp_up, flags)
    assert continued == full
    assert own != full  # else this corpus does not show it


def warnings_of_building(flags: str) -> list[str]:
    """Return the warnings while the datasets are built on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        open_iterators(flags, filtered="always")
    return [str(warning.message) for warning in caught]


def test_no_rank_warns_of_a_padding_token_that_there_is_not(flags: str, call: RunRanks) -> None:
    for messages in call(2, warnings_of_building, flags):
        assert not [text for text in messages if "pad token" in text]


def test_every_evaluation_sees_the_same(flags: str, call: RunRanks) -> None:
    """Two evaluations of 2 x 8 samples: 8 microbatches of one process, 4 of each of two."""
    (alone,) = call(1, rows, flags, 16, 0, "valid")
    assert alone[:16] == alone[16:]
    assert alone[:8] != alone[8:16]
    together = call(2, rows, flags, 4, 24, "valid")
    assert interleaved(together, 4) == [list(row) for row in alone[:16]]


def shapes(flags: str) -> tuple[Any, ...]:
    """A batch as lists, whether random numbers were drawn, and which splits there are."""
    import torch

    before = torch.get_rng_state()
    iterators = open_iterators(flags)
    batch = next(iterators.train)
    untouched = bool(torch.equal(before, torch.get_rng_state()))
    types = {name: str(value.dtype) for name, value in batch.items() if value is not None}
    values = {name: None if value is None else value.tolist() for name, value in batch.items()}
    return types, values, untouched, iterators.valid is not None, iterators.test is not None


def test_a_batch(flags: str, call: RunRanks) -> None:
    ((types, values, untouched, valid, test),) = call(1, shapes, flags)
    assert types == {
        "tokens": "torch.int64",
        "labels": "torch.int64",
        "loss_mask": "torch.float32",
        "position_ids": "torch.int64",
    }
    for tokens, labels in zip(values["tokens"], values["labels"], strict=True):
        assert tokens[1:] == labels[:-1]
    assert values["loss_mask"] == [[1.0] * 16] * 2
    assert values["position_ids"] == [list(range(16))] * 2
    assert untouched
    assert (valid, test) == (True, False)


@pytest.mark.parametrize("reset", ["--reset-position-ids", "--reset-attention-mask"])
def test_masks_and_positions_within_documents(flags: str, call: RunRanks, reset: str) -> None:
    """Compare with a slow, direct construction from the tokens."""
    resets = f"--eod-mask-loss {reset} --micro-batch-size 8"
    ((_, values, *_),) = call(1, shapes, f"{flags} {resets}")
    eod, ends = 0, 0
    for row, tokens in enumerate(values["tokens"]):
        document = [tokens[:place].count(eod) for place in range(16)]
        ends += document[-1]
        starts = [document.index(number) for number in document]
        assert values["loss_mask"][row] == [0.0 if token == eod else 1.0 for token in tokens]
        assert values["position_ids"][row] == [place - start for place, start in enumerate(starts)]
    assert ends > 0


def test_blends_hold_both_corpora(flags: str, call: RunRanks, corpus: pathlib.Path) -> None:
    blend = f"{flags} --data-path 1 {corpus}/a_text_document 3 {corpus}/b_text_document"
    (mixed,) = call(1, rows, blend, 8)
    (single,) = call(1, rows, flags, 8)
    per_split = flags.replace("--data-path", "--train-data-path").replace("--split 80,20,0", "")
    (whole,) = call(1, rows, f"{per_split} --valid-data-path {corpus}/b_text_document", 8, 0, "valid")
    assert mixed != single
    assert len(whole) == 16


def off_tensor_rank(flags: str) -> tuple[list[Any], bool]:
    """Return what a rank's training iterator holds at first, and whether the rank has a validation iterator."""
    iterators = open_iterators(f"{flags} --tensor-model-parallel-size 2")
    return [batch["tokens"].tolist() for batch in [next(iterators.train, None)] if batch], iterators.valid is not None


def test_only_the_first_of_a_tensor_group_reads(flags: str, call: RunRanks) -> None:
    first, second = call(2, off_tensor_rank, flags)
    assert (len(first[0]), first[1]) == (1, True)
    assert (len(second[0]), second[1]) == (0, True)


def test_nodes_need_no_common_cache(flags: str, call: RunRanks, tmp_path: pathlib.Path) -> None:
    """Treat each rank as a node, with a separate cache; both orders are the same as those of one process."""
    (alone,) = call(1, rows, flags, 4)
    together = call(2, rows_with_own_cache, flags, str(tmp_path), 2)
    assert interleaved(together, 2) == [list(row) for row in alone]
    assert {path.name for path in tmp_path.iterdir()} == {"node0", "node1"}


def rows_with_own_cache(flags: str, folder: str, microbatches: int) -> list[list[int]]:
    import os

    rank, os.environ["LOCAL_RANK"] = os.environ["RANK"], "0"
    return rows(f"{flags} --data-cache-path {folder}/node{rank}", microbatches)


def test_the_cache_is_used_and_left_tidy(flags: str, call: RunRanks, tmp_path: pathlib.Path) -> None:
    cached = f"{flags} --data-cache-path {tmp_path}"
    first = call(2, rows, cached, 2)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert call(2, rows, cached, 2) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == files
    assert not list(tmp_path.rglob(".building*"))


REFUSALS = {
    "--data-path {folder}/none_text_document": "does not exist",
    "--data-path {folder}/cut_text_document": "requires",
    "--seq-length 4096 --max-position-embeddings 4096": "fewer than one sample",
    "--split 999,1,0": "the valid part of",
    "--split 0,100,0": "training has no data",
    "--split nonsense": "--split nonsense",
    "--data-path 1 {folder}/a_text_document 2": "WEIGHT PREFIX",
    "--vocab-size 5": "--vocab-size 5 is below",
    "--data-cache-path /proc/nowhere": "--data-cache-path",
}
"""More flags, and a part of the error."""


def refusals(flags: list[str]) -> list[tuple[str, str]]:
    """Return kind and text of the error of each."""
    found = []
    for more in flags:
        try:
            next(open_iterators(more).train)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(("", ""))
    return found


def test_every_rank_learns_why_the_data_is_unusable(flags: str, call: RunRanks, corpus: pathlib.Path) -> None:
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus / f"a_text_document{suffix}", corpus / f"cut_text_document{suffix}")
    with open(corpus / "cut_text_document.bin", "r+b") as stream:
        stream.truncate(100)
    cases = [f"{flags} {more.format(folder=corpus)}" for more in REFUSALS]
    for found in call(2, refusals, cases):
        for (kind, text), (more, message) in zip(found, REFUSALS.items(), strict=True):
            assert kind in ("DataError", "UsageError", "StorageError"), more
            assert message in text, more


def test_tokens_beyond_the_vocabulary(flags: str, call: RunRanks, corpus: pathlib.Path) -> None:
    """Check that without the note of `data prepare` the ends of the corpus are inspected, and every batch."""
    for suffix in (".bin", ".idx"):
        shutil.copy(corpus / f"a_text_document{suffix}", corpus / f"bare_text_document{suffix}")
    bare = f"{FLAGS} --data-path {corpus}/bare_text_document --vocab-size 20"
    (((kind, text),),) = call(1, refusals, [bare])
    assert kind == "DataError"
    assert "the vocabulary has 20" in text


def test_what_a_killed_build_left_is_not_read(flags: str, call: RunRanks, tmp_path: pathlib.Path) -> None:
    """Build as a container that starts again does: its name and process id are those of the killed builder."""
    cached = f"{flags} --data-cache-path {tmp_path}"
    expected = call(1, rows, cached, 2)
    (cache,) = tmp_path.iterdir()
    stage = cache / f".building-{socket.gethostname()}-{os.getpid()}"
    stage.mkdir()
    for file in cache.glob("*.npy"):
        file.replace(stage / file.name)
        os.truncate(stage / file.name, 10)
    for description in cache.glob("*.txt"):
        (stage / description.name).symlink_to(description)
    assert call(1, rows_of_process, cached, 2, os.getpid()) == expected
    assert stage.exists(), "another builder may still be at work in it"
    for path in (*stage.iterdir(), stage):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    for file in cache.glob("*.npy"):
        file.unlink()
    assert call(1, rows_of_process, cached, 2, os.getpid()) == expected
    assert not stage.exists()


def rows_of_process(flags: str, microbatches: int, process: int) -> list[list[int]]:
    """Return `rows` in a process that has this id."""
    with mock.patch("os.getpid", return_value=process):
        return rows(flags, microbatches)


def test_a_cache_that_cannot_be_written_is_a_failure_of_storage(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.data.index_cache import staged

    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--data-cache-path"), staged(tmp_path / "file" / "cache"):
        pass
    with pytest.raises(StorageError, match="No space left"), staged(tmp_path / "cache"):
        raise OSError(28, "No space left on device")
    assert not list((tmp_path / "cache").iterdir())


def test_corpora_without_ends_of_documents_cannot_be_divided_at_them(
    flags: str, call: RunRanks, corpus: pathlib.Path
) -> None:
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions, prepare

    tokenizer = str(corpus / "tokenizer.json")
    options = PrepareOptions(inputs=(f"{corpus}/a.jsonl",), output=f"{corpus}/endless", tokenizer_file=tokenizer)
    prepare(options)
    endless = f"{flags} --data-path {corpus}/endless_text_document"
    found = call(1, refusals, [f"{endless} {flag}" for flag in ("--eod-mask-loss", "--reset-attention-mask", "")])
    for kind, text in found[0][:2]:
        assert kind == "DataError"
        assert "endless_text_document.bin has no token that ends its documents" in text
        assert "--append-eod --overwrite" in text
    assert found[0][2] == ("", "")


def logged_of_building(flags: str) -> list[str]:
    """Return the warnings that are logged while the datasets are built on this rank."""
    import logging

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatronapp_trainer").addHandler(handler)
    open_iterators(flags)
    return messages


def test_corpora_that_repeat_in_the_same_order_are_named(flags: str, call: RunRanks, corpus: pathlib.Path) -> None:
    both = f"{flags} --train-iters 60 --data-path {corpus}/a_text_document {corpus}/b_text_document"
    weighted = f"{flags} --train-iters 60 --data-path 1 {corpus}/a_text_document 1 {corpus}/b_text_document"
    once = f"{flags} --train-iters 1 --data-path {corpus}/a_text_document {corpus}/b_text_document"
    (repeated,), (shuffled,), (single,), (short,) = (
        call(1, logged_of_building, case) for case in (both, weighted, f"{flags} --train-iters 60", once)
    )
    (message,) = repeated
    assert "times those of its 2 corpora, each time in the same order" in message
    assert message.startswith("training takes 480 samples")
    assert shuffled == single == short == []
