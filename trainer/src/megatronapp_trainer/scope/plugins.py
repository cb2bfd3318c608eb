"""Modules of users, which register sites when they are imported (docs/scope.md)."""

import importlib
from collections.abc import Sequence

from megatronapp_trainer.errors import UsageError
from megatronapp_trainer.hooks.sites import registered

FLAG = "--scope-plugins"


def load_plugins(modules: Sequence[str]) -> tuple[str, ...]:
    """Import these modules; the names of the sites that there are then.

    Raises UsageError for a module that cannot be imported, and where none of them registers a site.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a module of a user may fail in any way
            raise UsageError(
                f"{FLAG} {name}: the module cannot be imported ({type(error).__name__}: {error}); ranks look in the "
                "directory where the job was started, and along PYTHONPATH"
            ) from error
    sites = tuple(site.name for site in registered())
    if modules and not sites:
        raise UsageError(f"{FLAG} {' '.join(modules)}: no site is registered; call register_site when imported")
    return sites
