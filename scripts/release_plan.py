"""Documents of a release, without effects: names of images, values of the chart, provenance, checksums, signing."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

IMAGES = ("operator", "analyzer", "trainer")
PLATFORMS = ("linux/amd64", "linux/arm64")
"""Platforms for which scripts/lock_images.py has hashes of wheels."""
SPDX = "application/spdx+json"
IN_TOTO = "application/vnd.in-toto+json"
SLSA = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://megatronapp.io/release/v1"
"""Meaning of the parameters in a provenance: docs/releasing.md."""
_VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")
_REGISTRY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
Object = dict[str, Any]


class ReleaseError(Exception):
    """Reason why a release cannot be made; the message says what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """Something that was pushed: an image of one platform, the index of an image, or the chart."""

    repository: str
    """Repository in the registry, as host/path."""
    digest: str
    platform: str | None = None
    """Platform of an image; None: an index, or the chart."""

    @property
    def reference(self) -> str:
        """Name of the artifact by its digest."""
        return f"{self.repository}@{self.digest}"

    @property
    def file_prefix(self) -> str:
        """Beginning of the names of its files: the image and its architecture."""
        name = self.repository.rpartition("/")[2]
        return name if self.platform is None else f"{name}-{architecture(self.platform)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSource:
    """Commit and version of a release."""

    version: str
    commit: str
    dirty: bool
    """True if files differ from the commit; only a dry run may have such a source."""
    repository: str
    """Address of the repository."""
    built: bool
    """True if the images are built by the release itself; otherwise it only knows what they say of themselves."""


def parse_version(text: str) -> str:
    """Return the version. Raises ReleaseError."""
    if not _VERSION.fullmatch(text):
        raise ReleaseError(f"VERSION={text} is no version; write one such as 1.2.3 or 1.2.3-rc.1, without a v")
    return text


def parse_registry(text: str) -> str:
    """Return the registry with its path. Raises ReleaseError."""
    if not _REGISTRY.fullmatch(text):
        raise ReleaseError(
            f"REGISTRY={text} is no registry; write host/path in lower case, as in registry.example/team"
        )
    return text


def repository_address(remote: str) -> str:
    """Return the address of a git remote as a URL, without user and password; git's `user@host:path` is SSH's."""
    if found := re.fullmatch(r"(?:[^/@:]+@)?([^/@:]+):(?!//)(.+)", remote):
        return f"ssh://{found[1]}/{found[2].removeprefix('/')}"
    return re.sub(r"//[^/@]*@", "//", remote)


def parse_choices(name: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return comma separated words, each of which must be known. Raises ReleaseError."""
    choices = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not choices or not set(choices) <= set(known):
        raise ReleaseError(f"{name}={text} must be a list of {', '.join(known)}, separated by commas")
    return choices


def architecture(platform: str) -> str:
    """Return the architecture of a platform, which ends the tag of its image."""
    return platform.rpartition("/")[2]


def wrong_versions(found: Mapping[str, str], version: str) -> list[str]:
    """Return a line for each file whose version is another than that of the release."""
    return [f"{path} has version {other}; write {version}" for path, other in sorted(found.items()) if other != version]


def chart_values(text: str, registry: str, digests: Mapping[str, str]) -> str:
    """Return the chart's values.yaml with the registry and the digests of its images. Raises ReleaseError."""
    text = _replaced(text, '  registry: ""', f"  registry: {registry}")
    for image, digest in digests.items():
        line = f'  {image}: {{repository: megatronapp-{image}, tag: "", digest: ""}}'
        text = _replaced(text, line, line.replace('digest: ""', f'digest: "{digest}"'))
    return text


def _replaced(text: str, line: str, by: str) -> str:
    lines = text.split("\n")
    if lines.count(line) != 1:
        raise ReleaseError(f"charts/megatronapp/values.yaml must have the line {line.strip()!r} once")
    lines[lines.index(line)] = by
    return "\n".join(lines)


def provenance(
    source: ReleaseSource, artifact: Artifact, *, bases: Iterable[str], builder: str, started: str
) -> Object:
    """Return the predicate of SLSA provenance for an image; `bases` are images that it is based on."""
    commit = {"uri": f"git+{source.repository}", "digest": {"gitCommit": source.commit}}
    if source.dirty:
        commit["annotations"] = {"dirty": True}
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"version": source.version, "platform": artifact.platform},
            "internalParameters": {"built": source.built},
            "resolvedDependencies": [commit, *map(_base, bases)],
        },
        "runDetails": {"builder": {"id": builder}, "metadata": {"startedOn": started}},
    }


def _base(reference: str) -> Object:
    name, _, digest = reference.partition("@sha256:")
    return {"uri": f"oci://{name}", **({"digest": {"sha256": digest}} if digest else {})}


def statement(artifact: Artifact, predicate: Object) -> Object:
    """Return the in-toto statement that a predicate is about an artifact."""
    algorithm, _, digest = artifact.digest.partition(":")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": artifact.repository, "digest": {algorithm: digest}}],
        "predicateType": SLSA,
        "predicate": predicate,
    }


def index_problems(index: Object, expected: Mapping[str, str]) -> list[str]:
    """Return what is wrong with an image index; `expected` are digests by platform."""
    found = {
        f"{entry['platform']['os']}/{entry['platform']['architecture']}": entry["digest"]
        for entry in index.get("manifests", ())
        if "platform" in entry
    }
    return [
        f"the index has {found.get(platform, 'nothing')} for {platform}, and {digest} was pushed"
        for platform, digest in expected.items()
        if found.get(platform) != digest
    ] + [f"the index has {platform}, which was not built" for platform in sorted(found.keys() - expected.keys())]


def attachment_problems(kinds: Iterable[str]) -> list[str]:
    """Return what is missing among the types of what is attached to an image."""
    found = set(kinds)
    return [f"nothing of type {kind} is attached" for kind in (SPDX, IN_TOTO) if kind not in found]


def checksums(files: Mapping[str, bytes]) -> str:
    """Return SHA256SUMS, as `sha256sum --check` reads it."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))


def signing_script(artifacts: Sequence[Artifact]) -> str:
    """Return a script that signs everything by digest with cosign, and attests SBOM and provenance of each image."""
    lines = [
        "#!/usr/bin/env bash",
        "# Signs a release by digest. Needs cosign 2.4 or newer, and rights to push; with COSIGN_KEY a key of yours,",
        "# otherwise an identity that cosign asks for.",
        "set -euo pipefail",
        'cd "$(dirname "$0")"',
        'key=(--yes ${COSIGN_KEY:+--key "$COSIGN_KEY"})',
    ]
    for artifact in artifacts:
        lines.append(f'cosign sign "${{key[@]}}" {artifact.reference}')
        if artifact.platform is not None:
            for kind, ending in (("spdxjson", "spdx.json"), ("slsaprovenance1", "slsa.json")):
                predicate = f"--type {kind} --predicate {artifact.file_prefix}.{ending}"
                lines.append(f'cosign attest "${{key[@]}}" {predicate} {artifact.reference}')
    return "\n".join(lines) + "\n"


def summary(
    source: ReleaseSource, images: Mapping[str, Artifact], platforms: Sequence[Artifact], chart: Artifact
) -> Object:
    """Return what was released, by digest."""
    return {
        "version": source.version,
        "commit": source.commit,
        "images": {
            name: {
                "index": index.reference,
                "platforms": {
                    artifact.platform: artifact.digest
                    for artifact in platforms
                    if artifact.repository == index.repository
                },
            }
            for name, index in images.items()
        },
        "chart": chart.reference,
    }
