"""The pass that a rank runs, to which its parts belong."""

from typing import NamedTuple

from megatronapp_common.trace import RecordKind


class OpenPass(NamedTuple):
    """A pass of a step."""

    kind: RecordKind
    chunk: int
    microbatch: int
