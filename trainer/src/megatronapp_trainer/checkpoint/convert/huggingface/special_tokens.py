"""Tokens that transformers puts around a text, and those that end one, by the files of a Hugging Face folder.

As transformers 5 does: the post-processor of tokenizer.json defines which are added; where there are only vocab.json
and merges.txt, add_bos_token and add_eos_token of tokenizer_config.json do. The tokens that end a text are those of
generation_config.json, or without that file those of config.json.
"""

import json
import pathlib
from typing import Any

from megatronapp_trainer.checkpoint.convert.families.config_keys import ConfigKeys
from megatronapp_trainer.checkpoint.convert.huggingface.folder import CONFIG
from megatronapp_trainer.data import tokenizer as tokenizers
from megatronapp_trainer.data.text_tokens import TextTokens
from megatronapp_trainer.data.tokenizer import Tokenizer
from megatronapp_trainer.errors import CheckpointError

GENERATION = "generation_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_MAP = "special_tokens_map.json"


def text_tokens_of(folder: pathlib.Path) -> TextTokens:
    """Derive the text tokens from the files in a folder; absent files are skipped.

    Raises:
        CheckpointError: a file cannot be read, or a key is not the id of a token.
        DataError: the tokenizer cannot be read.
    """
    before, after = _around(folder)
    return TextTokens(before=before, after=after, ends=_ends(folder))


def _around(folder: pathlib.Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if (folder / "tokenizer.json").is_file():
        return _of_post_processor(tokenizers.load_file(folder))
    if not (folder / "vocab.json").is_file() or not (folder / "merges.txt").is_file():
        return (), ()
    tokenizer = tokenizers.load_gpt2(folder / "vocab.json", folder / "merges.txt")
    keys = _keys(folder / _TOKENIZER_CONFIG)
    before, after = (
        _named(tokenizer, folder, kind) if keys.yes(f"add_{kind}_token", False) else () for kind in ("bos", "eos")
    )
    return before, after


def _of_post_processor(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that encoding adds around a text without special tokens."""
    text = "a"
    plain = tokenizer.tokenize(text)
    full = tokenizer.backend.encode(text, add_special_tokens=True).ids
    places = [place for place in range(len(full)) if full[place : place + len(plain)] == plain]
    if not plain or not places:
        return (), ()
    return tuple(full[: places[0]]), tuple(full[places[0] + len(plain) :])


def _named(tokenizer: Tokenizer, folder: pathlib.Path, kind: str) -> tuple[int, ...]:
    """Return the token that the settings call `bos` or `eos`, or its id in config.json; empty without both."""
    for name in (_TOKENIZER_CONFIG, _SPECIAL_MAP):
        given = _keys(folder / name).get(f"{kind}_token")
        text = given.get("content") if isinstance(given, dict) else given
        if isinstance(text, str):
            found = tokenizer.vocab.get(text)
            return () if found is None else (found,)
    return _ids(_keys(folder / CONFIG), f"{kind}_token_id")[:1]


def _ends(folder: pathlib.Path) -> tuple[int, ...]:
    generation = _keys(folder / GENERATION)
    return _ids(generation, "eos_token_id") or _ids(_keys(folder / CONFIG), "eos_token_id")


def _ids(keys: ConfigKeys, key: str) -> tuple[int, ...]:
    value = keys.get(key, [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise keys.refusal(key, value, "the id of a token, or a list of ids, is needed")
    return tuple(token for token in ids if token >= 0)


def _keys(path: pathlib.Path) -> ConfigKeys:
    """Read a file of settings; empty if it does not exist."""
    if not path.is_file():
        return ConfigKeys({}, str(path))
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); is the download complete?") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object; is the download complete?")
    return ConfigKeys(values, str(path))
