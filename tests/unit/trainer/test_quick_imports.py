"""The collector of cycles is suspended while modules are imported, and enabled after that."""

import gc
from collections.abc import Iterator

import pytest

from megatronapp_trainer.utils.quick_imports import imports_without_collections


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_suspended_inside_the_context(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    with imports_without_collections():
        assert not gc.isenabled()
    assert gc.isenabled() is was_enabled


def test_a_failed_import_leaves_the_collector_enabled() -> None:
    with pytest.raises(ModuleNotFoundError), imports_without_collections():
        raise ModuleNotFoundError
    assert gc.isenabled()
