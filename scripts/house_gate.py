"""Fail where words, names or structure get worse than `scripts/house_gate.json` records.

The recorded counts may only shrink: `--record` writes lower ones and refuses to raise any. The words to avoid are those
of the glossary. `house_counts.py` says what is counted.

    python scripts/house_gate.py                        # compare with the recorded counts
    python scripts/house_gate.py --list fragments       # print each place that a gate counts
    python scripts/house_gate.py --record               # after an improvement: record the lower counts
    python scripts/house_gate.py --commits main..HEAD   # check the commit subjects of a branch, too
    python scripts/house_gate.py --history              # check those of the clone, as far back as the form is in use
"""

import argparse
import gc
import json
import pathlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from typing import TypedDict

from house_counts import (
    GLOSSARY,
    MOST_METHODS,
    Offence,
    Source,
    Terms,
    count_everything,
    docstring_sizes,
    message_sizes,
    read_sources,
    read_terms,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = "scripts/house_gate.json"

LIMITS = {
    "docstring words": 0,
    "messages": 0,
    "names": 0,
    "fragments": 0,
    "siblings": 16,
    "rooms": 12,
    "class names": 1,
    "methods": MOST_METHODS,
    "module circles": 0,
    "folder circles": 0,
}
"""For each gate the count that needs no record."""

SUBJECT = re.compile(r"[a-z0-9][a-z0-9_/, -]*: (?P<first>\S+)")
SUBJECT_LENGTH = 72
LAST_OTHER_SUBJECT = "operator: publish the pipeline plan, size /dev/shm for MegaDPP, cap in bytes"
"""The last commit in another form. A subject survives where hashes and dates do not: a rebase, a new import."""
NO_VERB = {"a", "an", "the", "no", "one", "all", "each", "every", "what", "who", "when", "where", "how", "some", "more"}
OTHER_FORM = re.compile(r"(?i:.+(?:ing|ed|[^s]s))")
IMPERATIVE = {"alias", "bias", "bring", "embed", "feed", "focus", "need", "ping", "seed", "shed", "speed", "string"}
"""Verbs that look like another form."""

Counts = dict[str, dict[str, int]]
"""For each gate the counts above its limit, under keys such as `trainer` or `trainer: told`."""


class Record(TypedDict):
    """The content of the file of recorded counts."""

    terms: dict[str, list[str]]
    """For gates of words those that were in the glossary when counts were recorded."""
    counts: dict[str, dict[str, int]]


def read_record(root: pathlib.Path) -> Record:
    path = root / RECORD
    if not path.exists():
        return {"terms": {}, "counts": {}}
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def sorted_terms(terms: Terms) -> dict[str, list[str]]:
    return {
        "docstring words": sorted(terms.prose),
        "messages": sorted(terms.prose),
        "names": sorted(terms.names),
    }


def write_record(root: pathlib.Path, terms: Terms, counts: Counts) -> None:
    record: Record = {"terms": sorted_terms(terms), "counts": counts}
    (root / RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def above_limits(offences: dict[str, list[Offence]]) -> Counts:
    counts: Counts = {}
    for gate, places in offences.items():
        totals = Counter(place.key for place in places)
        counts[gate] = {key: total for key, total in totals.items() if total > LIMITS[gate]}
    return counts


def grown(counts: Counts, record: Record) -> list[tuple[str, str]]:
    """Return gates and keys with a count above the recorded one; a new gate or word has no recorded one yet."""
    found: list[tuple[str, str]] = []
    for gate, recorded in record["counts"].items():
        for key, count in counts.get(gate, {}).items():
            known_terms = record["terms"].get(gate)
            is_new_term = known_terms is not None and key.partition(": ")[2] not in known_terms
            if count > recorded.get(key, LIMITS[gate]) and not is_new_term:
                found.append((gate, key))
    return found


def shrunk(counts: Counts, record: Record) -> list[str]:
    """Say which recorded counts are higher than needed."""
    lines: list[str] = []
    for gate, recorded in record["counts"].items():
        for key, count in recorded.items():
            now = counts.get(gate, {}).get(key, 0)
            if now < count:
                lines.append(f"{gate}: {key}: {now or f'at most {LIMITS[gate]}'}, recorded are {count}")
    return lines


def unrecorded(terms: Terms, record: Record) -> list[str]:
    """Say which gates and words have no recorded counts yet."""
    lines = [f"{RECORD} has no counts of {gate}; run --record" for gate in LIMITS if gate not in record["counts"]]
    for gate, known_terms in record["terms"].items():
        if new := sorted(set(sorted_terms(terms)[gate]) - set(known_terms)):
            lines.append(f"{gate}: no counts of words that are new in {GLOSSARY} ({', '.join(new)}); run --record")
    return lines


def explain(gate: str, key: str, places: list[Offence], record: Record) -> list[str]:
    allowed = record["counts"][gate].get(key, LIMITS[gate])
    mine = [place for place in places if place.key == key]
    return [f"{gate}: {key}: {len(mine)}, at most {allowed} are allowed:", *describe(mine)]


def describe(places: Iterable[Offence]) -> list[str]:
    return [f"  {place.path}:{place.line}: {place.text}" for place in sorted(places, key=lambda place: place[1:])]


def wrong_subject(subject: str) -> str | None:
    """Say what is wrong with the first line of a commit message."""
    match = SUBJECT.match(subject)
    if len(subject) > SUBJECT_LENGTH:
        return f"has {len(subject)} characters; write at most {SUBJECT_LENGTH}, and the rest in the body"
    if match is None:
        return "does not begin with a part; write 'part: imperative', such as 'hub: answer 429 with Retry-After'"
    first = match["first"].lower()
    if first in NO_VERB or (OTHER_FORM.fullmatch(first) and first not in IMPERATIVE):
        return f"says '{match['first']}' after the part; begin with a verb in the imperative"
    return None


def git(root: pathlib.Path, *arguments: str) -> str:
    """Return what git prints. Raises CalledProcessError if it fails."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def wrong_commits(root: pathlib.Path, *commits: str) -> list[str]:
    lines: list[str] = []
    for line in git(root, "log", "--no-merges", "--format=%h %s", *commits).splitlines():
        commit, _, subject = line.partition(" ")
        if wrong := wrong_subject(subject):
            lines.append(f"commit {commit}: the subject '{subject}' {wrong}")
    return lines


def wrong_history(root: pathlib.Path) -> list[str]:
    """Check the commits of this clone that follow the last one in another form; a shallow clone may have only those.

    A commit without a parent is not checked: the first of a shallow clone may be older, and an import of the project
    has a subject of another's choice. Outside of a repository there is nothing to check.
    """
    try:
        is_whole_tree = pathlib.Path(git(root, "rev-parse", "--show-toplevel").strip()).samefile(root)
    except (OSError, subprocess.CalledProcessError):
        is_whole_tree = False
    if not is_whole_tree:
        print(f"{root} is no Git repository: no commit subject is checked")
        return []
    subjects = (line.partition(" ") for line in git(root, "log", "--format=%H %s").splitlines())
    older = next((commit for commit, _, subject in subjects if subject == LAST_OTHER_SUBJECT), None)
    return wrong_commits(root, "--min-parents=1", "HEAD", *([f"^{older}"] if older else []))


def summary(offences: dict[str, list[Offence]], sources: list[Source]) -> list[str]:
    """Return a line for each gate, and the rates of words to avoid in each part."""
    counted = {gate: counts for gate, counts in above_limits(offences).items() if counts}
    return [
        *(f"{gate}: {sum(counts.values())} under {len(counts)} keys" for gate, counts in counted.items()),
        f"words to avoid per 1,000 of docstrings: {rates(offences['docstring words'], docstring_sizes(sources))}",
        f"words to avoid per 1,000 of messages: {rates(offences['messages'], message_sizes(sources))}",
        "house gate: nothing got worse",
    ]


def rates(places: list[Offence], sizes: Counter[str]) -> str:
    totals = Counter(place.path.split("/", 1)[0] for place in places)
    return ", ".join(f"{part} {1000 * totals[part] / size:.1f}" for part, size in sorted(sizes.items()) if size)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fail where words, names or structure get worse than recorded.")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="check this tree (default: the repository)")
    parser.add_argument("--record", action="store_true", help=f"write lower counts to {RECORD}; raises none")
    parser.add_argument("--list", choices=LIMITS, metavar="GATE", help=f"print what a gate counts: {', '.join(LIMITS)}")
    parser.add_argument("--commits", metavar="RANGE", help="check the subjects of these commits, such as main..HEAD")
    parser.add_argument("--history", action="store_true", help="check the subjects of this clone's commits")
    return parser.parse_args(arguments)


def compare(root: pathlib.Path, offences: dict[str, list[Offence]], terms: Terms, *, write: bool) -> list[str]:
    """Return what is worse than recorded; print what is better, or record it."""
    record = read_record(root)
    counts = above_limits(offences)
    if any(record["terms"].values()) and not terms.prose | terms.names:
        return [f"{GLOSSARY}: the words to avoid are missing"]
    problems = [line for gate, key in grown(counts, record) for line in explain(gate, key, offences[gate], record)]
    if not write:
        problems += unrecorded(terms, record)
        better = shrunk(counts, record)
        if better:
            print("\n".join([*better, f"{len(better)} counts are lower than recorded; run --record"]))
    elif problems:
        problems.append(f"{RECORD} is left as it is: a recorded count may only shrink")
    else:
        write_record(root, terms, counts)
    return problems


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    gc.disable()  # syntax trees of all files are many objects without garbage, and this process is short
    terms = read_terms(options.root)
    sources = read_sources(options.root)
    offences = count_everything(options.root, sources, terms)
    if options.list:
        counted = above_limits(offences)[options.list]
        print("\n".join(describe(place for place in offences[options.list] if place.key in counted)))
        return 0
    problems = compare(options.root, offences, terms, write=options.record)
    if options.commits:
        problems += wrong_commits(options.root, options.commits)
    if options.history:
        problems += wrong_history(options.root)
    print("\n".join(problems or summary(offences, sources)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
