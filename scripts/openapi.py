"""Write the OpenAPI documents of hub and gateway, the source of the page's types; --check fails if one drifted."""

import argparse
import json
import pathlib
import sys

from fastapi import FastAPI

from megatronapp_analyzer.hub.http import app as hub
from megatronapp_operator.gateway import app as gateway

FOLDER = pathlib.Path(__file__).parents[1] / "frontend" / "src" / "api"


def render(api: FastAPI) -> str:
    return json.dumps(api.openapi(), indent=2, sort_keys=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a file would change")
    arguments = parser.parse_args()
    documents = {FOLDER / "hub.json": render(hub.build_api()), FOLDER / "gateway.json": render(gateway.build_api())}
    if not arguments.check:
        for path, document in documents.items():
            path.write_text(document, encoding="utf-8")
        return 0
    drifted = [path for path, document in documents.items() if not path.exists() or path.read_text() != document]
    for path in drifted:
        print(f"{path.name} is not what the interface says; run 'make generate'", file=sys.stderr)
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
