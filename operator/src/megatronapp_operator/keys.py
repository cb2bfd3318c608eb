"""The keys of an installation, from which the secret of each job is derived: the newest, and older ones.

A job keeps the key that its running attempt was started with, so an installation rotates its key without touching
running jobs: the new key is written in front of the older one, and each job takes it with its next attempt.
"""

import asyncio
import hashlib
import logging
import pathlib
import re
from collections.abc import Sequence
from typing import NoReturn

from megatronapp_operator.errors import SettingsError

log = logging.getLogger(__name__)

KEY_PATTERN = re.compile(r"[0-9a-f]{64}")
ID_DIGITS = 8
"""Hex digits of a key's id."""
RELOAD_S = 10.0
"""Seconds between reads of the file. A kubelet updates a mounted Secret within about a minute."""
HINT = "write one key of 64 hex digits per line, the newest first; make one with: openssl rand -hex 32"


def key_id(key: str) -> str:
    """Return a short public id of a key, which does not reveal it."""
    return hashlib.sha256(b"megatronapp:key-id:" + bytes.fromhex(key)).hexdigest()[:ID_DIGITS]


class KeyRing:
    """Keys by their ids. `values` are ordered from the newest to the oldest."""

    def __init__(self, values: Sequence[str]) -> None:
        assert values, "an installation has at least one key"
        self._path: pathlib.Path | None = None
        self._take(values)

    @classmethod
    def read(cls, path: pathlib.Path) -> "KeyRing":
        """Read the keys in a file, which `follow` reads again. Raises SettingsError."""
        ring = cls(_read(path))
        ring._path = path
        return ring

    @property
    def values(self) -> tuple[str, ...]:
        """All keys, newest first."""
        return self._values

    @property
    def current(self) -> str:
        """Key of everything that is started now."""
        return self._values[0]

    @property
    def current_id(self) -> str:
        return key_id(self.current)

    def find(self, identifier: str) -> str | None:
        """Return the key with an id, or None if the file has it no more.

        An empty id is of a release with one key only.
        """
        return self._by_id.get(identifier) if identifier else self._values[-1]

    def reload(self) -> bool:
        """Read the file again; return True if the keys changed. An invalid file changes nothing."""
        if self._path is None:
            return False
        try:
            values = _read(self._path)
        except SettingsError as error:
            log.error("the previous keys stay in use: %s", error)
            return False
        if values == self._values:
            return False
        self._take(values)
        log.info("keys changed: new jobs and attempts use key %s (%d in all)", self.current_id, len(values))
        return True

    async def follow(self) -> NoReturn:
        """Read the file at intervals, first at once: it may have changed since it was read at the start."""
        while True:
            self.reload()
            await asyncio.sleep(RELOAD_S)

    def _take(self, values: Sequence[str]) -> None:
        self._values = tuple(values)
        self._by_id = {key_id(value): value for value in values}


def _read(path: pathlib.Path) -> tuple[str, ...]:
    try:
        values = tuple(path.read_text(encoding="ascii").split())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--key-file {path}: {error}; {HINT}") from error
    wrong = [number for number, value in enumerate(values, 1) if not KEY_PATTERN.fullmatch(value)]
    if not values or wrong:
        place = f"key {wrong[0]} is not 64 hex digits" if wrong else "the file is empty"
        raise SettingsError(f"--key-file {path}: {place}; {HINT}")
    return values
