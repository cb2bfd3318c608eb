"""Check whether kernels can be compiled here."""

import functools
import logging
import os
import pathlib
import shutil
import sysconfig

log = logging.getLogger(__name__)


@functools.cache
def can_compile() -> bool:
    """Return True if Triton can build a launcher in C for each kernel, which torch.compile on a GPU needs, too.

    Slim images of Python have no C compiler. Logs once what is missing.
    """
    requested = os.environ.get("CC")
    compiler = requested or shutil.which("gcc") or shutil.which("clang")
    header = pathlib.Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None:
        missing = "no C compiler is found (gcc, clang, or what CC names)"
    elif not header.is_file():
        missing = f"{header} is not there"
    else:
        return True
    log.warning("%s: kernels are not fused, which costs speed; install it in the image of the workers", missing)
    return False
