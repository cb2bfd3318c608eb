"""Tokenizers from files and from text, and what is said about files that are none."""

import json
import pathlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from megatronapp_trainer.config import DataConfig
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.vocabulary import load_vocabulary
from megatronapp_trainer.errors import DataError, UsageError

CORPUS = ["def forward(self, hidden):\n    return self.norm(hidden)\n", "the quick brown fox\n"] * 30


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    return tokenizers.train(CORPUS, 320)


@pytest.fixture(scope="module")
def files(trained: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """tokenizer.json, vocab.json and merges.txt of the same tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.backend.save(str(folder / "tokenizer.json"))
    trained.backend.model.save(str(folder))
    return folder


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives_tokenising_and_detokenising(trained: tokenizers.Tokenizer, text: str) -> None:
    assert trained.detokenize(trained.tokenize(text)) == text


def test_a_trained_tokenizer(trained: tokenizers.Tokenizer) -> None:
    assert trained.vocab_size <= 320
    assert trained.eod == trained.vocab["<|endoftext|>"] == 0
    assert trained.digest == tokenizers.train(CORPUS, 320).digest


def test_offsets(trained: tokenizers.Tokenizer) -> None:
    text = "the fox"
    ids = trained.tokenize(text)
    starts = trained.offsets(ids, text)
    assert starts[0] == 0
    assert starts == sorted(starts)
    with pytest.raises(DataError, match="not the tokens"):
        trained.offsets([*ids, 1], text)


def test_both_kinds_of_files_give_the_same_ids(trained: tokenizers.Tokenizer, files: pathlib.Path) -> None:
    gpt2 = tokenizers.load(
        vocab_file=str(files / "vocab.json"), merge_file=str(files / "merges.txt"), tokenizer_file=None
    )
    single = tokenizers.load(vocab_file=None, merge_file=None, tokenizer_file=str(files))
    for text in CORPUS:
        assert gpt2.tokenize(text) == single.tokenize(text) == trained.tokenize(text)
    assert gpt2.eod == trained.eod
    assert single.digest == trained.digest


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda folder: tokenizers.load_file(folder / "none.json"), "does not exist"),
        (lambda folder: tokenizers.load_file(folder / "broken.json"), "cannot be read as a tokenizer"),
        (lambda folder: tokenizers.load_gpt2(folder / "broken.json", folder / "broken.json"), "cannot be read"),
        (lambda _: tokenizers.load(vocab_file="v", merge_file=None, tokenizer_file=None), "name one tokenizer"),
        (lambda _: tokenizers.train(["text"], 100), "at least 257"),
    ],
)
def test_what_cannot_be_a_tokenizer(
    tmp_path: pathlib.Path, read: Callable[[pathlib.Path], object], message: str
) -> None:
    (tmp_path / "broken.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_a_vocabulary_without_a_tokenizer() -> None:
    vocabulary = load_vocabulary(DataConfig(vocab_size=99))
    assert (vocabulary.vocab_size, vocabulary.digest) == (99, None)
    assert vocabulary.eod < -1, "-1 is megatron-core's padding token, of which it would warn"
    with pytest.raises(UsageError, match="give --tokenizer-file"):
        load_vocabulary(DataConfig())
    with pytest.raises(UsageError, match="end of documents"):
        load_vocabulary(DataConfig(vocab_size=99, eod_mask_loss=True))


def test_a_vocabulary_from_a_tokenizer(files: pathlib.Path, trained: tokenizers.Tokenizer) -> None:
    path = str(files / "tokenizer.json")
    vocabulary = load_vocabulary(DataConfig(tokenizer_file=path, reset_position_ids=True))
    assert (vocabulary.vocab_size, vocabulary.eod) == (trained.vocab_size, trained.eod)
    assert load_vocabulary(DataConfig(tokenizer_file=path, vocab_size=1000)).vocab_size == 1000
    with pytest.raises(DataError, match=rf"--vocab-size 5 is below.*write --vocab-size {trained.vocab_size}, or"):
        load_vocabulary(DataConfig(tokenizer_file=path, vocab_size=5))


def special(folder: pathlib.Path, trained: tokenizers.Tokenizer, names: list[str], plain: list[str]) -> pathlib.Path:
    """Write a tokenizer.json with these special tokens, and these that are added as plain ones."""
    backend = Backend.from_str(trained.backend.to_str().replace("<|endoftext|>", "<pad>"))
    backend.add_tokens([AddedToken(name, special=False) for name in plain])
    backend.add_special_tokens(names)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_the_end_of_documents_is_a_special_token(tmp_path: pathlib.Path, trained: tokenizers.Tokenizer) -> None:
    loaded = tokenizers.load_file(special(tmp_path, trained, ["<bos>", "<eos>"], ["</s>"]))
    assert loaded.eod == loaded.vocab["<eos>"], "as in Gemma's, where </s> is a tag of HTML"
    assert loaded.eod_by_name == loaded.vocab["</s>"]


@pytest.mark.parametrize("end", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}], ids=["text", "object"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_files_next_to_a_tokenizer_name_the_end_of_documents(
    tmp_path: pathlib.Path, trained: tokenizers.Tokenizer, name: str, end: object
) -> None:
    folder = special(tmp_path, trained, ["<|endoftext|>", "<|im_end|>", "</s>"], [])
    (folder / name).write_text(json.dumps({"eos_token": end}))
    loaded = tokenizers.load_file(folder)
    assert loaded.eod == loaded.vocab["<|im_end|>"]


def test_ends_of_documents_that_are_not_clear_are_refused(
    tmp_path: pathlib.Path, trained: tokenizers.Tokenizer
) -> None:
    folder = special(tmp_path, trained, ["<eos>", "</s>"], [])
    with pytest.raises(
        DataError, match=r'several tokens .*: </s>, <eos>; write {"eos_token": "..."} into a tokenizer_c'
    ):
        _ = tokenizers.load_file(folder).eod
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    with pytest.raises(DataError, match=r"eos_token '<end>' of .* is no token"):
        _ = tokenizers.load_file(folder).eod
    (folder / "tokenizer_config.json").write_text('{"eos_token": null}')
    with pytest.raises(DataError, match="no end-of-document token"):
        _ = tokenizers.load_file(special(tmp_path, trained, ["<bos>"], ["</s>"])).eod


def test_without_marks_the_end_of_documents_is_known_by_its_name(
    tmp_path: pathlib.Path, trained: tokenizers.Tokenizer
) -> None:
    """GPT-2's files do not mark special tokens."""
    trained.backend.model.save(str(tmp_path))
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(
        json.dumps(vocabulary | {"</s>": len(vocabulary), "<eos>": len(vocabulary) + 1})
    )
    loaded = tokenizers.load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert loaded.eod == loaded.vocab["<|endoftext|>"]
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    again = tokenizers.load_gpt2(tmp_path / "vocab.json", tmp_path / "merges.txt")
    assert again.eod == again.vocab["<eos>"]
