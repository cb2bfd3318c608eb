"""Make a release: images of several platforms with SBOM and provenance, the chart, the definitions, checksums.

With --dry-run everything is pushed to a registry on 127.0.0.1 that ends with this command; the results name the one
that was asked for. Nothing is signed: the folder of results has a script for that (docs/releasing.md).
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import release_plan as plan
from release_plan import Artifact, ReleaseError, ReleaseSource

ROOT = pathlib.Path(__file__).parents[1]
CHART = ROOT / "charts" / "megatronapp"
BUILDER = "docker.io/library/python:3.11-bookworm"
"""Image in which the Dockerfiles build ours, unless the variable BUILDER names another."""
BASE_LABEL = "org.opencontainers.image.base.name"
MARK = ".release"
"""File in a folder of results, by which it may be emptied for the next release."""
POLL_S = 0.05
PROCESSORS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


def main(argv: Sequence[str] | None = None) -> int:
    """Make the release; return the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        with Release(arguments) as release:
            release.make()
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    here = PROCESSORS.get(platform.machine(), "linux/amd64")
    parser = argparse.ArgumentParser(prog="scripts/release.py", description=__doc__)
    parser.add_argument("--version", required=True, help="version, as in all parts' pyproject.toml")
    parser.add_argument("--registry", required=True, help="registry and path, as in registry.example/team")
    parser.add_argument("--dry-run", action="store_true", help="push nothing beyond this computer")
    parser.add_argument("--platforms", help=f"default: all; in a dry run that of this computer, {here}")
    parser.add_argument("--images", default=",".join(plan.IMAGES), help="default: %(default)s")
    parser.add_argument("--skip-build", action="store_true", help="push images that the engine has already")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "dist" / "release", help="default: %(default)s")
    parser.add_argument("--builder-id", default="https://megatronapp.io/release/manual", help="who builds, as a URI")
    return parser


