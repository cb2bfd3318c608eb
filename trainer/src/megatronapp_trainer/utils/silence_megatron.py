"""Suppression of megatron-core's needless output: missing libraries at its import."""

import contextlib
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
