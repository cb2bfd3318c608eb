"""Files next to a tokenizer that say which tokens are special, as Hugging Face models have them."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from megatronapp_trainer.errors import DataError

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"


def special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """Return texts of special tokens by name, such as `eos_token`; empty if no file names any.

    Raises DataError for files that cannot be read.
    """
    return _tokens(read_json(folder / SPECIAL_MAP)) | _tokens(read_json(folder / CONFIG))


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object of a file, empty if it does not exist. Raises DataError if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object; copy it again")
    return found


def read_text(path: pathlib.Path) -> str:
    """Return the text of a file. Raises DataError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}); copy it again") from error


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    given = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
