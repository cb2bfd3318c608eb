"""Replay of a recorded session: its frames are published step by step."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import ValidationError

from megatronapp_analyzer.errors import ProtocolError, SessionError
from megatronapp_analyzer.scope import schemas
from megatronapp_analyzer.scope.core import ScopeCore
from megatronapp_analyzer.scope.delivery.session_file import RecordedSession
from megatronapp_analyzer.scope.settings import ScopeSettings
from megatronapp_analyzer.scope.store.run import ScopeRun, value_site
from megatronapp_common.errors import FrameError
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.codes import TensorCode, encode
from megatronapp_common.scope.protocol import unpack

LOG = logging.getLogger(__name__)
MAX_LAYERS, MAX_HEADS, MAX_RANKS = 512, 512, 1024
"""Largest sizes of a model that the page draws."""
USUAL_RATE = 20.0
"""Tokens per second of a run that does not report its own rate."""
GARBLED = (ProtocolError, FrameError, KeyError, TypeError, ValueError, IndexError, AttributeError)
"""Exceptions of frames that are whole, but have the wrong content."""


def settings_of(session: RecordedSession) -> ScopeSettings:
    """Return the settings for playing this session. Raises SessionError."""
    try:
        hello = schemas.Hello.model_validate(dict(session.frames[0].header))
    except ValidationError as error:
        raise SessionError(f"its SCOPE_HELLO cannot be understood: {error}") from error
    _check_sizes(hello)
    return ScopeSettings(job=hello.job, source="replay")


def _check_sizes(hello: schemas.Hello) -> None:
    """Raise SessionError for sizes that no page can draw."""
    model, ranks = hello.model, len(hello.layout.ranks or ())
    if model is not None and not (1 <= model.layers <= MAX_LAYERS and 1 <= model.heads <= MAX_HEADS):
        raise SessionError(
            f"its model has {model.layers} layers of {model.heads} heads; "
            f"at most {MAX_LAYERS} of {MAX_HEADS} can be shown"
        )
    if ranks > MAX_RANKS:
        raise SessionError(f"its layout has {ranks} ranks; at most {MAX_RANKS} can be shown")


class SessionPlayer:
    """Plays into `core`, which has the settings that `settings_of` gives for the same session."""

    def __init__(self, session: RecordedSession, core: ScopeCore) -> None:
        self._core = core
        self._values: dict[str, list[Frame]] = {}
        self._frames: list[Frame] = []
        self.rate = USUAL_RATE
        self.left_out = 0
        """Frames that were skipped because of wrong content."""
        for frame in session.frames[1:]:
            if frame.type in {FrameType.SCOPE_VALUES, FrameType.SCOPE_ANALYSIS}:
                self._values.setdefault(str(frame.header.get("run")), []).append(frame)
            else:
                self._frames.append(frame)
        hello = session.frames[0].header
        model = hello.get("model")
        core.publishers.model = None if model is None else dict(model)
        core.publishers.layout = dict(hello["layout"])
        core.feed.state = "ready"

    def steps(self) -> Iterator[int]:
        """Play up to the next step, and yield its number. At the end runs that were saved unfinished are cancelled."""
        for place, frame in enumerate(self._frames):
            self._play(frame)
            follows = self._frames[place + 1].type if place + 1 < len(self._frames) else None
            if frame.type in {FrameType.SCOPE_STEP, FrameType.SCOPE_ROWS} and follows != FrameType.SCOPE_ROWS:
                yield int(frame.header.get("step", 0))
        for run in self._core.runs.values():
            if not run.ended:
                self._core.feed.publish(run.set_state({**run.header, "state": "cancelled"}))

    def _play(self, frame: Frame) -> None:
        try:
            self._take(frame)
        except GARBLED as error:
            self.left_out += 1
            LOG.warning("a frame of type %d is skipped: %s: %s", frame.type, type(error).__name__, error)

    def _take(self, frame: Frame) -> None:
        name = str(frame.header["run"])
        if frame.type == FrameType.SCOPE_RUN:
            self.rate = _rate(frame.header.get("tokensPerSecond")) or self.rate
            run, entry, _ = self._core.runs.set_state(frame.header)
            self._core.feed.publish(entry)
            for values in self._values.pop(name, ()):
                keep_values(run, values) if values.type == FrameType.SCOPE_VALUES else run.analyses.put(values)
            return
        run = self._core.runs[name]
        if frame.type == FrameType.SCOPE_STEP:
            self._core.feed.publish(run.add_step(frame))
        elif frame.type == FrameType.SCOPE_ROWS:
            self._core.feed.publish(run.add_rows(frame))
        elif frame.type == FrameType.SCOPE_PCA:
            self._core.pca.note(int(frame.header["version"]))
            self._core.feed.publish_frame(run, frame)
        elif frame.type in {FrameType.SCOPE_OVERVIEW, FrameType.SCOPE_GAP}:
            self._core.feed.publish_frame(run, frame)


def _rate(value: Any) -> float | None:  # noqa: ANN401
    return float(value) if isinstance(value, int | float) and 0 < value < 1e6 else None


def keep_values(run: ScopeRun, frame: Frame) -> None:
    """Store exact numbers of a SCOPE_VALUES frame; rows of attention are for tiles, too. Raises one of GARBLED."""
    header = frame.header
    (tensor,) = unpack(frame)
    sample, layer, head = header["sample"], header["layer"], header["head"]
    first, count = header["rows"]
    positions, rows = range(first, first + count), tensor.data
    if header["site"] == "attention":
        codes = rows if tensor.code == "u8s" else encode(TensorCode.U8S, rows).data
        for position, row in zip(positions, codes, strict=True):
            run.attention.put((sample, layer, head), [position], row[None, : position + 1].astype(np.uint8))
    if tensor.code == "f32":
        name = value_site(str(header["site"]), str(header.get("rotary", "after")))
        run.values.put((name, sample, layer, head), positions, rows)
