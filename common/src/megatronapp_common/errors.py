"""Exceptions of megatronapp_common and their hierarchy.

CommonError
├── JobError            a MegatronJob that cannot be accepted
├── TopologyError       a layout that does not exist
├── FrameError          bytes that are not a frame
├── DocumentError       a document in shared memory that cannot be created, read or written
├── StateError          a state folder that cannot be read or written
├── FilterError         a vector filter that cannot be parsed or computed
├── ReductionPlanError  a state that cannot be divided into the requested pixels
└── TensorCodeError     numbers that a frame cannot carry, or bytes that are not numbers of their code
"""


class CommonError(Exception):
    """Base of every error this package raises. Its text says what is wrong, where, and what to write instead."""


class JobError(CommonError):
    """A MegatronJob that cannot be accepted. Its text has one line per problem: path, what is wrong, what to write."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TopologyError(CommonError):
    """A parallel layout that does not exist, such as a world that the groups do not divide."""


class FrameError(CommonError):
    """Bytes that are not a frame of the wire protocol."""


class DocumentError(CommonError):
    """A shared-memory page that cannot be created, read or written."""


class StateError(CommonError):
    """The folder with the state of this user's jobs cannot be read or written."""


class FilterError(CommonError):
    """A vector filter that cannot be understood, or not be computed on the vector at hand."""

    def __init__(self, column: int, sentence: str) -> None:
        super().__init__(f"column {column}: {sentence}")
        self.column = column
        """Where, in characters from 1."""
        self.sentence = sentence


class ReductionPlanError(CommonError):
    """A state that cannot be cut into the pixels, or over the shards, that were asked for."""


class TensorCodeError(CommonError):
    """Numbers that a frame cannot carry so, or bytes that are not numbers of the code they claim."""
