"""Time of a rank's process in garbage collections, and while it was stopped, in a step."""

import numpy as np

from megatronapp_analyzer.detect.features import Floats, Ints
from megatronapp_analyzer.graph import records as rec
from megatronapp_analyzer.graph.matched_step import MatchedStep
from megatronapp_common.trace import RecordKind


def host_spans_s(step: MatchedStep, kind: RecordKind, forwards: Ints) -> Floats:
    """Return the seconds per FORWARD of each rank in spans of a kind, beyond the median of all ranks."""
    world = len(forwards)
    spans = step.of_kinds(frozenset({kind}))
    spans = spans[spans["rank"] < world]
    total = np.zeros(world)
    np.add.at(total, spans["rank"], rec.durations_s(spans))
    per_forward: Floats = total / np.maximum(forwards, 1)
    if world > 1:
        per_forward = np.maximum(per_forward - np.median(per_forward), 0.0)
    return per_forward
