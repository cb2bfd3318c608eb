"""The stream on which passes of training run that are captured in CUDA graphs."""

import contextlib
import functools
from collections.abc import Iterator

import torch


@functools.cache
def graph_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of this process and device on which training passes run where they are captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own gap


@contextlib.contextmanager
def on_graph_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on that stream: after all that was queued before, and before all that follows.

    Autograd adds a parameter's gradient on the stream on which its node for that was made. megatron-core makes those
    nodes with the model, so that is done inside, too: the default stream cannot take part in a capture.
    """
    stream, outer = graph_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer.wait_stream(stream)
