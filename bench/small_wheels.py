"""Repacks wheels for a host that takes few bytes: without entries that nothing here loads, and by LZMA.

    python bench/small_wheels.py .whl/*.whl

pip unpacks such wheels as any others. Other installers may only know DEFLATE.
"""

import argparse
import csv
import io
import pathlib
import re
import sys
import zipfile
from collections.abc import Sequence

UNUSED_ENTRIES = {
    # Static libraries, test programs, and copies of libraries: UCX loads those that end in .so.0.
    "libucx": re.compile(r"\.(a|so|h)$|\.so\.0\.0\.0$|perftest|/bin/"),
    # File systems, formats and services other than local Parquet, and sources. Its core links libarrow_substrait.
    "pyarrow": re.compile(
        r"flight|s3|/_?substrait|azure|gcs|hdfs|orc|gandiva|encryption|cpp_tests|/(tests|include|src)/"
        r"|\.(pyx|pxd|pxi|h|cc|pyi)$|libarrow_python\.so(\.\d+\.\d+\.\d+)?$"
    ),
    # What it was built from, and extensions other than that of strings.
    "cel_expr_python": re.compile(r"^bazel-project/|/ext_(bindings|encoders|math|optional|proto)\."),
}
"""Entries that wheels whose names begin with the key do without."""


def repack(wheel: pathlib.Path) -> None:
    """Replace a wheel by a smaller one of the same name, whose RECORD lists what it still has."""
    unused = next((pattern for name, pattern in UNUSED_ENTRIES.items() if wheel.name.startswith(name)), None)
    small = wheel.with_suffix(".small")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_LZMA) as target:
        entries = [entry for entry in source.infolist() if not (unused and unused.search(entry.filename))]
        names = {entry.filename for entry in entries}
        for entry in entries:
            content = source.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                content = _without_missing(content, names)
            entry.compress_type = zipfile.ZIP_LZMA
            target.writestr(entry, content)
    small.replace(wheel)


def _without_missing(record: bytes, names: set[str]) -> bytes:
    """Return a RECORD without the rows of files that are not among `names`."""
    rows = [row for row in csv.reader(io.StringIO(record.decode())) if row and row[0] in names]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=pathlib.Path)
    options = parser.parse_args(arguments)
    before = sum(wheel.stat().st_size for wheel in options.wheels)
    for wheel in options.wheels:
        repack(wheel)
    after = sum(wheel.stat().st_size for wheel in options.wheels)
    print(f"{len(options.wheels)} wheels: {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
