"""The indexes of the documentation list every page, and the pages for newcomers stay short."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PARTS = ("common", "operator", "trainer", "analyzer", "csrc", "frontend")


def linked(page: pathlib.Path) -> set[pathlib.Path]:
    targets = re.findall(r"\]\(([^)#:]+)", page.read_text(encoding="utf-8"))
    return {(page.parent / target).resolve() for target in targets}


def test_index_lists_every_page_of_the_docs() -> None:
    assert set(DOCS.glob("*.md")) - linked(DOCS / "README.md") == {DOCS / "README.md"}


def test_index_lists_every_decision_in_the_order_of_its_number() -> None:
    listed = re.findall(
        r"^\| \[(\d{4})\]\(adr/(\d{4}-[a-z0-9-]+\.md)\)", (DOCS / "README.md").read_text(), re.MULTILINE
    )
    assert [name for _, name in listed] == sorted(path.name for path in (DOCS / "adr").glob("*.md"))
    assert all(name.startswith(f"{number}-") for number, name in listed)


def test_decisions_have_a_number_of_their_own_and_name_it() -> None:
    decisions = sorted((DOCS / "adr").glob("*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert len(set(numbers)) == len(numbers)
    for path in decisions:
        assert path.read_text(encoding="utf-8").startswith(f"# {path.name[:4]} "), path.name


@pytest.mark.parametrize("part", PARTS)
def test_readme_of_a_part_has_at_most_thirty_lines_and_is_listed(part: str) -> None:
    readme = ROOT / part / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 30
    assert readme in linked(DOCS / "README.md")
