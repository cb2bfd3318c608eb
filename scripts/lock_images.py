"""Write what images install, in versions of constraints.txt and with the hashes of the wheels that fit them.

images/tools.txt builds our parts; images/operator/requirements.txt and its like are what the parts need. The hashes are
those of wheels for glibc on the processors and Pythons below, as the package index lists them.
"""

import pathlib
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
IMAGES = {
    "operator": ("common", "operator"),
    "analyzer": ("common", "csrc", "analyzer"),
    "trainer": ("common", "csrc", "trainer"),
}
PROCESSORS, PYTHONS = ("x86_64", "aarch64"), ("3.11", "3.12", "3.13")
GLIBC = "manylinux_2_36"  # Debian 12, which the images are based on
TOOLS = ("uv", "cmake", "ninja")
"""Tools in addition to those of build-system tables; without the last two, installed ones of any version are used."""
OURS = re.compile(r"megatronapp-(?P<part>\w+)(?:\[(?P<extra>\w+)\])?==")
HEAD = "# Written by 'make constraints': versions of constraints.txt, hashes of the wheels for glibc.\n"
Wheels = dict[str, dict[str, set[str]]]
"""Hashes of each `name==version`, by processor."""


def main() -> None:
    (ROOT / "images" / "tools.txt").write_text(render(wheels(build_requirements())), encoding="utf-8")
    for image, parts in IMAGES.items():
        path = ROOT / "images" / image / "requirements.txt"
        path.write_text(render(wheels(requirements(parts))), encoding="utf-8")


def project(part: str) -> dict[str, Any]:
    """Return the content of the part's pyproject.toml."""
    return tomllib.loads((ROOT / part / "pyproject.toml").read_text(encoding="utf-8"))


def requirements(parts: tuple[str, ...]) -> set[str]:
    """Return the requirements of these parts, with those of our extras instead of our own parts."""
    found = set()
    for word in (word for part in parts for word in project(part)["project"].get("dependencies", [])):
        ours = OURS.match(word)
        if ours is None:
            found.add(word)
        elif ours["extra"]:
            found |= set(project(ours["part"])["project"]["optional-dependencies"][ours["extra"]])
    return found


def build_requirements() -> set[str]:
    """Return the requirements for building all parts."""
    parts = {part for image in IMAGES.values() for part in image}
    return {*TOOLS, *(word for part in parts for word in project(part)["build-system"]["requires"])}


def wheels(wanted: set[str]) -> Wheels:
    """The whole of what these need, on all processors and Pythons."""
    found: Wheels = defaultdict(lambda: defaultdict(set))
    for processor in PROCESSORS:
        for python in PYTHONS:
            for package in resolved(wanted, processor, python):
                hashes = {wheel["hashes"]["sha256"] for wheel in package.get("wheels", [])}
                if not hashes:
                    sys.exit(f"{package['name']} has no wheel for Python {python} on {processor}; take another version")
                found[f"{package['name']}=={package['version']}"][processor] |= hashes
    return found


def resolved(wanted: set[str], processor: str, python: str) -> list[dict[str, Any]]:
    """Packages as uv resolves them, with the wheels that fit."""
    target = ("--python-platform", f"{processor}-{GLIBC}", "--python-version", python)
    command = ("uv", "pip", "compile", "--quiet", "--constraints", "constraints.txt", *target)
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--format", "pylock.toml", "-"],
        cwd=ROOT,
        input="\n".join(sorted(wanted)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return list(tomllib.loads(done.stdout)["packages"])


def render(found: Wheels) -> str:
    """A requirements file; a package that only one processor needs says so."""
    lines = []
    for pin, by_processor in sorted(found.items()):
        marker = "" if len(by_processor) == len(PROCESSORS) else f' ; platform_machine == "{min(by_processor)}"'
        hashes = sorted(set().union(*by_processor.values()))
        lines.append(" \\\n".join([f"{pin}{marker}", *(f"    --hash=sha256:{one}" for one in hashes)]))
    names = [re.sub("==.*", "", pin) for pin in found]
    if len(set(names)) < len(names):
        sys.exit(f"more than one version of {', '.join(sorted({name for name in names if names.count(name) > 1}))}")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
