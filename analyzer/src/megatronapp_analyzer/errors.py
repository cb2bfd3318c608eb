"""Exceptions of the analyzer and their hierarchy.

AnalyzerError
├── SettingsError     flags, environment or job file that agent or hub cannot start with
├── LayoutError       a job layout whose parts do not fit each other
├── ProtocolError     an agent or a page that does not keep to the wire protocol
├── SpoolError        stored traces that are missing or cannot be written
├── ArchiveError      a file of the trace store that cannot be read
├── GraphError        a step whose operations depend on each other in a circle
├── ExportError       a trace export that cannot be made
├── WhatIfError       a recording that cannot be analysed
├── ImportTraceError  a trace of another tool that cannot be read
├── JudgeLostError    the process of the detector has ended, or cannot be started
├── SessionError      a recorded session that cannot be read or replayed
└── HubError          the hub answered a request with an error, or did not answer

A hub answers with `{"code", "message", "hint"}`; `megatronapp_common.web.problems.HttpError` carries those over HTTP.
"""


class AnalyzerError(Exception):
    """Base of every error this package raises. Its message says what is wrong, where, and what to do."""


class SettingsError(AnalyzerError):
    """Flags, environment or a job file that agent or hub cannot start with."""


class ProtocolError(AnalyzerError):
    """A peer that violates the wire protocol. `code` is a stable identifier for the ERROR frame."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.hint = hint


class SpoolError(AnalyzerError):
    """Stored traces that are missing, or a state directory that cannot be written."""


class ArchiveError(AnalyzerError):
    """A file of the trace store that is damaged, of another version, or cannot be read now."""


class DamagedArchiveError(ArchiveError):
    """A file of the trace store whose content is damaged for good."""


class LayoutError(AnalyzerError):
    """A job layout whose sizes, coordinates and workers disagree."""


class GraphError(AnalyzerError):
    """A step whose recorded operations depend on each other in a circle."""


class ExportError(AnalyzerError):
    """A trace export that cannot be made, such as one of a job that left no traces."""


class WhatIfError(AnalyzerError):
    """A recording of steps that the what-if analysis cannot read or understand."""


class JudgeLostError(AnalyzerError):
    """A detector whose process has ended, does not answer, or cannot be started."""


class SessionError(AnalyzerError):
    """A recorded session of MegaScope that cannot be read or replayed."""


class HubError(AnalyzerError):
    """A request that the hub answered with an error, or did not answer."""


class ImportTraceError(AnalyzerError):
    """A trace of another tool that cannot be read."""
