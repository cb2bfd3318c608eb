"""Print what the given parts of this repository ask for, without these parts themselves: `requirements.py PART...`."""

import pathlib
import sys
import tomllib

OURS = "megatronapp-"


def requirements(parts: list[str]) -> list[str]:
    """Requirements of the parts' pyproject.toml files, sorted, each once."""
    found: set[str] = set()
    for part in parts:
        document = tomllib.loads(pathlib.Path(part, "pyproject.toml").read_text(encoding="utf-8"))
        found.update(document["project"].get("dependencies", []))
    return sorted(requirement for requirement in found if not requirement.startswith(OURS))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
