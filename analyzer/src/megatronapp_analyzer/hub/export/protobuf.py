"""Writing messages in the wire format of Protocol Buffers, as far as traces need it.

Format: https://protobuf.dev/programming-guides/encoding
"""

import struct

_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_MASK = (1 << 64) - 1


def varint(value: int) -> bytes:
    """Return an integer of 64 bits, negative ones as two's complement."""
    left = value & _MASK
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def integer(field: int, value: int) -> bytes:
    """Return a field of an integer, Boolean or enumeration."""
    return varint(field << 3 | _VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    """Return a field of type fixed64."""
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", value & _MASK)


def double(field: int, value: float) -> bytes:
    """Return a field of type double."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def message(field: int, content: bytes) -> bytes:
    """Return a field of a message or of bytes."""
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def text(field: int, value: str) -> bytes:
    """Return a field of text; what UTF-8 cannot hold becomes a question mark."""
    return message(field, value.encode("utf-8", "replace"))
