"""Scores of a given text: rows of its tokens but the first, with the tensors that generated tokens have."""

from collections.abc import Sequence

from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.scope.protocol import build_frame
from megatronapp_trainer.inference.events import PromptEvent
from megatronapp_trainer.scope.coordinator import TextOf, distributions


def scores_frame(events: Sequence[PromptEvent], text_of: TextOf | None) -> Frame:
    """A frame SCOPE_TOKENS; waits for the device. `events`: of all positions, in any order."""
    scored = sorted((event for event in events if event.target is not None), key=lambda event: event.index)
    measures = [event.measures.get() for event in scored if event.measures is not None]
    logprobs = [event.logprob for event in scored if event.logprob is not None]
    assert len(measures) == len(logprobs) == len(scored)
    header = {"rows": [[0, event.index] for event in scored], "ids": [event.target for event in scored]}
    if text_of is not None:
        header["topTexts"] = [[text_of(int(token)) for token in measure.tokens.tolist()] for measure in measures]
    return build_frame(FrameType.SCOPE_TOKENS, header, distributions(measures, logprobs))
