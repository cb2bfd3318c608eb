"""Errors of megatronapp_native.

NativeError
├── RingError                      a trace ring that cannot be made, opened or trusted
└── TransportError                 wrong use of the transport, or what the system refused
    ├── TransportMismatchError     two ranks do not agree on version, slots, job or attempt
    ├── TransportCorruptError      shared memory holds what no rank writes
    ├── DuplicateKeyError          a key was sent again before its message was released
    ├── DeviceError                a function of the CUDA driver failed
    ├── PeerLostError              a peer died, or closed while it was needed
    └── TransferTimeoutError       a peer that lives did nothing within the deadline
"""


class NativeError(Exception):
    """Base of every error this package raises. Its text says what is wrong and where."""


class RingError(NativeError):
    """A ring file that there is no room for, that is not a ring, or that was damaged."""


class TransportError(NativeError):
    """A transport that was used wrongly, or that the system refused something."""


class TransportMismatchError(TransportError):
    """Two ranks with other versions, slot sizes, numbers of slots, jobs or attempts."""


class TransportCorruptError(TransportError):
    """Shared memory that holds what no rank writes."""


class DuplicateKeyError(TransportError):
    """A key that was sent again before the message with it was released."""


class DeviceError(TransportError):
    """A function of the CUDA driver that failed, with the driver's code."""

    def __init__(self, text: str, function: str, code: int) -> None:
        super().__init__(text)
        self.function = function
        self.code = code


class PeerLostError(TransportError):
    """A rank that died, or closed its endpoint while this one needed it."""

    def __init__(self, text: str, peer: int) -> None:
        super().__init__(text)
        self.peer = peer


class TransferTimeoutError(TransportError):
    """A rank that lives but did nothing within the deadline.

    `direction` is "send", "receive" or "connect"; `key` is None while ranks connect and for entries of a log.
    """

    def __init__(self, text: str, peer: int, key: int | None, direction: str, seconds: float) -> None:
        super().__init__(text)
        self.peer = peer
        self.key = key
        self.direction = direction
        self.seconds = seconds
