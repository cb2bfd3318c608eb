"""What megatron-core says without need: of missing libraries while it is imported, of itself while it saves."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silence_megatron_imports() -> Iterator[None]:
    """Around the first import of megatron-core: its own and torch's warnings are left out, everybody else's are not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(megatron|torch)(\.|$)")
        yield


_BY_DESIGN = re.compile(
    r"Rank \d+ common state dict differs from rank 0 common state dict\. Keys only on rank 0: \[\], "
    r"Keys only on \d+: \[\('optimizer', (\d+, )?'param_state'\)(, \('optimizer', \d+, 'param_state'\))*\], "
    r"Mismatched keys: \[\]"
)


@contextlib.contextmanager
def silence_saving() -> Iterator[None]:
    """Around megatron-core's comparison of ranks before it saves, with one of its warnings left out.

    The distributed optimizer's state is gathered on the first replica alone. The others say None in its place, and
    that, which is as it must be, is a difference to megatron-core. A difference in anything else is still told.
    """
    logger = logging.getLogger("megatron.core.dist_checkpointing.validation")
    logger.addFilter(_is_relevant)
    try:
        yield
    finally:
        logger.removeFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    return _BY_DESIGN.fullmatch(record.getMessage()) is None
