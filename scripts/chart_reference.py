"""Reference of the chart's values, from values.yaml and its comments (docs/reference-chart.md)."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).parents[1]
VALUES = ROOT / "charts" / "megatronapp" / "values.yaml"
INTRODUCTION = """\
# Reference: values of the chart

Generated from [values.yaml](../charts/megatronapp/values.yaml) by `make generate`; how to
use them: [the chart](../charts/megatronapp/README.md). A value that does not exist is refused.
"""
TABLE = ("| Value | Default | Meaning |", "|---|---|---|")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChartValue:
    """A value, or a block of values, with the comment above it."""

    path: str
    meaning: str
    default: str | None
    """Default in YAML's flow style; None: a block, whose values follow."""

    @property
    def section(self) -> str:
        """Name of the outermost block; the same as the path for a value outside of blocks."""
        return self.path.partition(".")[0]


def read_values(text: str) -> list[ChartValue]:
    """Return all values in their order, each block before what is in it."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError("values.yaml is no mapping")
    return list(_values_of(node, text.split("\n"), ""))


def _values_of(node: yaml.MappingNode, lines: list[str], prefix: str) -> Iterator[ChartValue]:
    for key, value in node.value:
        path, meaning = f"{prefix}{key.value}", _comment_above(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and not value.flow_style and value.value:
            yield ChartValue(path=path, meaning=meaning, default=None)
            yield from _values_of(value, lines, f"{path}.")
        else:
            yield ChartValue(path=path, meaning=meaning, default=_flow(value))


def _comment_above(lines: list[str], line: int) -> str:
    """Return the text of the comment that ends above a line."""
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip().lstrip("#").strip())
    return " ".join(found).removeprefix("-- ")


def _flow(node: yaml.Node) -> str:
    value: Any = yaml.safe_load(yaml.serialize(node))
    return json.dumps(value, ensure_ascii=False)


def render_chart(text: str | None = None) -> str:
    """Render the page: a table for each outermost block, first of the values outside of blocks."""
    values = read_values(VALUES.read_text(encoding="utf-8") if text is None else text)
    blocks = {value.path: value for value in values if value.default is None}
    lines = [INTRODUCTION, *TABLE]
    lines += [_row(value) for value in values if value.section not in blocks]
    for name, block in blocks.items():
        if "." not in name:
            lines += ["", f"## {name}", "", *([_escaped(block.meaning), ""] if block.meaning else []), *TABLE]
            rows = [value for value in values if value.section == name and value is not block]
            lines += [_row(value) for value in rows if value.meaning or value.default is not None]
    return "\n".join(lines) + "\n"


def _row(value: ChartValue) -> str:
    default = "" if value.default is None else f"`{value.default}`"
    return f"| `{value.path}` | {_escaped(default)} | {_escaped(value.meaning)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
