"""Wheels for hosts without a package index are repacked so that pip still installs what is used of them."""

import pathlib
import subprocess
import sys
import zipfile

import pytest
import small_wheels

WHEEL = "pyarrow-26.0.1-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: pyarrow\nVersion: 26.0.1\n"
TAGS = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
USED = (
    "pyarrow/__init__.py",
    "pyarrow/lib.cpython-312-x86_64-linux-gnu.so",
    "pyarrow/libarrow_python.so.2600",
    "pyarrow/libarrow_substrait.so.2600",
    "pyarrow/parquet/core.py",
)
UNUSED = (
    "pyarrow/_flight.cpython-312-x86_64-linux-gnu.so",
    "pyarrow/_substrait.cpython-312-x86_64-linux-gnu.so",
    "pyarrow/include/arrow/api.h",
    "pyarrow/libarrow_flight.so.2600",
    "pyarrow/libarrow_python.so",
    "pyarrow/libarrow_python.so.2600.1.0",
    "pyarrow/libarrow_s3.so.2600",
    "pyarrow/table.pxi",
    "pyarrow/tests/test_table.py",
)


def write_wheel(folder: pathlib.Path, name: str = WHEEL) -> pathlib.Path:
    info = "-".join(name.split("-")[:2]) + ".dist-info"
    contents = dict.fromkeys([*USED, *UNUSED], "pass\n" * 100)
    contents |= {f"{info}/METADATA": METADATA, f"{info}/WHEEL": TAGS}
    contents[f"{info}/RECORD"] = "".join(f"{entry},,\n" for entry in [*contents, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for entry, content in contents.items():
            wheel.writestr(entry, content)
    return folder / name


def test_pip_installs_the_used_part_of_a_repacked_wheel(tmp_path: pathlib.Path) -> None:
    wheel = write_wheel(tmp_path)
    small_wheels.repack(wheel)
    site = tmp_path / "site"
    flags = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", site, wheel], check=True)
    assert sorted(str(path.relative_to(site)) for path in site.rglob("pyarrow/**/*") if path.is_file()) == sorted(USED)
    assert (site / USED[0]).read_text() == "pass\n" * 100
    listed = (site / "pyarrow-26.0.1.dist-info" / "RECORD").read_text()
    assert all(entry in listed for entry in USED)
    assert not any(entry + "," in listed for entry in UNUSED)
    assert [path.name for path in tmp_path.glob("*.small")] == []


def test_other_wheels_keep_all_entries(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = write_wheel(tmp_path, "another-1.0-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        before = packed.namelist()
    assert small_wheels.main([str(wheel)]) == 0
    with zipfile.ZipFile(wheel) as repacked:
        assert repacked.namelist() == before
        assert {entry.compress_type for entry in repacked.infolist()} == {zipfile.ZIP_LZMA}
    assert "1 wheels:" in capsys.readouterr().out
