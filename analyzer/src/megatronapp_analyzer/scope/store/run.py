"""One run in the hub: state, tokens, frames, and the numbers that were requested."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_analyzer.scope.parts.wire_models import RunHeader, SampleHeader, StepHeader, read
from megatronapp_analyzer.scope.store.analysis_store import AnalysisStore
from megatronapp_analyzer.scope.store.frame_log import FrameLog, LogEntry
from megatronapp_analyzer.scope.store.memory_budget import MemoryBudget, RetentionClass
from megatronapp_analyzer.scope.store.row_table import RowTable
from megatronapp_analyzer.scope.store.tile_pooling import HeadKey, TilePool
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import ENDED_STATES, build_frame, unpack

ValueKey = tuple[str, int, int | None, int | None]
"""Site, sample, layer and head."""
ENGINE_LOST = "engine-lost"
"""Error code of a run that the hub failed, because rank 0 was lost."""
BEFORE = ".before"
TURNED = frozenset({"q", "k"})
"""Sites that rotary positions turn."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptScores:
    """Surprise and entropy at each token of a prompt but the first; copies, no views on a frame."""

    surprise: NDArray[np.float32]
    entropy: NDArray[np.float32]


class ScopeRun:
    """State of a run. `header` is that of SCOPE_RUN, without its number."""

    def __init__(self, run: str, ring: MemoryBudget) -> None:
        self.id = run
        self.header: dict[str, Any] = {"run": run, "state": "queued", "prompts": []}
        self.journal = FrameLog(run, ring)
        self.attention: RowTable[HeadKey] = RowTable(ring, RetentionClass.ROWS)
        self.pooled = TilePool(ring, grows=self.grows)
        self.values: RowTable[ValueKey] = RowTable(ring, RetentionClass.VALUES)
        self.tokens: list[dict[int, dict[str, Any]]] = []
        """For every sample: position to `{"id", "text", "offset", "finished"}` of what was generated."""
        self.scores: dict[int, PromptScores] = {}
        """Scores of prompts by sample, once they were requested."""
        self.analyses = AnalysisStore(ring)
        """Results of analyses that were requested."""
        self.late = False
        """True while the hub, started after the run, has not yet received what it missed from rank 0."""
        self.pca_version = 0
        """Version of the basis of its newest SCOPE_PCA."""
        self.pca_rows: set[tuple[int, int]] = set()
        """Samples and positions whose coordinates in that basis steps and overviews have shown."""

    @property
    def ended(self) -> bool:
        """Return whether the run has ended."""
        return self.header.get("state") in ENDED_STATES

    @property
    def final(self) -> bool:
        """Return whether the run has ended finally: rank 0 may reconnect and continue one that only the hub gave up."""
        return self.ended and (self.header.get("error") or {}).get("code") != ENGINE_LOST

    def grows(self, sample: int | None = None) -> bool:
        """Return whether a sample, or any sample, may get more tokens."""
        said = self.tokens[sample] if sample is not None and self.has_sample(sample) else {}
        return not self.ended and (not said or said[max(said)]["finished"] is None)

    @property
    def captured(self) -> bool:
        """Return whether more than tokens is captured."""
        return (self.header.get("capture") or {}).get("preset") != "off"

    def set_state(self, header: Mapping[str, Any]) -> LogEntry:
        """Change the state. Raises ProtocolError."""
        said = read(RunHeader, "RUN", {**header, "run": self.id})
        self.header = said.model_dump(mode="json", by_alias=True)
        self.tokens += [{} for _ in range(len(said.prompts) - len(self.tokens))]
        return self.journal.append(Frame(FrameType.SCOPE_RUN, self.header))

    def is_current_state(self, said: RunHeader) -> bool:
        """Return whether the run has this very state."""
        return bool(self.header == said.model_dump(mode="json", by_alias=True))

    def prompt_ids(self, sample: int) -> list[int]:
        """Return the tokens of a prompt."""
        return list(self.header["prompts"][sample]["ids"])

    def ids(self, sample: int) -> list[int]:
        """Return all tokens of a sample, prompt and generated ones. Call it for runs that are whole only."""
        generated = self.tokens[sample]
        return self.prompt_ids(sample) + [generated[place]["id"] for place in sorted(generated)]

    def length(self, sample: int) -> int:
        """Return how many positions the model has read: it has not read the newest token."""
        return max(self.tokens[sample], default=len(self.prompt_ids(sample)))

    @property
    def whole(self) -> bool:
        """Return whether all generated tokens are known, without a hole."""
        if self.late:
            return False
        for sample, tokens in enumerate(self.tokens):
            first = len(self.prompt_ids(sample))
            if tokens and (min(tokens) != first or max(tokens) != first + len(tokens) - 1):
                return False
        return True

    @property
    def steps(self) -> int:
        """Return how many steps have tokens here."""
        return max(map(len, self.tokens), default=0)

    def fill(self, samples: Sequence[SampleHeader]) -> list[LogEntry]:
        """Add tokens that the hub has missed, as frames of their steps without numbers.

        Raises ProtocolError if they are not of this run.
        """
        if len(samples) != len(self.tokens):
            raise ProtocolError("bad-run", f"run {self.id}: {len(samples)} samples, not {len(self.tokens)}")
        steps: dict[int, list[tuple[int, int, SampleHeader]]] = {}
        for sample, said in enumerate(samples):
            first = len(self.prompt_ids(sample))
            for step in range(len(said.ids)):
                if first + step not in self.tokens[sample]:
                    steps.setdefault(step, []).append((sample, first + step - 1, said))
        self.late = False
        return [self.add_step(_step_of(self.id, step, steps[step])) for step in sorted(steps)]

    def has_sample(self, sample: int) -> bool:
        """Return whether the run has this prompt."""
        return 0 <= sample < len(self.tokens)

    def add_step(self, frame: Frame) -> LogEntry:
        """Add a SCOPE_STEP frame. Raises ProtocolError."""
        self._note_tokens(frame.header)
        return self.journal.append(frame)

    def _note_tokens(self, header: Mapping[str, Any]) -> None:
        said = read(StepHeader, "STEP", header).dump()
        columns = (said[name] for name in ("ids", "texts", "offsets", "finished"))
        for (sample, position), *cells in zip(said["rows"], *columns, strict=True):
            if not self.has_sample(sample):
                raise ProtocolError("bad-step", f"run {self.id}: a step of sample {sample}, which it does not have")
            cell = dict(zip(("id", "text", "offset", "finished"), cells, strict=True))
            self.tokens[sample][position + 1] = cell

    def add_rows(self, frame: Frame) -> LogEntry:
        """Add a SCOPE_ROWS frame; tiles use its rows as long as the frame is stored."""
        entry = self.journal.append(frame)
        (flat,) = unpack(frame)
        views = split_rows(flat.data, frame.header["keys"])
        blocks: list[tuple[HeadKey, list[tuple[int, NDArray[Any]]]]] = []
        for (sample, layer, head, position), view in zip(frame.header["rows"], views, strict=True):
            blocks.append(((sample, layer, head), [(position, view)]))
        if entry.whole is not None:
            for key, placed in blocks:
                self.attention.point(key, placed)
            entry.on_drop = self.attention.forgetter(blocks)
        return entry

    def summary(self) -> dict[str, Any]:
        """Return the entry of a list of runs."""
        names = ("state", "position", "startedAt", "tokens", "tokensPerSecond", "error")
        prompts = [str(prompt.get("text", ""))[:200] for prompt in self.header["prompts"]]
        known = {name: self.header.get(name) for name in names}
        return {
            "run": self.id,
            "prompts": prompts,
            "perturbation": (self.header.get("perturbation") or {}).get("digest"),
            **known,
        }

    def detail(self) -> dict[str, Any]:
        """Return the header of SCOPE_RUN, with all tokens that were generated."""
        generated = [[{"position": place, **said} for place, said in sorted(sample.items())] for sample in self.tokens]
        return self.header | {"generated": generated}

    def close(self) -> None:
        """Release the memory of the run."""
        self.journal.close()
        self.attention.close()
        self.pooled.close()
        self.values.close()
        self.analyses.close()


