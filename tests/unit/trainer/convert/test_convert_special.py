"""A converted model gets the tokens around its prompts that transformers gives it, and ends where transformers ends."""

import json
import pathlib
from typing import Any

import pytest
from convert_folder import LLAMA, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megatronapp_trainer.errors import CheckpointError

TEXTS = ["the whale and the ship met at sea", "né à Paris, a b c"]
PROMPTS = ["the whale", "a", "", "ship  at sea\n", "<s>the"]
END, BEGIN = "</s>", "<s>"


def byte_level(*, template: bool) -> Tokenizer:
    """Make a byte-level tokenizer as GPT-2, Qwen2 and Llama 3 have it; Llama 3 with a template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=280, special_tokens=[END, BEGIN], initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    if template:
        begins = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
        made.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begins])
    return made


def sentencepiece_tokenizer(*, template: bool, end: bool = False) -> Tokenizer:
    """Make a tokenizer as Llama 2 and Mistral have it."""
    letters = sorted({letter for text in TEXTS for letter in text.replace(" ", "▁")} | {"▁", "\n", "<", ">"})
    vocab = {name: index for index, name in enumerate(["<unk>", BEGIN, END, *letters])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", BEGIN, END])
    if template:
        single = f"{BEGIN} $A {END}" if end else f"{BEGIN} $A"
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(BEGIN, 1), (END, 2)])
    return made


NAMES = {"bos_token": BEGIN, "eos_token": END}
KINDS: dict[str, tuple[Tokenizer, dict[str, Any]]] = {
    "gpt2": (byte_level(template=False), {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "qwen2": (byte_level(template=False), {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}),
    "llama3": (byte_level(template=True), {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "llama2": (
        sentencepiece_tokenizer(template=True),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, **NAMES},
    ),
    "told so by the settings alone, which tokenizer.json overrules": (
        sentencepiece_tokenizer(template=False),
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **NAMES},
    ),
    "mistral": (sentencepiece_tokenizer(template=True), {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "with an end": (
        sentencepiece_tokenizer(template=True, end=True),
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": {"content": BEGIN, "__type": "AddedToken"}},
    ),
}


def served(folder: pathlib.Path) -> Any:
    from megatronapp_trainer.checkpoint.convert.huggingface.special_tokens import text_tokens_of
    from megatronapp_trainer.data.tokenizer import load_file, load_gpt2
    from megatronapp_trainer.serve.served_model import ServedModel

    pair = folder / "vocab.json", folder / "merges.txt"
    return ServedModel(
        name="m",
        created=0,
        capacity=8,
        vocab_size=300,
        most_prompts=1,
        most_open=1,
        most_tokens=1,
        tokenizer=load_gpt2(*pair) if pair[0].exists() else load_file(folder),
        tokens=text_tokens_of(folder),
    )


def ids_of_transformers(folder: pathlib.Path, prompt: str) -> list[int]:
    import transformers

    theirs: Any = transformers.AutoTokenizer
    ids: list[int] = theirs.from_pretrained(folder)(prompt)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_ids_that_transformers_gives_it(kind: str, tmp_path: pathlib.Path) -> None:
    made, settings = KINDS[kind]
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = served(tmp_path)
    for prompt in PROMPTS:
        if expected := ids_of_transformers(tmp_path, prompt):
            assert list(model.ids_of(prompt)) == expected, prompt


@pytest.mark.parametrize("begins", [True, False])
def test_gpt2_settings_decide_which_special_tokens_are_added(begins: bool, tmp_path: pathlib.Path) -> None:
    made = byte_level(template=False)
    made.model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": begins, "bos_token": END, "eos_token": END}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": END}))
    expected = ids_of_transformers(tmp_path, "the whale")
    assert list(served(tmp_path).ids_of("the whale")) == expected
    assert (expected[0] == 0) == begins


def test_generated_text_starts_with_its_space_and_a_prompt_lists_its_special_tokens(
    tmp_path: pathlib.Path,
) -> None:
    from megatronapp_trainer.serve.served_model import incremental_decoder

    made, _ = KINDS["llama2"]
    made.save(str(tmp_path / "tokenizer.json"))
    model = served(tmp_path)
    ids = model.ids_of("the whale")
    (token_id,) = model.ids_of(" a", special=False)
    assert incremental_decoder(model.tokenizer)([token_id]) == " a" == f" {model.tokenizer.detokenize([token_id])}"
    end = model.end_tokens[0]
    assert (model.decode([token_id, end]), model.decode_plain([token_id, end])) == (" a</s>", " a")
    description = model.describe_prompt("the whale", ids)
    assert description["offsets"][0] is None and description["offsets"][-1] == [8, 9]
    assert model.ids_of("the whale", special=False) == ids[1:]


ENDS = [
    ({"eos_token_id": 7}, None, (7,)),
    ({"eos_token_id": 7}, {"eos_token_id": [3, 5]}, (3, 5)),
    ({"eos_token_id": [7, 8]}, {"bos_token_id": 1}, (7, 8)),
    ({}, None, ()),
]


@pytest.mark.parametrize(("config", "generation", "ends"), ENDS)
def test_the_tokens_that_end_a_text_travel_both_ways(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: tuple[int, ...], tmp_path: pathlib.Path
) -> None:
    from megatronapp_trainer.checkpoint.convert.huggingface.special_tokens import text_tokens_of
    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions
    from megatronapp_trainer.data.text_tokens import read_text_tokens

    write(tmp_path / "hf", LLAMA | config)
    if generation is not None:
        (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    convert(ConversionOptions(load_dir=tmp_path / "hf", save_dir=tmp_path / "ours"))
    folder = tmp_path / "ours" / "iter_0000000"
    assert read_text_tokens(folder).ends == ends
    convert(ConversionOptions(load_dir=folder, save_dir=tmp_path / "again"))
    convert(ConversionOptions(load_dir=folder, save_dir=tmp_path / "other", family="mistral"))
    for made in (tmp_path / "again", tmp_path / "other"):
        assert text_tokens_of(made).ends == ends
    (tmp_path / "other" / "generation_config.json").unlink(missing_ok=True)
    assert text_tokens_of(tmp_path / "other").ends == ends, "a config.json of ours says it too"


def test_a_server_of_a_converted_model_has_its_tokens(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.checkpoint.convert.job import convert
    from megatronapp_trainer.checkpoint.convert.options import ConversionOptions
    from megatronapp_trainer.serve.rank_main import describe
    from megatronapp_trainer.serve.settings import configure, read_command

    made, _ = KINDS["llama3"]
    write(tmp_path / "hf", LLAMA | {"vocab_size": made.get_vocab_size(), "eos_token_id": [0, 7]})
    made.save(str(tmp_path / "hf" / "tokenizer.json"))
    convert(ConversionOptions(load_dir=tmp_path / "hf", save_dir=tmp_path / "ours"))
    command = read_command(["--load", str(tmp_path / "ours")])
    model = describe(command, configure(command))
    assert model.end_tokens == (0, 7)
    assert model.ids_of("") == (1,)
    assert model.ids_of("the whale")[0] == 1


@pytest.mark.parametrize("content", ["", "[]", '{"before": ["<s>"]}', '{"ends": [-1]}', '{"other": [1]}'])
def test_damaged_ids_are_reported(content: str, tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.data.text_tokens import read_text_tokens

    (tmp_path / "text_tokens.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"text_tokens\.json cannot be read .*; convert the model again"):
        read_text_tokens(tmp_path)


def test_an_end_that_is_no_token_is_refused(tmp_path: pathlib.Path) -> None:
    from megatronapp_trainer.checkpoint.convert.huggingface.special_tokens import text_tokens_of

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        text_tokens_of(tmp_path)
