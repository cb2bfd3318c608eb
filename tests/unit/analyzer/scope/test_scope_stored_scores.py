"""Scores of prompts as the hub keeps them."""

import numpy as np

from megatronapp_analyzer.scope.probes.scores import NAMES, checked, scores_of
from megatronapp_common import frames
from megatronapp_common.frames import FrameType
from megatronapp_common.scope.protocol import Tensor, build_frame


def test_what_a_run_keeps_does_not_hold_the_frame_with_all_candidates() -> None:
    column = np.arange(4, dtype="<f4")
    tensors = [Tensor(name, "f32", np.tile(column, (100, 1)).T if "." in name else column) for name in NAMES]
    frame = frames.decode(frames.encode(build_frame(FrameType.SCOPE_TOKENS, {}, tensors)))
    found = scores_of(checked(frame, 4))
    assert found.surprise.tolist() == found.entropy.tolist() == column.tolist()
    assert found.surprise.base is None
    assert found.entropy.base is None
