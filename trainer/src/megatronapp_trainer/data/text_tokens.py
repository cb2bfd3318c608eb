"""Tokens that a converted model expects around a text, and those that end one; stored next to its weights.

They are ids, derived once, when a Hugging Face folder is converted: there they follow from several files together
(tokenizer.json, tokenizer_config.json, generation_config.json, config.json). A model that was trained here has no such
tokens: its documents are joined without any, and the tokenizer's end-of-document token ends a text.
"""

import json
import pathlib
from dataclasses import asdict, dataclass

from megatronapp_trainer.errors import CheckpointError

FILE = "text_tokens.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokens:
    """Ids of tokens around a text and at its end."""

    before: tuple[int, ...] = ()
    """Tokens in front of every prompt that is given as a text, as Llama's <|begin_of_text|>."""
    after: tuple[int, ...] = ()
    """Tokens at the end of every such prompt; models that generate have none as a rule."""
    ends: tuple[int, ...] = ()
    """Tokens each of which ends the generated text; empty: the tokenizer's end-of-document token does."""

    def write(self, folder: pathlib.Path) -> None:
        """Write the file to the folder of the weights."""
        (folder / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_text_tokens(folder: pathlib.Path) -> TextTokens:
    """Read the tokens of a checkpoint; empty for one that was trained here. Raises CheckpointError if damaged."""
    path = folder / FILE
    if not path.is_file():
        return TextTokens()
    try:
        found = {name: tuple(map(_id, ids)) for name, ids in json.loads(path.read_text(encoding="utf-8")).items()}
        return TextTokens(**found)
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); convert the model again") from error


def _id(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{json.dumps(value)} is not the id of a token")
    return value
