"""Batches of BERT over megatron-core's dataset of masked texts: contents, order, readers, refusals."""

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import bert_corpus
import pytest
import small_training

pytestmark = pytest.mark.torch

RunRanks = Callable[..., list[Any]]

LENGTH = 64
FLAGS = (
    f"--model-type bert --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length {LENGTH} "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-3 --eval-iters 1 --split 80,20,0"
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a corpus of sentences."""
    from megatronapp_trainer.data.prepare.prepare import PrepareOptions, prepare

    folder = tmp_path_factory.mktemp("bert")
    bert_corpus.write_vocabulary(folder / "vocab.txt")
    bert_corpus.write_documents(folder / "text.jsonl", 60)
    tokenizer: dict[str, Any] = {"vocab_file": str(folder / "vocab.txt"), "tokenizer_type": "BertWordPieceLowerCase"}
    inputs = (str(folder / "text.jsonl"),)
    prepare(PrepareOptions(inputs=inputs, output=str(folder / "a"), sentences_of="en", **tokenizer))
    prepare(PrepareOptions(inputs=inputs, output=str(folder / "whole"), **tokenizer))
    return (
        f"{FLAGS} --tokenizer-type BertWordPieceLowerCase --vocab-file {folder}/vocab.txt "
        f"--data-path {folder}/a_text_sentence"
    )


def open_iterators(flags: str, consumed_samples: int = 0) -> Any:
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    from megatronapp_trainer.config import parse
    from megatronapp_trainer.data.iterators import build_train_valid_test_iterators
    from megatronapp_trainer.training.build import layout_of

    config = parse(flags.split())
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return build_train_valid_test_iterators(config, layout_of(config), consumed_samples)


def batches(flags: str, count: int, consumed_samples: int = 0) -> list[dict[str, list[Any]]]:
    """Return the fields of this rank's next microbatches as lists."""
    iterator = open_iterators(flags, consumed_samples).train
    return [{name: values.tolist() for name, values in next(iterator).items()} for _ in range(count)]


def samples(found: list[dict[str, list[Any]]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, row, strict=True)) for batch in found for row in zip(*batch.values(), strict=True)]


def restored(sample: dict[str, Any]) -> list[int]:
    """Return the tokens of a sample before they were masked."""
    columns = zip(sample["tokens"], sample["labels"], sample["loss_mask"], strict=True)
    return [label if counted else token for token, label, counted in columns][: sum(sample["padding_mask"])]


def test_a_sample_is_two_texts_of_a_document_with_masked_tokens(flags: str, run_ranks: RunRanks) -> None:
    vocabulary = pathlib.Path(flags.split("--vocab-file ")[1].split(maxsplit=1)[0]).read_text().split()
    cls, sep = vocabulary.index("[CLS]"), vocabulary.index("[SEP]")
    (found,) = run_ranks(1, batches, flags, 24)
    masked = tokens = 0
    seen = set()
    for sample in samples(found):
        whole = restored(sample)
        ends = [place for place, token in enumerate(whole) if token == sep]
        assert whole[0] == cls and len(ends) == 2 and ends[1] == len(whole) - 1
        assert sample["token_types"][: len(whole)] == [0] * (ends[0] + 1) + [1] * (ends[1] - ends[0])
        assert not any(sample[name][place] for name in ("tokens", "loss_mask") for place in range(len(whole), LENGTH))
        for place in range(1, len(whole)):
            if vocabulary[whole[place]].startswith("##") and whole[place - 1] not in (cls, sep):
                assert sample["loss_mask"][place] == sample["loss_mask"][place - 1], "a part of a word is masked alone"
        masked += sum(sample["loss_mask"])
        tokens += len(whole)
        seen.add(sample["swapped"])
    assert 0.1 < masked / tokens < 0.2
    assert seen == {0, 1}


def test_replicas_and_resumes_continue_a_common_order(flags: str, run_ranks: RunRanks) -> None:
    (alone,) = run_ranks(1, batches, flags, 8)
    together = run_ranks(2, batches, flags, 4)
    assert [batch for step in zip(*together, strict=True) for batch in step] == alone
    (resumed,) = run_ranks(1, batches, f"{flags} --num-workers 0", 4, 8)
    assert resumed == alone[4:]


def trained(flags: str) -> list[float]:
    """Losses of a training."""
    recorder = small_training.train(small_training.prepare(flags))
    assert recorder is not None
    return recorder.losses


def test_a_corpus_is_learned(flags: str, run_ranks: RunRanks) -> None:
    more = "--global-batch-size 16 --micro-batch-size 8 --train-iters 12 --lr 1e-2 --lr-decay-style constant"
    (losses,) = run_ranks(1, trained, f"{flags} {more} --eval-iters 0 --attention-dropout 0 --hidden-dropout 0")
    assert losses[-1] < losses[0] - 0.5


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


def test_unusable_corpora_are_refused_before_megatron_reads_them(
    flags: str, run_ranks: RunRanks, tmp_path: pathlib.Path
) -> None:
    tokens = bert_corpus.write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "last.txt").write_text("\n".join([*tokens[1:], tokens[0]]), encoding="utf-8")
    of_vocabulary = flags.split("--vocab-file ")[1].split(maxsplit=1)[0]
    cases = {
        flags.replace("a_text_sentence", "whole_text_document"): "none with 2 or more sentences of at most 512 tokens",
        flags.replace(of_vocabulary, str(tmp_path / "last.txt")): "[PAD] is line",
        flags.replace("LowerCase", "Case"): "was tokenised with another tokenizer",
        flags.replace("a_text_sentence", "whole_text_document") + " --bert-no-binary-head": "",
    }
    (found,) = run_ranks(1, refusals, list(cases))
    for (kind, text), message in zip(found, cases.values(), strict=True):
        assert kind == ("DataError" if message else ""), text
        assert message in text
