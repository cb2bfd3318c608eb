"""Our images, built by scripts/build_images.sh on a base of Debian's packages, and taken into the nodes."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import IO

from cluster.layout import PAUSE_IMAGE, ROOT, ClusterError, ClusterNode

IMAGES, TAKEN = "images", "taken"
"""Folders of a node that outlive the cluster where images are kept."""
OURS = ("operator", "analyzer", "trainer")
_PAUSE = """\
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void leave(int number) { (void)number; _exit(0); }
static void reap(int number) { (void)number; while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) { signal(SIGINT, leave); signal(SIGTERM, leave); signal(SIGCHLD, reap); for (;;) pause(); }
"""


def version() -> str:
    """The tag of our images."""
    text = (ROOT / "operator" / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "(.*)"', text, re.MULTILINE)
    assert found
    return found[1]


def name(part: str) -> str:
    """An image of ours as a manifest names it."""
    return f"megatronapp-{part}:{version()}"


class Builder:
    """Program buildah with separate storage, which outlives the cluster: unchanged layers are not built again."""

    def __init__(self) -> None:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        self.folder = cache / "megatronapp" / "images"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "storage.conf"
        lines = ("[storage]", 'driver = "overlay"', 'runroot = "/run/megatronapp-images"')
        path.write_text("\n".join([*lines, f'graphroot = "{self.folder / "storage"}"', ""]), encoding="utf-8")
        # Control groups of a hybrid machine are more than buildah's own isolation knows.
        self.environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(path), "BUILDAH_ISOLATION": "chroot"}

    def build(self) -> None:
        """Build our images and those that they are based on."""
        self._run([ROOT / "scripts" / "cluster" / "base_images.sh"])
        suite = _suite()
        versions = {
            "BASE": f"localhost/megatronapp-base:{suite}-verbs",
            "BUILDER": f"localhost/megatronapp-builder:{suite}",
        }
        build_command = ["nice", ROOT / "scripts" / "build_images.sh", *OURS]
        self._run(build_command, {"ENGINE": "buildah", "TAG": version(), **versions})

    def give(self, image: str, node: ClusterNode) -> bool:
        """Take an image into a node, unless it has just this one; whether it was taken."""
        full = image if "/" in image else f"docker.io/library/{image}"
        local = image if "/" in image else f"localhost/{image}"
        made = self._read(["inspect", "--type", "image", "--format", "{{.FromImageDigest}}", local])
        marker = _marker(node, image)
        if marker.exists() and marker.read_text(encoding="utf-8") == made:
            return False
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            # Layers stay as they are: to pack and unpack 5 GB takes minutes.
            plain = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-oci-accept-uncompressed-layers"]
            self._run([*plain, f"containers-storage:{local}", f"oci:{folder}:{full}"])
            with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as packed:
                _run(node.runtime("images", "import", "-"), stdin=packed.stdout)
        marker.write_text(made, encoding="utf-8")
        return True

    def pause(self) -> None:
        """Build the image that holds a pod's network."""
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "pause.c"
            source.write_text(_PAUSE, encoding="utf-8")
            _run(["gcc", "-Os", "-static", "-s", "-o", f"{folder}/pause", str(source)])
            made = self._read(["from", "scratch"])
            self._run(["buildah", "add", "--quiet", made, f"{folder}/pause", "/pause"])
            self._run(["buildah", "config", "--entrypoint", '["/pause"]', made])
            self._run(["buildah", "commit", "--quiet", "--rm", "--timestamp", "0", made, PAUSE_IMAGE])

    def _run(self, command: list[object], more: dict[str, str] | None = None) -> None:
        _run([str(argument) for argument in command], {**self.environment, **(more or {})})

    def _read(self, command: list[str]) -> str:
        return _run(["buildah", *command], self.environment).strip()


def copy_images(first: ClusterNode, other: ClusterNode) -> None:
    """Give a node all that a first one has taken, as hard links; nothing runs on either.

    Images are never changed where they lie, so both may have the same files; only the lists of them are copied.
    """
    for name in (IMAGES, TAKEN):
        shutil.rmtree(other.folder / name, ignore_errors=True)
        _run(["cp", "--archive", "--link", str(first.folder / name), str(other.folder / name)])
    for path in (other.folder / IMAGES).glob("*/*.db"):
        copied = path.with_suffix(".copy")
        shutil.copy2(path, copied)
        copied.replace(path)
    for path in (other.folder / TAKEN).iterdir():
        text = path.read_text(encoding="utf-8")
        path.unlink()
        path.write_text(text, encoding="utf-8")


def _suite() -> str:
    text = pathlib.Path("/etc/os-release").read_text(encoding="utf-8")
    found = re.search(r"^VERSION_CODENAME=(\w+)", text, re.MULTILINE)
    if not found:
        raise ClusterError("/etc/os-release names no VERSION_CODENAME, so there is no Debian to make a base from")
    return found[1]


def _marker(node: ClusterNode, image: str) -> pathlib.Path:
    folder = node.folder / TAKEN
    folder.mkdir(exist_ok=True)
    return folder / re.sub(r"\W", "-", image)


def _run(command: list[str], environment: dict[str, str] | None = None, stdin: IO[bytes] | None = None) -> str:
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout
