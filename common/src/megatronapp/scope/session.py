"""Recorded sessions (docs/scope-protocol.md, section 9) without a hub: tokens and exact numbers of one run."""

import pathlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp.scope.errors import ScopeError
from megatronapp_common import frames
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import unpack

Key = tuple[str, int, int | None, int | None, str]
"""Site, sample, layer, head and rotation."""


def open_session(path: str | pathlib.Path) -> "Session":
    """Read a session that `Run.save_session`, the page or a hub's `/session` gave. Raises ScopeError, OSError."""
    try:
        found = list(frames.split(pathlib.Path(path).read_bytes()))
    except FrameError as error:
        hint = "`megatronapp scope replay` shows what can still be read."
        raise ScopeError(f"{path}: not a whole session: {error}", code="broken-session", hint=hint) from error
    if not found or found[0].type != FrameType.SCOPE_HELLO:
        hint = "Take a file that a hub's /session gave."
        raise ScopeError(f"{path}: not a recorded session", code="no-session", hint=hint)
    return Session(found)


class Session:
    """A recorded run. It holds the exact numbers that were requested while it was recorded, and no others."""

    def __init__(self, recorded: list[Frame]) -> None:
        self.model: dict[str, Any] = dict(recorded[0].header.get("model") or {})
        """Sizes of the model."""
        self.prompts: list[str] = []
        """Text of each prompt."""
        self._ids: list[list[int]] = []
        self._generated: list[dict[int, tuple[int, str]]] = []
        self._values: dict[Key, dict[int, NDArray[np.float32]]] = {}
        for frame in recorded:
            self._take(frame)

    @property
    def texts(self) -> list[str]:
        """Return what was generated for each prompt."""
        return ["".join(text for _, (_, text) in sorted(sample.items())) for sample in self._generated]

    def ids(self, sample: int = 0) -> list[int]:
        """Return all tokens of a sample: those of the prompt, then the generated ones."""
        return [*self._ids[sample], *(token for _, (token, _) in sorted(self._generated[sample].items()))]

    @property
    def sites(self) -> list[Key]:
        """Return what exact numbers there are of: site, sample, layer, head and rotation."""
        return list(self._values)

    def attention(self, layer: int, head: int, sample: int = 0) -> NDArray[np.float32]:
        """Return the exact attention probabilities of a head, [queries, keys]. Raises ScopeError."""
        return self.values("attention", layer=layer, head=head, sample=sample)

    def values(
        self, site: str, *, layer: int | None = None, head: int | None = None, sample: int = 0, rotary: str = "after"
    ) -> NDArray[np.float32]:
        """Return the exact numbers of a site at its recorded positions, [positions, features]. Raises ScopeError."""
        rows = self._values.get((site, sample, layer, head, rotary))
        if rows is None:
            message = f"{site} of sample {sample}, layer {layer}, head {head} was not recorded"
            raise ScopeError(message, code="not-recorded", hint="`sites` lists what was.")
        width = max(row.size for row in rows.values())
        values = np.zeros((len(rows), width), np.float32)
        for place, position in enumerate(sorted(rows)):
            values[place, : rows[position].size] = rows[position]
        return values

    def _take(self, frame: Frame) -> None:
        header = frame.header
        if frame.type == FrameType.SCOPE_RUN:
            self.prompts = [prompt["text"] for prompt in header["prompts"]]
            self._ids = [list(prompt["ids"]) for prompt in header["prompts"]]
            self._generated += [{} for _ in range(len(self._ids) - len(self._generated))]
        elif frame.type == FrameType.SCOPE_STEP:
            columns = zip(header["rows"], header["ids"], header["texts"], strict=True)
            for (sample, position), token, text in columns:
                self._generated[sample][position + 1] = token, text or ""
        elif frame.type == FrameType.SCOPE_VALUES:
            self._take_values(frame)

    def _take_values(self, frame: Frame) -> None:
        header = frame.header
        (tensor,) = unpack(frame)
        if tensor.code != "f32":
            return
        key = header["site"], header["sample"], header["layer"], header["head"], header.get("rotary", "after")
        rows = self._values.setdefault(key, {})
        for place, row in enumerate(tensor.data):
            rows[header["rows"][0] + place] = row.reshape(-1)
