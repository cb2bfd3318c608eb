"""The reference of the chart's values: comments become meanings, and no value is missing."""

from collections.abc import Iterator
from typing import Any

import yaml
from chart_reference import VALUES, ChartValue, read_values, render_chart

TEXT = """\
# About the file.

# -- The name; left out:
# another | one.
name: ""
# What a part is.
part:
  count: 1

  # -- Where it runs.
  place: {zone: a, rack: [1, 2]}
  empty: {}
"""


def test_a_comment_is_of_the_value_below_it() -> None:
    assert read_values(TEXT) == [
        ChartValue(path="name", meaning="The name; left out: another | one.", default='""'),
        ChartValue(path="part", meaning="What a part is.", default=None),
        ChartValue(path="part.count", meaning="", default="1"),
        ChartValue(path="part.place", meaning="Where it runs.", default='{"zone": "a", "rack": [1, 2]}'),
        ChartValue(path="part.empty", meaning="", default="{}"),
    ]


def test_values_outside_of_blocks_are_first_and_bars_do_not_end_a_cell() -> None:
    page = render_chart(TEXT)
    assert '| `name` | `""` | The name; left out: another \\| one. |' in page
    assert page.index("| `name`") < page.index("## part\n\nWhat a part is.\n") < page.index("| `part.count` | `1` |  |")


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_value_of_the_chart_or_its_block_is_listed() -> None:
    page = render_chart()
    for path in leaves(yaml.safe_load(VALUES.read_text(encoding="utf-8"))):
        assert f"| `{path}` |" in page or f"| `{path.rpartition('.')[0]}` | `{{" in page, path
