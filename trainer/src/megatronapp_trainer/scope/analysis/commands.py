"""Commands of rank 0 to all ranks about analyses, sent through the engine."""

import dataclasses

from megatronapp_common.scope.analysis_requests import AnalysisRequest

TOPIC = "analysis"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeginAnalysis:
    """Begin an analysis of the text that the request `name-0` of the engine reads."""

    name: str
    request: AnalysisRequest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndAnalysis:
    """End an analysis, whether its text was read or not."""

    name: str


AnalysisCommand = BeginAnalysis | EndAnalysis
