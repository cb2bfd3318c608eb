"""Messages between the hub and the process of its detector, over a socket pair that no other process has.

Both ends are of one release and trust each other, so messages are pickled. Arrays follow the pickle as they are in
memory (pickle protocol 5), and are copied by the kernel only.

    message   u32 bytes of the pickle, u32 number of arrays, u64 bytes of each array, pickle, arrays
"""

import pickle
import socket
import struct

import numpy as np

HEAD = struct.Struct("<II")


def send_message(sock: socket.socket, value: object) -> None:
    """Send a value. Raises OSError if the other end has ended or takes nothing within the socket's timeout."""
    arrays: list[pickle.PickleBuffer] = []
    document = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    parts = [array.raw() for array in arrays]
    sizes = struct.pack(f"<{len(parts)}Q", *(part.nbytes for part in parts))
    sock.sendall(HEAD.pack(len(document), len(parts)) + sizes + document)
    for part in parts:
        sock.sendall(part)


def receive_message(sock: socket.socket) -> object:
    """Return the next value. Raises EOFError if the other end has ended, OSError as `send_message` does."""
    length, count = HEAD.unpack(_receive(sock, HEAD.size))
    sizes = struct.unpack(f"<{count}Q", _receive(sock, 8 * count))
    document = _receive(sock, length)
    return pickle.loads(document, buffers=[_receive(sock, size) for size in sizes])


def _receive(sock: socket.socket, size: int) -> memoryview:
    part = np.empty(size, np.uint8).data  # not zeroed, which for large steps costs as much as the copy
    filled = 0
    while filled < size:
        count = sock.recv_into(part[filled:])
        if not count:
            raise EOFError("the other end has ended")
        filled += count
    return part
