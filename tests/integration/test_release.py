"""A dry run of a release: images of two platforms, their index, SBOMs, provenance and the chart, in a real registry.

The images are small and made for this test: another processor's cannot be built where its emulation is missing.
"""

import json
import os
import pathlib
import subprocess
import tarfile
from typing import Any

import kube
import pytest
import yaml
from release import Release, build_parser, main
from release_plan import ReleaseError

pytestmark = pytest.mark.full("builds oras, syft and crane, and runs buildah as root")
REGISTRY = "registry.example/team"
IMAGES = ("operator", "analyzer", "trainer")
METADATA = "Metadata-Version: 2.1\nName: sample-package\nVersion: 4.5.6\n"


@pytest.fixture
def version(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make images of two platforms in a storage of this test; return their version."""
    programs = kube.programs("release"), kube.programs("helm")
    assert all(programs)  # before HOME changes, where they are stored
    storage = tmp_path / "storage.conf"
    lines = ("[storage]", 'driver = "vfs"', f'runroot = "{tmp_path / "run"}"', f'graphroot = "{tmp_path / "graph"}"')
    storage.write_text("\n".join(lines) + "\n", encoding="utf-8")
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    monkeypatch.setenv("ENGINE", "buildah")
    text = (kube.ROOT / "operator" / "pyproject.toml").read_text(encoding="utf-8")
    found = next(line.split('"')[1] for line in text.splitlines() if line.startswith("version = "))
    metadata = tmp_path / "METADATA"
    metadata.write_text(METADATA, encoding="utf-8")
    place = "/opt/megatronapp/lib/python3.11/site-packages/sample_package-4.5.6.dist-info/METADATA"
    for architecture in ("amd64", "arm64"):
        made = buildah("from", "scratch")
        buildah("add", made, str(metadata), place)
        buildah("config", "--os", "linux", "--arch", architecture, made)
        for image in IMAGES:
            buildah("commit", "--format", "oci", made, f"localhost/megatronapp-{image}:{found}-{architecture}")
    return found


def buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def read(path: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def values_of(packed: pathlib.Path) -> dict[str, Any]:
    with tarfile.open(packed) as archive:
        member = archive.extractfile("megatronapp/values.yaml")
        assert member is not None
        return dict(yaml.safe_load(member.read()))


def test_a_dry_run_makes_a_whole_release(version: str, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "release"
    flags = ["--version", version, "--registry", REGISTRY, "--dry-run", "--skip-build", "--output", str(output)]
    with Release(build_parser().parse_args([*flags, "--platforms", "linux/amd64,linux/arm64"])) as release:
        release.make()
        with pytest.raises(ReleaseError, match=rf"charts/megatronapp:{version} is released already, as sha256:"):
            release.make()
    released = read(output / "release.json")
    assert set(released["images"]) == set(IMAGES)
    for image in IMAGES:
        index, platforms = (released["images"][image][name] for name in ("index", "platforms"))
        assert index.startswith(f"{REGISTRY}/megatronapp-{image}@sha256:")
        assert set(platforms) == {"linux/amd64", "linux/arm64"}
        for platform, digest in platforms.items():
            prefix = f"megatronapp-{image}-{platform.removeprefix('linux/')}"
            sbom, about = read(output / f"{prefix}.spdx.json"), read(output / f"{prefix}.intoto.json")
            assert sbom["spdxVersion"].startswith("SPDX-2.")
            packages = {(each["name"], each.get("versionInfo")) for each in sbom["packages"]}
            assert ("sample-package", "4.5.6") in packages
            assert about["subject"][0]["digest"] == {"sha256": digest.removeprefix("sha256:")}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=output, check=True, capture_output=True)
    packed = output / f"megatronapp-{version}.tgz"
    assert values_of(packed)["images"]["registry"] == REGISTRY
    helm = [str(kube.programs("helm") / "helm"), "template", "m", str(packed), "--kube-version", "1.35.4"]
    text = subprocess.run(helm, capture_output=True, text=True, check=True).stdout
    assert f"image: {released['images']['operator']['index']}\n" in text
    assert f"--trainer-image={released['images']['trainer']['index']}\n" in text
    assert released["images"]["operator"]["index"] in (output / "sign.sh").read_text(encoding="utf-8")


def test_an_image_for_another_processor_is_refused(
    version: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    buildah("tag", f"localhost/megatronapp-operator:{version}-amd64", f"localhost/megatronapp-operator:{version}-arm64")
    flags = ["--version", version, "--registry", REGISTRY, "--dry-run", "--skip-build"]
    flags += ["--images", "operator", "--platforms", "linux/arm64", "--output", str(tmp_path / "release")]
    assert main(flags) == 1
    assert f"megatronapp-operator:{version}-arm64 is for linux/amd64, not linux/arm64" in capsys.readouterr().err