def lost_run(header: Mapping[str, Any]) -> Frame:
    """Return the state of a run whose model was lost."""
    error = {
        "code": ENGINE_LOST,
        "message": "the model ended before this run did",
        "hint": "Its tokens so far stay; start it again once the model is ready.",
    }
    failed = {**header, "state": "failed", "position": None, "error": error}
    return Frame(FrameType.SCOPE_RUN_STATE, failed)


def value_site(site: str, rotary: str) -> str:
    """Return the name under which exact numbers are stored: `q` and `k` before the rotation have their own."""
    return f"{site}{BEFORE}" if rotary == "before" and site in TURNED else site


def site_of(name: str) -> tuple[str, str]:
    """Return site and rotation of a name that `value_site` gave."""
    site = name.removesuffix(BEFORE)
    return site, "after" if site == name else "before"


def _step_of(run: str, step: int, rows: Sequence[tuple[int, int, SampleHeader]]) -> Frame:
    """Build a SCOPE_STEP frame without numbers."""
    header = {
        "run": run,
        "step": step,
        "rows": [[sample, position] for sample, position, _ in rows],
        "ids": [said.ids[step] for _, _, said in rows],
        "texts": [said.texts[step] for _, _, said in rows],
        "offsets": [said.offsets[step] for _, _, said in rows],
        "finished": [said.finished[step] for _, _, said in rows],
    }
    return build_frame(FrameType.SCOPE_STEP, header)


def split_rows(flat: NDArray[Any], keys: Sequence[int]) -> list[NDArray[Any]]:
    """Split concatenated rows of different lengths. Raises ProtocolError if the lengths do not fit."""
    if any(not isinstance(count, int) or count < 0 for count in keys) or sum(keys) != flat.size:
        raise ProtocolError("bad-rows", "ROWS frame: keys and tensor do not fit each other")
    ends = np.cumsum(np.asarray(keys, dtype=np.int64))
    return [flat[end - count : end] for end, count in zip(ends, keys, strict=True)]
