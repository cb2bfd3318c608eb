"""Program inside an image: `look.py MODULE...` imports the modules and prints what it sees, as JSON after LOOK."""

import importlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import sys

HOME = pathlib.Path("/opt/megatronapp")
BUILD_ONLY = (pathlib.Path("/etc/pip.conf"), pathlib.Path("/run/secrets"), HOME.with_name("build"))


def main() -> None:
    # Before any import: setuptools adds what it carries to the path.
    versions = {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
    for module in sys.argv[1:]:
        importlib.import_module(module)
    seen = {
        "uid": os.getuid(),
        "versions": versions,
        "command": shutil.which("megatronapp"),
        "pip": shutil.which("pip"),
        "page": (HOME / "frontend" / "index.html").exists(),
        "writable": os.access(HOME, os.W_OK),
        "left": [str(path) for path in BUILD_ONLY if path.exists()],
    }
    print("LOOK", json.dumps(seen))


if __name__ == "__main__":
    main()
