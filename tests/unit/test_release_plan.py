"""Documents of a release: the chart's values, provenance, checksums and signing; and what is refused."""

import hashlib
import pathlib
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from release import MARK, empty
from release_plan import (
    IMAGES,
    IN_TOTO,
    SPDX,
    Artifact,
    ReleaseError,
    ReleaseSource,
    attachment_problems,
    chart_values,
    checksums,
    index_problems,
    parse_choices,
    parse_registry,
    parse_version,
    provenance,
    repository_address,
    signing_script,
    statement,
    summary,
    wrong_versions,
)

VALUES = (pathlib.Path(__file__).parents[2] / "charts" / "megatronapp" / "values.yaml").read_text(encoding="utf-8")
REGISTRY = "registry.example:5000/team"
SOURCE = ReleaseSource(
    version="1.2.3", commit="c" * 40, dirty=False, repository="https://git.example/m.git", built=True
)
AMD, ARM = (
    Artifact(repository=f"{REGISTRY}/megatronapp-operator", digest=f"sha256:{digit * 64}", platform=f"linux/{name}")
    for digit, name in (("1", "amd64"), ("2", "arm64"))
)
INDEX = Artifact(repository=AMD.repository, digest=f"sha256:{'3' * 64}")
CHART = Artifact(repository=f"{REGISTRY}/charts/megatronapp", digest=f"sha256:{'4' * 64}")


@pytest.mark.parametrize("text", ["1.2.3", "0.1.0", "10.0.0-rc.1"])
def test_versions(text: str) -> None:
    assert parse_version(text) == text


@pytest.mark.parametrize("text", ["", "v1.2.3", "1.2", "01.2.3", "1.2.3 ", "1.2.3+build"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ReleaseError, match=r"is no version; write one such as 1\.2\.3"):
        parse_version(text)


def test_registries() -> None:
    for text in ("ghcr.io/team", "registry.example:5000/a/b-c"):
        assert parse_registry(text) == text
    for text in ("", "ghcr.io", "https://ghcr.io/team", "ghcr.io/Team", "ghcr.io/team/", "ghcr.io//team"):
        with pytest.raises(ReleaseError, match="write host/path in lower case"):
            parse_registry(text)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://user:word@git.example/team/m.git", "https://git.example/team/m.git"),
        ("git@git.example:team/m.git", "ssh://git.example/team/m.git"),
        ("ssh://git@git.example:22/team/m.git", "ssh://git.example:22/team/m.git"),
        ("/srv/m.git", "/srv/m.git"),
        ("unknown", "unknown"),
    ],
)
def test_the_provenance_has_the_address_of_the_repository_without_credentials(remote: str, address: str) -> None:
    assert repository_address(remote) == address


def test_a_folder_with_other_files_is_not_emptied(tmp_path: pathlib.Path) -> None:
    (tmp_path / "work").touch()
    with pytest.raises(ReleaseError, match="holds other files; name an empty folder"):
        empty(tmp_path)
    results = tmp_path / "dist" / "release"
    for _ in range(2):
        empty(results)
        assert [path.name for path in results.iterdir()] == [MARK]
        (results / "SHA256SUMS").touch()


def test_choices_name_what_is_known() -> None:
    assert parse_choices("IMAGES", "trainer,operator,trainer", IMAGES) == ("trainer", "operator")
    for text in ("", "operator,door"):
        with pytest.raises(ReleaseError, match="must be a list of operator, analyzer, trainer"):
            parse_choices("IMAGES", text, IMAGES)


def test_files_of_another_version_are_listed() -> None:
    found = {"b/pyproject.toml": "1.2.3", "a/pyproject.toml": "1.2.2"}
    assert wrong_versions(found, "1.2.3") == ["a/pyproject.toml has version 1.2.2; write 1.2.3"]


def test_the_chart_names_the_registry_and_the_digests_and_nothing_else_changes() -> None:
    digests = {image: f"sha256:{digit * 64}" for image, digit in zip(IMAGES, "abc", strict=True)}
    before, after = yaml.safe_load(VALUES), yaml.safe_load(chart_values(VALUES, REGISTRY, digests))
    assert after["images"].pop("registry") == REGISTRY
    assert {image: after["images"][image].pop("digest") for image in IMAGES} == digests
    assert before["images"].pop("registry") == ""
    for image in IMAGES:
        assert before["images"][image].pop("digest") == ""
    assert after == before


