"""`megatronapp validate`: the verdict of each file, its problems with their places, and the exit code."""

import io
import pathlib

import pytest
import yaml

from megatronapp_common import cli

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "demo.yaml"


def write(folder: pathlib.Path, name: str, **spec: object) -> pathlib.Path:
    document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["spec"] |= spec
    path = folder / name
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_a_good_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(EXAMPLE)]) == 0
    assert capsys.readouterr().out == "megatronjob.megatronapp.io/demo is valid\n"


def test_all_problems_of_a_manifest_are_printed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "bad.yaml", nodes=0, trainning={})
    assert cli.main(["validate", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "error: spec.trainning: unknown field; did you mean training?\n" in output.err
    assert "error: spec.nodes: 0 is too small; write 1 or more\n" in output.err


def test_sizes_that_may_not_fit_together_get_a_recommendation(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["spec"]["model"]
    split = {"tensor": 2, "pipeline": 1, "data": 2}
    assert cli.main(["validate", str(write(tmp_path, "one.yaml", model={**model, "hiddenSize": 66}))]) == 2
    assert "note:" not in capsys.readouterr().err
    both = write(tmp_path, "two.yaml", model={**model, "hiddenSize": 64, "numAttentionHeads": 3}, parallelism=split)
    assert cli.main(["validate", str(both)]) == 2
    *problems, note = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[2] for line in problems] == [" write 63, or give kvChannels", " write 4"]
    assert note.startswith("note: each number above fits the fields as they are now; change one")


def test_problems_of_several_files_are_printed_separately(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, missing = write(tmp_path, "bad.yaml", nodes=0), tmp_path / "missing.yaml"
    assert cli.main(["validate", str(bad), str(missing), str(EXAMPLE)]) == 2
    output = capsys.readouterr()
    assert output.out == "megatronjob.megatronapp.io/demo is valid\n"
    assert output.err.splitlines() == [
        f"error: {bad}: spec.nodes: 0 is too small; write 1 or more",
        f"error: {missing}: cannot read the manifest: No such file or directory",
    ]


def test_what_only_a_cluster_can_do_is_valid(tmp_path: pathlib.Path) -> None:
    assert cli.main(["validate", str(write(tmp_path, "job.yaml", suspend=True))]) == 0


def test_fields_of_a_cluster_are_judged_as_there(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write(
        tmp_path,
        "bad.yaml",
        network={"mode": "HostNetwork"},
        resources={"limits": {"memory": "16GB"}},
        podTemplate={"spec": {"hostIPC": True}},
        scheduling={"gang": "Kueue"},
    )
    assert cli.main(["validate", str(bad)]) == 2
    places = {line.split(": ")[1] for line in capsys.readouterr().err.splitlines()}
    assert places == {
        "spec.network.policy",
        "spec.resources.limits.memory",
        "spec.podTemplate.spec.hostIPC",
        "spec.scheduling.queue",
    }


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    give(monkeypatch, EXAMPLE.read_bytes())
    assert cli.main(["validate", "-"]) == 0
    give(monkeypatch, b"a: \xff")
    assert cli.main(["validate", "-", str(EXAMPLE)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: standard input: cannot read the manifest: ")
    assert cli.main(["validate", "-", "-"]) == 1
    assert "write - once" in capsys.readouterr().err


def test_a_file_may_be_called_like_a_field(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "s", nodes=0)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["validate", "s", str(EXAMPLE)]) == 2
    assert capsys.readouterr().err == "error: s: spec.nodes: 0 is too small; write 1 or more\n"


PROFILES = EXAMPLE.parent / "profiles"


def test_a_job_is_judged_over_its_profiles(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, given = str(PROFILES / "job.yaml"), []
    for name in ("namespace.yaml", "cluster.yaml"):
        given += ["--profile", str(PROFILES / name)]
    assert cli.main(["validate", job, *given]) == 0
    assert capsys.readouterr().out == "megatronjob.megatronapp.io/gpt is valid\n"
    assert cli.main(["validate", job]) == 0
    assert "valid by itself; rules between fields depend on the profile h100" in capsys.readouterr().out
    document = yaml.safe_load((PROFILES / "job.yaml").read_text(encoding="utf-8"))
    document["spec"] |= {"image": "mine:1", "gpusPerNode": 4, "procPerNode": 8}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert cli.main(["validate", str(wrong), *given]) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "error: spec.image: is locked by ClusterMegatronProfile/h100, which has "
        "registry.example/team/megatronapp-trainer:0.1.0; leave the field out"
    )


def test_problems_of_a_profile_have_its_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = yaml.safe_load((PROFILES / "namespace.yaml").read_text(encoding="utf-8"))
    document["spec"]["template"]["nodes"] = 0
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert cli.main(["validate", str(EXAMPLE), "--profile", str(bad)]) == 2
    assert capsys.readouterr().err == f"error: {bad}: spec.template.nodes: 0 is too small; write 1 or more\n"


def test_a_job_that_names_a_profile_is_run_with_it_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(PROFILES / "job.yaml")]) == 2
    assert "spec.profile: names h100, but no ClusterMegatronProfile was given" in capsys.readouterr().err
