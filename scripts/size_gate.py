"""Fail where a function has over 60 lines or a module over 500, or half of a part's functions have over 12.

TypeScript functions are held by eslint and C++ functions by clang-tidy; their modules are counted here.
"""

import ast
import pathlib
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

FUNCTION_LINES = 60
MODULE_LINES = 500
MEDIAN_LINES = 12
SUFFIXES = {".py", ".ts", ".vue", ".cpp", ".hpp", ".sh"}
GENERATED = {"frontend/src/api/hub.d.ts", "frontend/src/api/gateway.d.ts"}


def tracked_files() -> list[pathlib.Path]:
    listing = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    paths = (pathlib.Path(name) for name in listing.splitlines() if name not in GENERATED)
    return [path for path in paths if path.suffix in SUFFIXES and path.exists()]


def function_lengths(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of every function in Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1


def check() -> list[str]:
    """Return a line for each function or module that is too large."""
    found: list[str] = []
    lengths: dict[str, list[int]] = defaultdict(list)
    for path in tracked_files():
        source = path.read_text(encoding="utf-8")
        if (count := source.count("\n")) > MODULE_LINES:
            found.append(f"{path}: {count} lines; split it (at most {MODULE_LINES})")
        if path.suffix != ".py":
            continue
        for name, line, length in function_lengths(source):
            lengths[path.parts[0]].append(length)
            if length > FUNCTION_LINES:
                found.append(f"{path}:{line}: {name} has {length} lines; split it (at most {FUNCTION_LINES})")
    for part, values in lengths.items():
        if (median := statistics.median(values)) > MEDIAN_LINES:
            found.append(f"{part}: the median function has {median} lines (at most {MEDIAN_LINES})")
    return found


if __name__ == "__main__":
    problems = check()
    print("\n".join(problems) or "size gate: all functions and modules are within their limits")
    sys.exit(1 if problems else 0)