def test_a_chart_of_another_shape_is_refused() -> None:
    with pytest.raises(ReleaseError, match=r"must have the line .*megatronapp-trainer.* once"):
        chart_values(VALUES.replace("megatronapp-trainer", "other"), REGISTRY, {"trainer": "sha256:0"})


def test_provenance_names_commit_bases_and_builder() -> None:
    bases = [f"docker.io/library/python@sha256:{'9' * 64}", "docker.io/library/python:3.11"]
    made = provenance(SOURCE, ARM, bases=bases, builder="https://ci.example", started="2026-01-02T03:04:05Z")
    assert made["buildDefinition"]["externalParameters"] == {"version": "1.2.3", "platform": "linux/arm64"}
    assert made["buildDefinition"]["resolvedDependencies"] == [
        {"uri": "git+https://git.example/m.git", "digest": {"gitCommit": "c" * 40}},
        {"uri": "oci://docker.io/library/python", "digest": {"sha256": "9" * 64}},
        {"uri": "oci://docker.io/library/python:3.11"},
    ]
    assert made["buildDefinition"]["internalParameters"] == {"built": True}
    assert made["runDetails"]["builder"] == {"id": "https://ci.example"}
    about = statement(ARM, made)
    assert about["subject"] == [{"name": ARM.repository, "digest": {"sha256": "2" * 64}}]
    assert (about["predicateType"], about["predicate"]) == ("https://slsa.dev/provenance/v1", made)


def test_an_index_must_have_the_platforms_that_were_pushed_and_no_others() -> None:
    expected = {str(artifact.platform): artifact.digest for artifact in (AMD, ARM)}
    manifests = [
        {"digest": artifact.digest, "platform": {"os": "linux", "architecture": name}}
        for artifact, name in ((AMD, "amd64"), (ARM, "arm64"))
    ]
    assert index_problems({"manifests": manifests}, expected) == []
    assert index_problems({"manifests": manifests[:1]}, expected) == [
        f"the index has nothing for linux/arm64, and {ARM.digest} was pushed"
    ]
    assert index_problems({"manifests": manifests}, {"linux/amd64": AMD.digest}) == [
        "the index has linux/arm64, which was not built"
    ]


def test_an_image_without_provenance_is_reported() -> None:
    assert attachment_problems([SPDX]) == [f"nothing of type {IN_TOTO} is attached"]
    assert attachment_problems([IN_TOTO, "other", SPDX]) == []


@given(st.dictionaries(st.from_regex(r"[a-z][a-z.-]{0,9}", fullmatch=True), st.binary(max_size=64), max_size=4))
def test_checksums_are_sorted_by_name(files: dict[str, bytes]) -> None:
    lines = checksums(files).splitlines()
    assert lines == [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(files)]


def test_everything_is_signed_by_digest_and_images_are_attested(tmp_path: pathlib.Path) -> None:
    script, cosign = tmp_path / "sign.sh", tmp_path / "cosign"
    script.write_text(signing_script([INDEX, AMD, ARM, CHART]), encoding="utf-8")
    cosign.write_text('#!/bin/sh\necho "$*" >> "$RAN"\n', encoding="utf-8")
    cosign.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAN": str(tmp_path / "ran"), "COSIGN_KEY": "a key"}
    subprocess.run(["bash", script], env=environment, check=True)
    ran = (tmp_path / "ran").read_text(encoding="utf-8").splitlines()
    signed = [line.removeprefix("sign --yes --key a key ") for line in ran if line.startswith("sign ")]
    assert signed == [artifact.reference for artifact in (INDEX, AMD, ARM, CHART)]
    prefix = "attest --yes --key a key --type"
    assert f"{prefix} spdxjson --predicate megatronapp-operator-arm64.spdx.json {ARM.reference}" in ran
    assert f"{prefix} slsaprovenance1 --predicate megatronapp-operator-amd64.slsa.json {AMD.reference}" in ran
    assert len(ran) == 8


def test_the_summary_lists_platforms_by_image() -> None:
    made = summary(SOURCE, {"operator": INDEX}, [AMD, ARM], CHART)
    assert made["images"] == {
        "operator": {"index": INDEX.reference, "platforms": {"linux/amd64": AMD.digest, "linux/arm64": ARM.digest}}
    }
    assert made["chart"] == f"{REGISTRY}/charts/megatronapp@sha256:{'4' * 64}"
