"""Count of frames that could not be used."""

import contextlib
import logging
from collections.abc import Iterator

from megatronapp_analyzer.errors import ProtocolError
from megatronapp_common.errors import FrameError

LOG = logging.getLogger(__name__)


class RejectedFrames:
    """Counts and logs errors in what ranks send. The connection stays: its agent carries other ranks' frames, too."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, error: Exception) -> None:
        """Count and log an error."""
        self.count += 1
        LOG.warning("a published frame of a rank is skipped: %s", error)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a ProtocolError or FrameError instead of raising it."""
        try:
            yield
        except (ProtocolError, FrameError) as error:
            self.add(error)
