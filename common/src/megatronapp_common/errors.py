"""Exceptions of megatronapp_common and their hierarchy.

CommonError
├── JobError            a MegatronJob that cannot be accepted
├── TopologyError       a layout that does not exist
├── FrameError          bytes that are not a frame
├── DocumentError       a document in shared memory that cannot be created, read or written
├── StateError          a state folder that cannot be read or written
├── OutputError         a file of a command's output that cannot be written
├── FilterError         a vector filter that cannot be parsed or computed
├── OrderError          an order that a training cannot follow
├── ReductionPlanError  a state that cannot be divided into the requested pixels
└── TensorCodeError     numbers that a frame cannot carry, or bytes that are not numbers of their code
"""


class CommonError(Exception):
    """Base of every error this package raises. Its message says what is wrong, where, and what to write instead."""


class JobError(CommonError):
    """A MegatronJob that cannot be accepted. Its message has a line per problem: path, problem, correction."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class TopologyError(CommonError):
    """A parallel layout that does not exist, such as a world that the groups do not divide."""


class FrameError(CommonError):
    """Bytes that are not a frame of the wire protocol."""


class DocumentError(CommonError):
    """A document in shared memory that cannot be created, read or written."""


class StateError(CommonError):
    """The folder with the state of this user's jobs cannot be read or written."""


class OutputError(CommonError):
    """A file of a command's output that cannot be written."""


class FilterError(CommonError):
    """A vector filter that cannot be parsed, or not be computed on the given vector."""

    def __init__(self, column: int, sentence: str) -> None:
        super().__init__(f"column {column}: {sentence}")
        self.column = column
        """Column of the problem, in characters from 1."""
        self.sentence = sentence


class OrderError(CommonError):
    """An order to a training that has another shape, or does not fit its state."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason = reason
        self.hint = hint
        """Advice: an order that fits."""


class ReductionPlanError(CommonError):
    """A state that cannot be divided into the requested pixels, or over the requested shards."""


class TensorCodeError(CommonError):
    """Numbers that a code cannot carry, or bytes that are not numbers of their code."""
