"""Suppression of megatron-core's needless output: missing libraries at its import, its own warnings while it saves."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silence_megatron_imports() -> Iterator[None]:
    """Suppress warnings of megatron-core and torch during megatron-core's first import; those of other packages are
    shown.
    """
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
    """Suppress one warning of megatron-core's comparison of ranks before it saves.

    The distributed optimizer's state is gathered on the first replica alone. The others have None in its place, and
    that, which is correct, is a difference to megatron-core. A difference in other state is still reported.
    """
    logger = logging.getLogger("megatron.core.dist_checkpointing.validation")
    logger.addFilter(_is_relevant)
    try:
        yield
    finally:
        logger.removeFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    return _BY_DESIGN.fullmatch(record.getMessage()) is None
