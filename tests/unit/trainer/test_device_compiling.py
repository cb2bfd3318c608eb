"""Requirements of compiling kernels, and the message where one is missing."""

import pathlib
import shutil
import sysconfig
from collections.abc import Iterator

import pytest

from megatronapp_trainer.device.compiling import can_compile


@pytest.fixture(autouse=True)
def _compiled_afresh() -> Iterator[None]:
    can_compile.cache_clear()
    yield
    can_compile.cache_clear()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"gcc", "Python.h"}, ""),
        ({"clang", "Python.h"}, ""),
        ({"Python.h"}, "no C compiler"),
        ({"gcc"}, "Python.h is not there"),
    ],
)
def test_a_compiler_and_headers_are_needed(
    found: set[str],
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in found else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    if "Python.h" in found:
        (tmp_path / "Python.h").touch()
    assert can_compile() is (message == "")
    can_compile()
    assert len(caplog.messages) == (message != ""), "once"
    assert message in "".join(caplog.messages)
