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


def test_decisions_have_a_status() -> None:
    for path in sorted((DOCS / "adr").glob("*.md")):
        assert path.read_text(encoding="utf-8").split("\n")[2].startswith("Status: "), path.name


@pytest.mark.parametrize("part", PARTS)
def test_readme_of_a_part_has_at_most_thirty_lines_and_is_listed(part: str) -> None:
    readme = ROOT / part / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 30
    assert readme in linked(DOCS / "README.md")


def glossary_modules() -> list[tuple[str, str]]:
    """Return the parts and modules that the glossary names as the places of its terms."""
    terms = (DOCS / "glossary.md").read_text(encoding="utf-8").partition("## Words to avoid")[0]
    places = re.findall(r"(common|operator|trainer|analyzer|csrc): ((?:`[a-z0-9_.]+`(?:, )?)+)", terms)
    return [(part, module) for part, modules in places for module in re.findall(r"`([^`]+)`", modules)]


def test_glossary_names_places_that_exist() -> None:
    modules = glossary_modules()
    assert len(modules) > 100
    missing = []
    for part, module in modules:
        path = module.replace(".", "/")
        package = ROOT / part / "src" / f"megatronapp_{part}" / path
        header = ROOT / "csrc/include/megatronapp" / path
        exists = (
            header.is_dir() or header.with_suffix(".hpp").is_file()
            if part == "csrc"
            else (package.is_dir() or package.with_suffix(".py").is_file())
        )
        if not exists:
            missing.append(f"{part}: {module}")
    assert not missing
