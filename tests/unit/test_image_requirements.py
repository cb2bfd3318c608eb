"""Requirements that images install by hash are those of our parts, whole, in the versions of constraints.txt."""

import importlib.metadata
import pathlib
import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).parents[2]
PARTS = {
    "operator": ("common", "operator"),
    "analyzer": ("common", "csrc", "analyzer"),
    "trainer": ("common", "csrc", "trainer"),
}
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}


def pins(path: pathlib.Path) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(dict(found)) == len(found) > 0
    return dict(found)


def table_of(part: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / part / "pyproject.toml").read_text(encoding="utf-8"))[name]
    return found


def dependencies_of(part: str) -> list[Requirement]:
    """Requirements of a part, with those of the extras of our other parts that it asks for."""
    found = [Requirement(text) for text in table_of(part, "project").get("dependencies", ())]
    for ours in [requirement for requirement in found if requirement.extras]:
        if ours.name.startswith("megatronapp-"):
            extras = table_of(ours.name.partition("-")[2], "project")["optional-dependencies"]
            found += [Requirement(text) for extra in ours.extras for text in extras[extra]]
    return found


def closure(requirements: list[Requirement]) -> set[str]:
    """Names of all that is needed on Linux, as the packages of this environment say."""
    names: set[str] = set()
    known: set[tuple[str, frozenset[str]]] = set()
    while requirements:
        requirement = requirements.pop()
        name, extras = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
        if name.startswith("megatronapp-") or (name, extras) in known:
            continue
        known.add((name, extras))
        names.add(name)
        for text in importlib.metadata.requires(requirement.name) or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({**LINUX, "extra": extra}) for extra in {"", *extras}):
                requirements.append(needed)
    return names


def test_the_trainers_image_has_what_nccl_needs_for_infiniband() -> None:
    """NCCL opens these when it starts and says nothing of those that are missing; the build loads each."""
    text = (ROOT / "images" / "trainer" / "Dockerfile").read_text(encoding="utf-8")
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1", "libnuma1"} <= set(text.split())
    assert 'LIBRARIES="libibverbs.so.1 libmlx5.so.1 librdmacm.so.1 libnuma.so.1"' in text
    assert 'RUN python3 -c "$LOADS" $LIBRARIES' in text


@pytest.mark.parametrize("image", PARTS)
def test_an_image_lists_all_that_its_parts_need(image: str) -> None:
    listed = pins(ROOT / "images" / image / "requirements.txt")
    requirements = [requirement for part in PARTS[image] for requirement in dependencies_of(part)]
    assert set(listed) == closure(requirements), "run `make constraints`"


@pytest.mark.parametrize("path", ["tools.txt", *(f"{image}/requirements.txt" for image in PARTS)])
def test_versions_are_those_of_the_constraints_and_each_has_a_hash(path: str) -> None:
    exact, file = pins(ROOT / "constraints.txt"), ROOT / "images" / path
    listed = pins(file)
    assert listed == {name: exact.get(name) for name in listed}
    for block in re.split(r"\n(?=[a-z])", file.read_text(encoding="utf-8"))[1:]:
        assert re.search(r"^    --hash=sha256:[0-9a-f]{64}", block, re.MULTILINE), block


def test_what_builds_our_parts_is_pinned() -> None:
    exact = pins(ROOT / "constraints.txt")
    for part in sorted({part for parts in PARTS.values() for part in parts}):
        for requirement in map(Requirement, table_of(part, "build-system")["requires"]):
            assert requirement.specifier.contains(exact[canonicalize_name(requirement.name)]), f"{part}: {requirement}"
            assert canonicalize_name(requirement.name) in pins(ROOT / "images" / "tools.txt")
