"""Each distribution requires what it imports, with a lowest and a highest version."""

import importlib.metadata
import pathlib
import re
import sys
import tomllib
from collections.abc import Iterable

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
PARTS = ("common", "csrc", "operator", "trainer", "analyzer")
OF_ANOTHER = {"annotated_types": "pydantic", "pydantic_core": "pydantic", "triton": "torch"}
"""Modules of distributions that another one pins."""
IMPORT = re.compile(r"^\s*(?:import|from) (\w+)", re.MULTILINE)
DISTRIBUTIONS = importlib.metadata.packages_distributions()


def required(part: str | None) -> list[Requirement]:
    """Requirements of a part, or of the development of all; of our own parts, which have one version, their extras."""
    path = ROOT / (part or "") / "pyproject.toml"
    read = tomllib.loads(path.read_text(encoding="utf-8"))
    if part is None:
        requirements = read["dependency-groups"]["dev"]
    else:
        extras = read["project"].get("optional-dependencies", {})
        requirements = [
            *read["project"].get("dependencies", []),
            *(requirement for extra in extras.values() for requirement in extra),
        ]
    found = [Requirement(requirement) for requirement in requirements]
    ours = [requirement for requirement in found if requirement.name.startswith("megatronapp-")]
    extras = [more for part in ours if part.extras for more in required(part.name.partition("-")[2])]
    return [requirement for requirement in found if requirement not in ours] + extras


def imported(folders: Iterable[pathlib.Path]) -> set[str]:
    """Names of all top-level modules that are imported there, wherever in a file."""
    paths = (path for folder in folders for path in folder.rglob("*.py"))
    return {name for path in paths for name in IMPORT.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("part", [*PARTS, None])
def test_a_requirement_is_a_range_or_a_single_version(part: str | None) -> None:
    for requirement in required(part):
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators in ({">=", "<"}, {"=="}), f"{requirement}: write a lowest and a highest version"


@pytest.mark.parametrize("part", [*PARTS, None])
def test_an_imported_distribution_is_required(part: str | None) -> None:
    folders = [ROOT / part / "src"] if part else [ROOT / name for name in ("tests", "bench", "scripts")]
    requirements = (
        required(part) if part else [requirement for each in (*PARTS, None) for requirement in required(each)]
    )
    known = {canonicalize_name(requirement.name) for requirement in requirements}
    for module in sorted(imported(folders) - set(sys.stdlib_module_names)):
        owners = {
            canonicalize_name(distribution) for distribution in DISTRIBUTIONS.get(OF_ANOTHER.get(module, module), [])
        }
        ours = any(re.match("megatronapp", owner) for owner in owners)
        assert not owners or ours or owners & known, f"{part or 'dev'} imports {module} of {sorted(owners)}"
