"""Reader of the keys in config.json of a Hugging Face folder; errors name the key."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from megatronapp_trainer.errors import CheckpointError


class ConfigKeys:
    """Keys of one config.json. An absent key has the default that transformers gives it."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """Return the value; the default also for null."""
        value = self.values.get(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Return True if the key is present, perhaps as null."""
        return key in self.values

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, value, "a whole number above 0 is needed")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number above 0; a whole one as int."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refusal(key, value, "a number above 0 is needed")
        return int(value) if value == int(value) else value

    def yes(self, key: str, default: bool) -> bool:
        """Return a boolean, which must be true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false is needed")
        return value

    def require(self, key: str, default: Any, *supported: Any) -> Any:  # noqa: ANN401 - JSON
        """Return the value, which must be one of the supported."""
        value = self.get(key, default)
        if value not in supported:
            raise self.refusal(key, value, f"supported: {', '.join(json.dumps(item) for item in supported)}")
        return value

    def part(self, key: str) -> "ConfigKeys":
        """Return the keys of a nested object; empty if it is absent or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object is needed")
        return ConfigKeys(value, f"{self.where}: {key}")

    def refusal(self, key: str, value: object, supported: str) -> CheckpointError:
        """Return the error that names a key, its value and what is supported."""
        return CheckpointError(f"{self.where}: {key} is {json.dumps(value, default=str)}; {supported}")


def read_keys(path: pathlib.Path) -> ConfigKeys:
    """Read the keys of a config.json.

    Raises CheckpointError if it cannot be read.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); a Hugging Face folder has a config.json") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is not a JSON object; a Hugging Face folder has a config.json that is one")
    return ConfigKeys(values, str(path))
