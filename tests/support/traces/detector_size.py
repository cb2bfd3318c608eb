"""Memory of a detector, its native parts included."""

import io
import pickle
from typing import Any

from megatronapp_analyzer.detect.engine import Detector
from megatronapp_native import ColumnTest


class _SizePickler(pickle.Pickler):
    """Pickler that writes as many bytes for a native object as it has memory."""

    def reducer_override(self, value: object) -> Any:
        """Return how a value is written."""
        return (bytes, (bytes(value.memory_bytes),)) if isinstance(value, ColumnTest) else NotImplemented


def size_of(detector: Detector) -> int:
    """Return the bytes of a pickled detector."""
    written = io.BytesIO()
    _SizePickler(written).dump(detector)
    return written.tell()
