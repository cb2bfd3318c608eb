"""Write the hub's OpenAPI document, from which the page's types are made; --check fails if it drifted."""

import argparse
import json
import pathlib
import sys

from megatronapp_analyzer.hub.app import build_api

TARGET = pathlib.Path(__file__).parents[1] / "frontend" / "src" / "api" / "openapi.json"


def render() -> str:
    return json.dumps(build_api().openapi(), indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if the file would change")
    arguments = parser.parse_args()
    document = render()
    if not arguments.check:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(document, encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == document:
        return 0
    print(f"{TARGET.name} is not what the hub's interface says; run 'make generate'", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
