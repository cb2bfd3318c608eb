"""Each gate of scripts/house_gate.py fails on a tree that breaks it, and recorded counts only shrink."""

import json
import pathlib
import subprocess

import pytest
from house_gate import LAST_OTHER_SUBJECT, main, wrong_subject

GLOSSARY = """# Glossary

## Words to avoid

| Avoid | Write | Where |
|---|---|---|
| `told`, tells | reported | |
| so many | a count | |
| found | the noun | names |

## Other

| door | gateway |
"""
ROOT_PACKAGE = "trainer/src/megatronapp_trainer"
MODULE = f"{ROOT_PACKAGE}/loop.py"
EMPTY_METHOD = "    def m{}(self) -> None: ...\n"


def write(root: pathlib.Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a tree without any offence, whose counts are recorded."""
    write(tmp_path, "docs/glossary.md", GLOSSARY)
    write(tmp_path, MODULE, '"""Run the training loop."""\n')
    (tmp_path / "scripts").mkdir()
    assert main(["--root", str(tmp_path), "--record"]) == 0
    return tmp_path


def check(root: pathlib.Path, *options: str) -> int:
    return main(["--root", str(root), *options])


def recorded(root: pathlib.Path) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = json.loads((root / "scripts/house_gate.json").read_text())["counts"]
    return {gate: keys for gate, keys in counts.items() if keys}


def many(count: int, text: str) -> str:
    return "".join(text.format(number) for number in range(count))


OFFENCES = {
    "word in a docstring": (
        {MODULE: '"""Run.\n\nReports what it was told.\n"""\n'},
        f"{MODULE}:3: 'told' in a docstring",
    ),
    "phrase over two lines": ({MODULE: '"""Run at most so\nmany steps now."""\n'}, f"{MODULE}:1: 'so many'"),
    "word below a constant": ({MODULE: 'LIMIT = 1\n"""It Tells when to stop."""\n'}, f"{MODULE}:2: 'tells'"),
    "word in a message": (
        {MODULE: 'def run() -> None:\n    raise ValueError("was told\\nto stop")\n'},
        f"{MODULE}:2: 'told' in the text",
    ),
    "word in a message that is formatted": ({MODULE: "print(f'{1} told {2}')\n"}, f"{MODULE}:1: 'told' in the text"),
    "word in a help text": (
        {"scripts/run.py": 'add(help="print so many\\nlines")\n'},
        "scripts/run.py:1: 'so many' in the text 'print so many\\nlines'",
    ),
    "word in a function's name": (
        {MODULE: "def was_told() -> None: ...\n"},
        f"{MODULE}:1: 'told' in the name was_told",
    ),
    "word in a class's name": ({MODULE: "class ToldRanks: ...\n"}, f"{MODULE}:1: 'told' in the name ToldRanks"),
    "word in an argument": ({MODULE: "def run(*, told: int) -> None: ...\n"}, f"{MODULE}:1: 'told'"),
    "word in a variable": ({MODULE: "for found in []: ...\n"}, f"{MODULE}:1: 'found'"),
    "phrase in a name": ({MODULE: "MAX_SO_MANY = 1\n"}, f"{MODULE}:1: 'so many'"),
    "word in a module's name": ({f"{ROOT_PACKAGE}/told.py": ""}, f"{ROOT_PACKAGE}/told.py:1: 'told'"),
    "word in a folder's name": ({f"{ROOT_PACKAGE}/told/__init__.py": ""}, "told/__init__.py:1: 'told'"),
    "short docstring": (
        {MODULE: 'def run() -> None:\n    """Its own name."""\n'},
        f"{MODULE}:2: the docstring 'Its own",
    ),
    "fragment": ({MODULE: 'class A:\n    """Those that run in parallel."""\n'}, f"{MODULE}:2: the docstring 'Those"),
    "fragment of a constant": ({MODULE: 'A = 1\n"""Of a frame, in bytes."""\n'}, f"{MODULE}:2: the docstring 'Of"),
    "crowded folder": (
        {f"{ROOT_PACKAGE}/models/m{number}.py": "" for number in range(17)},
        f"{ROOT_PACKAGE}/models: 17, at most 16 are allowed",
    ),
    "crowded support": ({f"tests/support/m{number}.py": "" for number in range(17)}, "tests/support/m16.py:1"),
    "crowded headers": (
        {f"csrc/include/megatronapp/ring/m{number}.hpp": "" for number in range(17)},
        "csrc/include/megatronapp/ring: 17, at most 16 are allowed",
    ),
    "crowded top": (
        {f"{ROOT_PACKAGE}/{name}/a.py": "" for name in "abcdefghijkl"},  # and loop.py
        "rooms: trainer: 13, at most 12 are allowed",
    ),
    "crowded page": ({f"frontend/src/ui/M{number}.vue": "" for number in range(17)}, "frontend/src/ui/M16.vue:1"),
    "class name": (
        {MODULE: "class Job: ...\n", f"{ROOT_PACKAGE}/build.py": "\nclass Job: ...\n"},
        f"{ROOT_PACKAGE}/build.py:2: another class Job",
    ),
    "methods": ({MODULE: "class Job:\n" + many(21, EMPTY_METHOD)}, "trainer: loop.Job: 21, at most 20"),
    "circle of modules": (
        {MODULE: "from megatronapp_trainer import build\n", f"{ROOT_PACKAGE}/build.py": "from . import loop\n"},
        f"{MODULE}:1: megatronapp_trainer.loop is in a circle of 2: imports megatronapp_trainer.build (line 1)",
    ),
    "circle under TYPE_CHECKING": (
        {
            MODULE: "def run() -> None:\n    from megatronapp_trainer.build import Run\n",
            f"{ROOT_PACKAGE}/build.py": "if TYPE_CHECKING:\n    from .loop import run\n",
        },
        f"{ROOT_PACKAGE}/build.py:2: megatronapp_trainer.build is in a circle of 2",
    ),
    "circle of folders": (
        {
            f"{ROOT_PACKAGE}/data/a.py": "import megatronapp_trainer.models.a\n",
            f"{ROOT_PACKAGE}/data/b.py": "",
            f"{ROOT_PACKAGE}/models/a.py": "",
            f"{ROOT_PACKAGE}/models/b.py": "from ..data import b\n",
        },
        f"{ROOT_PACKAGE}/models/b.py:1: models is in a circle of 2: imports data (line 1)",
    ),
}


@pytest.mark.parametrize("name", OFFENCES)
def test_gate_fails_with_the_place(name: str, root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, line = OFFENCES[name]
    assert check(root) == 0
    for path, text in files.items():
        write(root, path, text)
    assert check(root) == 1
    assert line in capsys.readouterr().out


ALLOWED = {
    "code in a docstring": {MODULE: '"""Run until `told` or ``so\nmany`` is set."""\n'},
    "code in a message": {MODULE: 'print("write `told` or ``so many``")\n'},
    "key": {MODULE: 'VALUES = {"told": 1}\n'},
    "message of a test": {"tests/unit/test_loop.py": "assert 1, 'was told'\n"},
    "word avoided in names only, in a message": {MODULE: 'print("was found")\n'},
    "word inside another": {MODULE: '"""Run untold steps in order."""\nretold_count = 1\n'},
    "word avoided in names only": {MODULE: '"""Run what was found."""\n'},
    "use of a foreign name": {MODULE: '"""Run the training loop."""\nfile.told(so_many.found)\n'},
    "unit of a constant": {MODULE: 'PATIENCE = 1\n"""In seconds."""\n'},
    "no docstring": {MODULE: "def run() -> None:\n    'a' + 'b'\n"},
    "sixteen modules": {f"{ROOT_PACKAGE}/models/{name}.py": "" for name in ("__init__", *"abcdefghijklmnop")},
    "many tests": {f"tests/unit/test_{number}.py": "" for number in range(17)},
    "one class name in two parts": {
        MODULE: "class Job: ...\n",
        "common/src/megatronapp_common/job.py": "class Job: ...",
    },
    "twenty methods": {MODULE: "class Job:\n" + many(20, EMPTY_METHOD) + "    @overload\n" + many(1, EMPTY_METHOD)},
    "imports of one direction": {
        f"{ROOT_PACKAGE}/data/a.py": "from ..models import a\nfrom . import b\nimport torch.data.a\n",
        f"{ROOT_PACKAGE}/data/b.py": "import megatronapp_common.names\n",
        f"{ROOT_PACKAGE}/models/a.py": "",
    },
}


@pytest.mark.parametrize("name", ALLOWED)
def test_gate_allows(name: str, root: pathlib.Path) -> None:
    for path, text in ALLOWED[name].items():
        write(root, path, text)
    assert check(root) == 0


def test_recorded_count_is_allowed_and_the_next_is_not(root: pathlib.Path) -> None:
    (root / "scripts/house_gate.json").unlink()
    write(root, MODULE, '"""They."""\n"""Ignored."""\n')
    assert check(root, "--record") == 0
    assert recorded(root) == {"fragments": {"trainer": 1}}
    assert check(root) == 0
    write(root, f"{ROOT_PACKAGE}/build.py", '"""They."""\n')
    assert check(root) == 1


def test_record_refuses_to_raise_a_count(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (root / "scripts/house_gate.json").read_bytes()
    write(root, MODULE, '"""They."""\n')
    assert check(root, "--record") == 1
    assert (root / "scripts/house_gate.json").read_bytes() == before
    assert "a recorded count may only shrink" in capsys.readouterr().out


def test_lower_count_passes_and_can_be_recorded(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "scripts/house_gate.json").unlink()
    crowd = [f"{ROOT_PACKAGE}/models/m{number}.py" for number in range(18)]
    for path in crowd:
        write(root, path, "")
    assert check(root, "--record") == 0
    (root / crowd[0]).unlink()
    assert check(root) == 0
    assert f"siblings: {ROOT_PACKAGE}/models: 17, recorded are 18" in capsys.readouterr().out
    assert check(root, "--record") == 0
    assert recorded(root) == {"siblings": {f"{ROOT_PACKAGE}/models": 17}}
    write(root, crowd[0], "")
    assert check(root) == 1


def test_new_spelling_in_the_glossary_is_recorded_before_it_counts(
    root: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(root, MODULE, '"""Answer whoever asks for the loop."""\n')
    write(root, "docs/glossary.md", GLOSSARY.replace("tells", "tells, whoever"))
    assert check(root) == 1
    assert (
        "names: no counts of words that are new in docs/glossary.md (whoever); run --record" in capsys.readouterr().out
    )
    assert check(root, "--record") == 0
    assert recorded(root) == {"docstring words": {"trainer: whoever": 1}}
    assert check(root) == 0
    write(root, f"{ROOT_PACKAGE}/build.py", '"""Answer whoever asks for a build."""\n')
    assert check(root, "--record") == 1


def test_spelling_that_was_avoided_in_names_only_can_be_avoided_in_docstrings(root: pathlib.Path) -> None:
    write(root, MODULE, '"""Run the steps that were found."""\n')
    write(root, "docs/glossary.md", GLOSSARY.replace("the noun | names", "the noun | "))
    assert check(root) == 1
    assert check(root, "--record") == 0
    assert recorded(root) == {"docstring words": {"trainer: found": 1}}


def test_lost_glossary_fails(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "docs/glossary.md").unlink()
    assert check(root) == 1
    assert check(root, "--record") == 1
    assert "the words to avoid are missing" in capsys.readouterr().out


def test_glossary_without_its_table_is_refused(root: pathlib.Path) -> None:
    write(root, "docs/glossary.md", GLOSSARY.replace("| Avoid | Write |", "| Old | New |"))
    with pytest.raises(SystemExit, match="no table with the columns Avoid and Write"):
        check(root)


def test_list_prints_every_place_of_a_gate(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, MODULE, '"""They."""\n')
    assert check(root, "--list", "fragments") == 0
    assert capsys.readouterr().out.endswith(f"  {MODULE}:1: the docstring 'They.' is a fragment\n")


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("hub: answer 429 with Retry-After", None),
        ("plan, controller: process pods once", None),
        (f"hub: {'x' * 67}", None),
        (f"hub: {'x' * 68}", "has 73 characters"),
        ("Hub: answer 429", "does not begin with a part"),
        ("answer 429", "does not begin with a part"),
        ("hub: answers 429", "says 'answers'"),
        ("hub: answered 429", "says 'answered'"),
        ("hub: answering 429", "says 'answering'"),
        ("hub: the answer is 429", "says 'the'"),
    ],
)
def test_commit_subject(subject: str, wrong: str | None) -> None:
    answer = wrong_subject(subject)
    assert answer is None if wrong is None else wrong in str(answer)


def git(root: pathlib.Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: pathlib.Path, *subjects: str) -> None:
    for subject in subjects:
        git(root, "commit", "--allow-empty", f"--message={subject}")


def test_wrong_commit_of_a_range_fails(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(root, "init", "--initial-branch=main")
    commit(root, "No subject of today")
    git(root, "branch", "base")
    commit(root, "hub: answer 429")
    assert check(root, "--commits", "base..HEAD") == 0
    commit(root, "Answers with 429")
    assert check(root, "--commits", "base..HEAD") == 1
    printed = capsys.readouterr().out
    assert "the subject 'Answers with 429' does not begin with a part" in printed
    assert "No subject of today" not in printed


def test_history_is_checked_after_the_last_commit_in_another_form(
    root: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git(root, "init", "--initial-branch=main")
    commit(root, "No subject of today", "Nor this", LAST_OTHER_SUBJECT, "hub: answer 429")
    git(root, "checkout", "--detach")
    assert check(root, "--history") == 0
    commit(root, "Answers with 429", "hub: answer 503")
    assert check(root, "--history") == 1
    assert "the subject 'Answers with 429'" in capsys.readouterr().out


def test_history_of_a_shallow_clone_is_checked_but_for_its_first_commit(
    root: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    git(root, "init", "--initial-branch=main")
    commit(root, LAST_OTHER_SUBJECT, "Nor this", "Answers with 429", "hub: answer 429")
    for depth, code in ((1, 0), (2, 0), (3, 1)):
        clone = tmp_path_factory.mktemp("shallow") / "clone"
        git(root, "clone", "--depth", str(depth), root.as_uri(), str(clone))
        (clone / "scripts").mkdir()
        assert main(["--root", str(clone), "--record"]) == 0
        assert check(clone, "--history") == code
    assert "the subject 'Answers with 429'" in capsys.readouterr().out


def test_history_outside_of_a_repository_is_not_checked(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(root, "--history") == 0
    git(root.parent, "init", "--initial-branch=main")  # of another project
    commit(root.parent, "First", "Answers with 429")
    assert check(root, "--history") == 0
    assert capsys.readouterr().out.count("is no Git repository: no commit subject is checked") == 2