class Release:
    """A release that is being made; its registry and its temporary folder end with it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.version = plan.parse_version(arguments.version)
        self.registry = plan.parse_registry(arguments.registry)
        self.images = plan.parse_choices("IMAGES", arguments.images, plan.IMAGES)
        here = PROCESSORS.get(platform.machine(), "linux/amd64")
        chosen = arguments.platforms or (here if arguments.dry_run else ",".join(plan.PLATFORMS))
        self.platforms = plan.parse_choices("PLATFORMS", chosen, plan.PLATFORMS)
        if not arguments.dry_run and set(self.images) != set(plan.IMAGES):
            raise ReleaseError("the chart names all images; leave IMAGES out, or add DRY_RUN=1")
        self.dry_run, self.skip_build = bool(arguments.dry_run), bool(arguments.skip_build)
        self.output: pathlib.Path = arguments.output
        self.builder = str(arguments.builder_id)
        self.engine = engine()
        self.started = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.host = self.registry.partition("/")[0]
        """Host to which images and chart are pushed: another one in a dry run."""

    def __enter__(self) -> "Release":
        self.source = self._source()  # before tools and images are built
        with contextlib.ExitStack() as ends:
            self.work = pathlib.Path(ends.enter_context(tempfile.TemporaryDirectory()))
            self.tools = pathlib.Path(run(ROOT / "scripts" / "kube_tools.sh", "release").strip())
            self.helm = pathlib.Path(run(ROOT / "scripts" / "kube_tools.sh", "helm").strip()) / "helm"
            if self.dry_run:
                self.host = ends.enter_context(local_registry(self.tools / "crane", self.work))
            self._ends = ends.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def make(self) -> None:
        """Make everything, read it back, and write the results. Raises ReleaseError."""
        source = self.source
        self._require_new()
        empty(self.output)
        platforms: list[Artifact] = []
        indexes: dict[str, Artifact] = {}
        for image in self.images:
            built = [self._push(image, target) for target in self.platforms]
            for artifact in built:
                self._attach(source, artifact)
            indexes[image] = self._index(image, built)
            platforms += built
        chart = self._push_chart(indexes)
        for definition in sorted((ROOT / "crds").glob("*.yaml")):
            shutil.copy(definition, self.output)
        released = plan.summary(source, indexes, platforms, chart)
        write(self.output / "release.json", released)
        script = self.output / "sign.sh"
        script.write_text(plan.signing_script([*indexes.values(), *platforms, chart]), encoding="utf-8")
        script.chmod(0o755)
        files = {path.name: path.read_bytes() for path in self.output.iterdir() if path.name != MARK}
        (self.output / "SHA256SUMS").write_text(plan.checksums(files), encoding="utf-8")
        print(json.dumps(released, indent=2))
        where = "nothing was pushed beyond this computer" if self.dry_run else f"to sign it: {script}"
        print(f"release: {self.version} is in {self.output}; {where}", file=sys.stderr)

    def _source(self) -> ReleaseSource:
        """Return what is released. Raises ReleaseError unless it is the tagged commit, with this version everywhere."""
        dirty = bool(git("status", "--porcelain"))
        commit = git("rev-parse", "HEAD")
        if not self.dry_run:
            tag = f"v{self.version}"
            if dirty:
                raise ReleaseError("there are uncommitted changes; commit or remove them, or add DRY_RUN=1")
            if git("tag", "--points-at", "HEAD", "--list", tag) != tag:
                raise ReleaseError(f"the commit has no tag {tag}; run: git tag -s {tag}")
        if wrong := plan.wrong_versions(versions(), self.version):
            raise ReleaseError("\n".join(wrong))
        address = run("git", "-C", ROOT, "config", "--default", "unknown", "--get", "remote.origin.url").strip()
        return ReleaseSource(
            version=self.version,
            commit=commit,
            dirty=dirty,
            repository=plan.repository_address(address),
            built=not self.skip_build,
        )

    def _require_new(self) -> None:
        """Raise ReleaseError if this version is complete in the registry, where the chart is last.

        Users have pinned its digests, and a chart that is packed again has another one.
        """
        name = f"{self.registry}/charts/megatronapp:{self.version}"
        try:
            digest = self._oras("resolve", self._pushed(name)).strip()
        except ReleaseError:  # not there; what else is wrong with the registry, such as a login, ends the first push
            return
        raise ReleaseError(f"{name} is released already, as {digest}; raise the version")

    def _push(self, image: str, target: str) -> Artifact:
        """Build an image for a platform, and push it."""
        tag = f"{self.version}-{plan.architecture(target)}"
        local, repository = f"megatronapp-{image}:{tag}", f"{self.registry}/megatronapp-{image}"
        pushed = self._pushed(f"{repository}:{tag}")
        if not self.skip_build:
            run(
                ROOT / "scripts" / "build_images.sh",
                image,
                environment={"TAG": tag, "PLATFORM": target, "REGISTRY": "", "ENGINE": self.engine},
                shown=True,
            )
        if self.engine == "docker":
            run("docker", "tag", local, pushed)
            run("docker", "push", "--quiet", pushed)
        else:
            check = ["--tls-verify=false"] if self.dry_run else []
            run("buildah", "push", "--quiet", *check, f"localhost/{local}", f"docker://{pushed}")
        digest = self._oras("resolve", pushed).strip()
        config = json.loads(self._oras("manifest", "fetch-config", pushed))
        found = f"{config.get('os')}/{config.get('architecture')}"
        if found != target:
            raise ReleaseError(f"{local} is for {found}, not {target}; the engine cannot build for {target} here")
        return Artifact(repository=repository, digest=digest, platform=target)

    def _attach(self, source: ReleaseSource, artifact: Artifact) -> None:
        """Attach SBOM and provenance to an image, and read back that they are there."""
        pushed = self._pushed(artifact.reference)
        sbom = self.output / f"{artifact.file_prefix}.spdx.json"
        insecure = {"SYFT_REGISTRY_INSECURE_USE_HTTP": "true"} if self.dry_run else {}
        run(
            *(self.tools / "syft", "scan", "--quiet", "--from", "registry", "--platform", str(artifact.platform)),
            *("--output", f"spdx-json={sbom}", pushed),
            environment={"SYFT_CHECK_FOR_APP_UPDATE": "false", **insecure},
        )
        config = json.loads(self._oras("manifest", "fetch-config", pushed)).get("config") or {}
        base = (config.get("Labels") or {}).get(BASE_LABEL)
        builder = None if self.skip_build else os.environ.get("BUILDER") or BUILDER
        bases = [image for image in (base, builder) if image is not None]
        predicate = plan.provenance(source, artifact, bases=bases, builder=self.builder, started=self.started)
        write(self.output / f"{artifact.file_prefix}.slsa.json", predicate)
        statement = self.output / f"{artifact.file_prefix}.intoto.json"
        write(statement, plan.statement(artifact, predicate))
        for kind, path in ((plan.SPDX, sbom), (plan.IN_TOTO, statement)):
            self._oras("attach", "--artifact-type", kind, pushed, f"{path.name}:{kind}", folder=self.output)
        listed = json.loads(self._oras("discover", "--format", "json", pushed))
        refuse(artifact.reference, plan.attachment_problems(kinds_of(listed)))

    def _index(self, image: str, built: Sequence[Artifact]) -> Artifact:
        """Push the index of an image's platforms, and read it back."""
        repository = f"{self.registry}/megatronapp-{image}"
        name = self._pushed(f"{repository}:{self.version}")
        self._oras("manifest", "index", "create", name, *(artifact.digest for artifact in built))
        found = self._oras("manifest", "fetch", name)
        expected = {str(artifact.platform): artifact.digest for artifact in built}
        refuse(name, plan.index_problems(json.loads(found), expected))
        return Artifact(repository=repository, digest=self._oras("resolve", name).strip())

    def _push_chart(self, indexes: Mapping[str, Artifact]) -> Artifact:
        """Package the chart with this registry and these digests, and push it."""
        staged = self.work / "megatronapp"
        shutil.copytree(CHART, staged)
        values = staged / "values.yaml"
        digests = {image: index.digest for image, index in indexes.items()}
        text = plan.chart_values(values.read_text(encoding="utf-8"), self.registry, digests)
        values.write_text(text, encoding="utf-8")
        version = ("--version", self.version, "--app-version", self.version)
        run(self.helm, "package", staged, *version, "--destination", self.output)
        packed = self.output / f"megatronapp-{self.version}.tgz"
        plain = ["--plain-http"] if self.dry_run else []
        run(self.helm, "push", packed, f"oci://{self._pushed(self.registry)}/charts", *plain)
        repository = f"{self.registry}/charts/megatronapp"
        digest = self._oras("resolve", self._pushed(f"{repository}:{self.version}")).strip()
        return Artifact(repository=repository, digest=digest)

    def _pushed(self, name: str) -> str:
        """Return the name at the host to which it is pushed."""
        return f"{self.host}/{name.partition('/')[2]}"

    def _oras(self, *arguments: str, folder: pathlib.Path | None = None) -> str:
        """Run oras; without TLS in a dry run."""
        taken = 3 if arguments[:2] == ("manifest", "index") else 2 if arguments[0] == "manifest" else 1
        plain = ["--plain-http"] if self.dry_run else []
        return run(self.tools / "oras", *arguments[:taken], *plain, *arguments[taken:], folder=folder)


