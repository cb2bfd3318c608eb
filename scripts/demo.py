"""The demonstration: train a small GPT on this machine, make one rank slow, and see whether it is named.

Prepares a corpus from the interpreter's own library, starts examples/demo.yaml through the process backend with a
fault on a rank drawn at random, and compares the verdict with the truth. Without a terminal the exit code is 0 only
if the loss fell and the verdict is right; with one the pages stay open until Ctrl-C.
"""

import argparse
import dataclasses
import os
import pathlib
import random
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.parse
from typing import Any

import httpx
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = pathlib.Path(".demo")
CORPUS = WORK / "corpus"
MANIFEST = WORK / "demo.yaml"
CHECKPOINTS = WORK / "demo-checkpoints"
"""Not the example's own folder: a job of the example that is run later would find all its steps done."""
TRACE = WORK / "trace.json"
VOCABULARY = 4096
POLL_S = 0.5
DEADLINE_S = 600
ANSWER_S = 120
"""Longest time for an answer of the hub: on a busy machine it takes seconds, and one that is late ends all."""
MEGATRONAPP = [sys.executable, "-m", "megatronapp_common.cli"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The fault that was injected."""

    ranks: tuple[int, ...]
    """The slow rank; of a link its source and destination."""
    kind: str
    first_step: int
    last_step: int

    @property
    def place(self) -> str:
        """Describe the place to users."""
        if self.kind == "link":
            return f"the link from rank {self.ranks[0]} to rank {self.ranks[1]}"
        return f"rank {self.ranks[0]}"


class DemoError(Exception):
    """The demonstration could not run to its end."""


def main() -> int:
    options = parse_options()
    os.chdir(ROOT)
    WORK.mkdir(exist_ok=True)
    started = time.monotonic()
    manifest = yaml.safe_load(options.manifest.read_text(encoding="utf-8"))
    if manifest["spec"]["data"].get("path"):
        prepare_corpus()
    truth = write_manifest(manifest, options)
    print(f"\n== Training; {truth.place} will be slow ({truth.kind}) from step {truth.first_step} to {truth.last_step}")
    call("delete", "demo", "--ignore-not-found")
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)  # or the job would go on where the last one ended
    call("run", str(MANIFEST), "--detach")
    try:
        hub = open_hub()
        follow(hub)
        right = report(hub, truth, time.monotonic() - started)
        if sys.stdout.isatty() and not options.no_wait:
            wait_for_interrupt()
    finally:
        call("delete", "demo", "--ignore-not-found")
    return 0 if right else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="draw rank and place of the fault from this seed")
    parser.add_argument("--kind", choices=("compute", "host", "link"), default="compute", help="kind of fault")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times as long (default: 3)")
    parser.add_argument("--manifest", type=pathlib.Path, default=ROOT / "examples" / "demo.yaml", help="another job")
    parser.add_argument("--no-wait", action="store_true", help="end at once, also with a terminal")
    return parser.parse_args()


def call(*words: str) -> None:
    """Run a subcommand of megatronapp, with its output on the terminal."""
    done = subprocess.run([*MEGATRONAPP, *words], check=False)
    if done.returncode:
        raise DemoError(f"megatronapp {' '.join(words)} ended with code {done.returncode}")


def prepare_corpus() -> None:
    """Tokenise the standard library's top-level modules, several MB of text that every machine has."""
    if CORPUS.with_name("corpus_text_document.idx").exists():
        print(f"== Corpus is there: {CORPUS}_text_document")
        return
    print("== Preparing a corpus from the standard library's sources")
    sources = pathlib.Path(sysconfig.get_path("stdlib")) / "*.py"
    call(
        "data",
        "prepare",
        "--input",
        str(sources),
        "--output",
        str(CORPUS),
        "--append-eod",
        "--workers",
        "2",
        "--train-tokenizer",
        "--vocab-size",
        str(VOCABULARY),
    )


def write_manifest(manifest: dict[str, Any], options: argparse.Namespace) -> Truth:
    """Write the manifest with its fault on a rank and at a step drawn at random."""
    draw = random.Random(options.seed)
    spec = manifest["spec"]
    world = spec["nodes"] * spec["procPerNode"]
    fault = spec["faults"][0]
    fault["rank"] = draw.randrange(world)
    fault["kind"], fault["factor"] = options.kind, options.factor
    fault["fromStep"] += draw.randrange(-5, 6)
    ranks: tuple[int, ...] = (fault["rank"],)
    if options.kind == "link":
        fault["peer"] = neighbour(fault["rank"], stride=world // spec["parallelism"]["pipeline"])
        ranks = fault["peer"], fault["rank"]
    if spec.get("checkpoint", {}).get("save"):
        spec["checkpoint"]["save"] = str(CHECKPOINTS)
    MANIFEST.write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")
    last = fault["fromStep"] + fault["steps"] - 1
    return Truth(ranks=ranks, kind=fault["kind"], first_step=fault["fromStep"], last_step=last)


def neighbour(rank: int, *, stride: int) -> int:
    """The rank of the stage before, or after the first one: its messages arrive late under a link fault."""
    return rank - stride if rank >= stride else rank + stride


def open_hub() -> httpx.Client:
    """A client of the job's hub, logged in as a browser is."""
    done = subprocess.run([*MEGATRONAPP, "ui", "demo", "--print"], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DemoError(f"megatronapp ui demo ended with code {done.returncode}")
    address = urllib.parse.urlsplit(done.stdout.strip())
    print("== Pages: megatronapp ui demo")
    client = httpx.Client(base_url=f"{address.scheme}://{address.netloc}", timeout=ANSWER_S)
    client.post("/login", data={"token": address.fragment.removeprefix("code=")})
    return client


def follow(hub: httpx.Client) -> None:
    """Print progress and verdicts until the job has ended. Raises DemoError if it did not complete."""
    command = [*MEGATRONAPP, "wait", "demo", "--for=condition=Complete", f"--timeout={DEADLINE_S}s"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as waiting:
        try:
            print_progress(hub, waiting)
        finally:
            waiting.terminate()
    if waiting.returncode:
        raise DemoError("the job did not complete; see: megatronapp describe demo, megatronapp logs demo")


def print_progress(hub: httpx.Client, waiting: "subprocess.Popen[bytes]") -> None:
    """Print progress and verdicts until a process has ended, which costs the ranks less than `get` for each print."""
    shown: set[str] = set()
    printed = -1
    while waiting.poll() is None:
        summary = fetch(hub, "/api/v1/summary")
        progress = summary["progress"] or {}
        if progress.get("loss") is not None and progress["iteration"] // 10 > printed // 10:
            printed = progress["iteration"]
            print(progress_line(progress))
        for verdict in summary["slowRanks"] or ():
            if verdict["state"] == "confirmed" and verdict["id"] not in shown:
                shown.add(verdict["id"])
                print(f"   >> {verdict['sentence']}")
        time.sleep(POLL_S)


def progress_line(progress: dict[str, Any]) -> str:
    return (
        f"   step {progress['iteration']:>4}/{progress['totalIterations']}  loss {progress['loss']:.3f}  "
        f"{progress['tokensPerSecond']:,.0f} tokens/s"
    )


def fetch(hub: httpx.Client, path: str) -> Any:  # noqa: ANN401 - JSON
    try:
        return hub.get(path).raise_for_status().json()
    except httpx.HTTPError as error:
        raise DemoError(f"the hub does not answer {path}: {error}") from error


def names_truth(verdict: dict[str, Any], truth: Truth) -> bool:
    """Return true if a verdict names the injected fault: its rank or its link, its cause, and a step within it."""
    subject, since = verdict["subject"], verdict["since"]["step"]
    kind = "link" if truth.kind == "link" else "rank"
    causes = {"link": {"link", "nvlink-pcie"}}.get(truth.kind, {truth.kind})
    named = (subject["type"], tuple(subject["ranks"])) == (kind, truth.ranks) and verdict["cause"] in causes
    return named and truth.first_step - 1 <= since <= truth.last_step


def report(hub: httpx.Client, truth: Truth, seconds: float) -> bool:
    """Print the result. Return true if the loss fell and the verdicts name exactly the truth."""
    loss = fetch(hub, "/api/v1/metrics/series?name=loss")["values"]
    if not loss:
        raise DemoError("the hub knows no loss of this job")
    verdicts = [one for one in fetch(hub, "/api/v1/verdicts") if one["state"] != "suspect"]
    first, last = sum(loss[:5]) / 5, sum(loss[-5:]) / 5
    right = [one for one in verdicts if names_truth(one, truth)]
    wrong = [one for one in verdicts if not names_truth(one, truth)]
    TRACE.write_bytes(hub.get("/api/v1/trace").raise_for_status().content)
    print(f"\n== After {seconds:.0f} s")
    print(
        f"   loss      {first:.3f} -> {last:.3f} over {len(loss)} steps: {'fell' if last < first else 'did NOT fall'}"
    )
    print(f"   truth     {truth.place}, {truth.kind}, steps {truth.first_step} to {truth.last_step}")
    for verdict in verdicts:
        print(f"   verdict   {verdict['sentence']}")
    outcome = "right" if right and not wrong else "WRONG"
    print(f"   outcome   {outcome}: {len(right)} verdicts name the fault, {len(wrong)} do not")
    print(f"   trace     {TRACE} (open it in ui.perfetto.dev or chrome://tracing)")
    return outcome == "right" and last < first


def wait_for_interrupt() -> None:
    print("   The pages stay open until Ctrl-C.")
    try:
        while True:
            time.sleep(POLL_S)  # a Ctrl-C that arrives just before a longer wait would be handled after it
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
