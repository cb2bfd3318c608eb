"""Errors of megatronapp_native.

NativeError
└── RingError         a trace ring that cannot be made, opened or trusted
"""


class NativeError(Exception):
    """Base of every error this package raises. Its text says what is wrong and where."""


class RingError(NativeError):
    """A ring file that there is no room for, that is not a ring, or that was damaged."""