def engine() -> str:
    """Return the program that builds images. Raises ReleaseError."""
    if given := os.environ.get("ENGINE"):
        return given
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        return "docker"
    if shutil.which("buildah"):
        return "buildah"
    raise ReleaseError("needs docker or buildah (scripts/system_packages.sh e2e installs it)")


@contextlib.contextmanager
def local_registry(crane: pathlib.Path, folder: pathlib.Path) -> Iterator[str]:
    """Run a registry on a free port of 127.0.0.1; yield its host and port."""
    storage, log = folder / "registry", folder / "registry.log"
    storage.mkdir()
    command = [str(crane), "registry", "serve", "--address", "127.0.0.1:0", "--disk", str(storage)]
    with log.open("wb") as out:  # a file, because it writes a line for each request
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        while not (found := re.search(r"serving on port ([0-9]+)", log.read_text(encoding="utf-8"))):
            if process.poll() is not None:
                raise ReleaseError(f"the local registry did not start:\n{log.read_text(encoding='utf-8')}")
            time.sleep(POLL_S)
        yield f"127.0.0.1:{found[1]}"
    finally:
        process.kill()
        process.wait()


def empty(folder: pathlib.Path) -> None:
    """Make an empty folder, or remove the results of an earlier release in it. Raises ReleaseError for any other."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(folder.iterdir())
    if found and not (folder / MARK).is_file():
        raise ReleaseError(f"--output {folder} holds other files; name an empty folder, or one that does not exist")
    for path in found:
        path.unlink()
    (folder / MARK).touch()


def kinds_of(listed: Mapping[str, Any]) -> list[str]:
    """Return the types of artifacts that `oras discover` lists."""
    return [str(each.get("artifactType")) for each in listed.get("referrers") or listed.get("manifests") or ()]


def versions() -> dict[str, str]:
    """Return the versions of the parts and of the chart, by file."""
    found = {}
    for path in [*sorted(ROOT.glob("*/pyproject.toml")), CHART / "Chart.yaml"]:
        match = re.search(r'^version(?:: | = )"?([^"\n]+)"?$', path.read_text(encoding="utf-8"), re.MULTILINE)
        found[str(path.relative_to(ROOT))] = match[1] if match else "none"
    return found


def refuse(name: str, problems: Sequence[str]) -> None:
    """Raise ReleaseError if what was read back is not what was pushed."""
    if problems:
        raise ReleaseError(f"{name}: {'; '.join(problems)}")


def write(path: pathlib.Path, document: Any) -> None:  # noqa: ANN401 - JSON
    """Write a JSON document."""
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def git(*arguments: str) -> str:
    """Return what git prints about this repository."""
    return run("git", "-C", ROOT, *arguments).strip()


def run(
    *command: str | pathlib.Path,
    environment: Mapping[str, str] | None = None,
    folder: pathlib.Path | None = None,
    shown: bool = False,
) -> str:
    """Run a program and return its output; `shown` lets its own lines through. Raises ReleaseError."""
    parts = list(map(str, command))
    done = subprocess.run(
        parts,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        output = f":\n{done.stderr[-3000:]}" if done.stderr else ""
        raise ReleaseError(f"{' '.join(parts)} ended with {done.returncode}{output}")
    return done.stdout or ""


if __name__ == "__main__":
    sys.exit(main())
