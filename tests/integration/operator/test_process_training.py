"""A real job on this machine that is controlled by the command line and by two clients that fight for the lease."""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import megatronapp_forking
import pytest
import yaml
from pytest_workers import FULL
from served_job import Served

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.timeout(900)]
TEXT = "the whale dives"
ORDERS = 200 if FULL else 16
"""Orders of two clients together."""


def tokenizer_of(folder: pathlib.Path) -> pathlib.Path:
    from megatronapp_trainer.data import tokenizer

    path = folder / "tokenizer.json"
    tokenizer.train([TEXT], 280).backend.save(str(path))
    return path


def document(folder: pathlib.Path, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "megatronapp.io/v1alpha1",
        "kind": "MegatronJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": 2,
            "procPerNode": 1,
            "parallelism": {"pipeline": 2},
            "model": {
                "numLayers": 2,
                "hiddenSize": 32,
                "numAttentionHeads": 4,
                "seqLength": 16,
                "vocabSize": 300,
            },
            "training": {
                "microBatchSize": 1,
                "globalBatchSize": 4,
                "trainIters": 1_000_000,
                "lr": 0.002,
                "evalIters": 0,
            },
            "data": {"mock": True, "tokenizer": str(tokenizer_of(folder))},
            "dpp": {"enabled": True, "chunks": 1},
            "checkpoint": {"save": str(folder / "checkpoints")},
            "analyzer": {"enabled": True},
            "runPolicy": {"backoff": {"initialSeconds": 0.1}},
            "scope": {"training": {"startPaused": True, "captureEvery": 2, "probeTexts": [TEXT]}},
        },
    }


@pytest.fixture
def job(forkserver: Any, tmp_path: pathlib.Path) -> Iterator[Served]:
    job = Served(tmp_path / "state", "steered", megatronapp_forking.command(forkserver.python()))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document(tmp_path, job.name)), encoding="utf-8")
    job.cli("run", str(path), "--detach")
    yield job
    job.cli("delete", job.name, "--force", "--ignore-not-found")


def until_state(job: Served, state: str, attempt: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def there() -> bool:
        with contextlib.suppress(FileNotFoundError, httpx.HTTPError), job.hub() as hub:
            found.update(hub.get("training").raise_for_status().json())
        return (found.get("state"), found.get("attempt")) == (state, attempt)

    job._until(there)
    return found


def check_captures(job: Served) -> None:
    """Step 2 of 3 was captured on both ranks: each has one of the two layers."""
    found: dict[str, Any] = {}

    def merged() -> bool:
        with job.hub() as hub:
            answer = hub.get("training/captures", params={"site": "mlp1", "quantity": "rms"})
            found.update(answer.raise_for_status().json())
        return bool(found["steps"])

    job._until(merged)
    assert [(step["step"], step["missing"], step["firstNotFinite"]) for step in found["steps"]] == [(2, [], None)]
    assert (found["every"], found["layers"], found["notFinite"]) == (2, [0, 1], [[0], [0]])
    assert all(0 < values[0] < 10 for values in found["values"])
    with job.hub() as hub:
        details = hub.get("training/captures/2").raise_for_status().json()["statistics"]
        assert hub.get("training/captures/3").status_code == 404
    assert {(entry["site"], entry["layer"]) for entry in details} >= {("embedding", -1), ("gradient", 1)}
    for entry in details:
        assert entry["nan"] + entry["inf"] + entry["zero"] + sum(entry["histogram"]) == entry["count"]


def check_probe_texts(job: Served) -> None:
    """The text was run after step 2 on both stages: the second one has the predictions."""
    found: dict[str, Any] = {}

    def there() -> bool:
        with job.hub() as hub:
            found.update(hub.get("training/probes").raise_for_status().json())
        return found["layers"] == [0, 1] and [step["meanLogprobs"][:1] != [None] for step in found["steps"]] == [True]

    job._until(there)
    assert ("".join(found["texts"][0]["tokens"]), found["steps"][0]["step"], found["heads"]) == (TEXT, 2, 4)
    with job.hub() as hub:
        result = hub.get("training/probes/2/0").raise_for_status().json()
        attention = hub.get("training/probes/2/0/attention", params={"layer": 1, "head": 3}).raise_for_status().json()
        assert hub.get("training/probes/3/0").status_code == 404
    assert len(result["candidates"][0]) == 5 and result["layers"] == [-1, 0, 1]
    assert attention["probabilities"][0][0] == 1 and all(
        sum(row) == pytest.approx(1, abs=0.02) for row in attention["probabilities"]
    )


def captured_steps(job: Served) -> list[int]:
    with job.hub() as hub:
        return [step["step"] for step in hub.get("training/captures").raise_for_status().json()["steps"]]


def decisions(job: Served, attempt: int) -> list[list[str]]:
    """Orders of each rank's log with the steps after which they were obeyed."""
    logs = sorted(job.folder.glob(f"attempt-{attempt}/worker-*/rank-*.log"))
    return [re.findall(r"order \d+ .*", log.read_text()) for log in logs]


class Rival(threading.Thread):
    """Client that takes the control by force and gives orders, until its share of orders was accepted."""

    def __init__(self, job: Served, seed: int) -> None:
        super().__init__(daemon=True)
        self.job = job
        self.draw = random.Random(seed)
        self.accepted = 0
        self.codes: set[str] = set()

    def run(self) -> None:
        with self.job.hub() as hub:
            while self.accepted < ORDERS // 2:
                taken = self.post(hub, "lease", {"action": "take", "client": f"rival {self.name}", "force": True})
                key = taken.raise_for_status().json()["key"]
                for _ in range(3):
                    kind = self.draw.choice(("pause", "resume", "step"))
                    steps = {"steps": self.draw.randint(1, 4)} if kind == "step" else {}
                    answer = self.post(hub, "orders", {"lease": key, "kind": kind} | steps)
                    if answer.status_code == httpx.codes.ACCEPTED:
                        self.accepted += 1
                    else:
                        self.codes.add(answer.json()["code"])

    @staticmethod
    def post(hub: httpx.Client, what: str, body: dict[str, Any]) -> httpx.Response:
        """Send a request, as often as the hub limits its rate, at the times that it says."""
        answer = hub.post(f"training/{what}", json=body)
        while answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            time.sleep(int(answer.headers["Retry-After"]))
            answer = hub.post(f"training/{what}", json=body)
        return answer


def perturb(job: Served, path: pathlib.Path) -> int:
    """Perturb master parameters of the paused job, undo it, and do it again for good; the number of orders."""
    change = {"kind": "storage", "parameter": "mlp.linear_fc1", "action": {"type": "gaussian", "coefficient": 0.01}}
    path.write_text(json.dumps({"perturbations": [change]}), encoding="utf-8")
    order = ("training", job.name, "perturb", str(path), "--target", "master")
    (digest,) = re.findall(r"perturbs with recipe ([0-9a-f]{12}) after 7 steps", job.call(*order))
    assert f"step 8 by recipe {digest}, in force" in job.call("training", job.name, "status")
    assert job.call("training", job.name, "perturb", "--undo") == "perturbs no longer after 7 steps\n"
    assert "Perturbed" not in job.call("training", job.name, "status")
    job.call(*order)
    job.call("training", job.name, "step", "1")
    job._until(lambda: until_state(job, "paused", 0)["step"] == 8)
    state = until_state(job, "paused", 0)
    span = {"digest": digest, "parameters": "master", "replica": None, "firstStep": 8, "lastStep": 8}
    assert (state["perturbation"], state["perturbed"]) == (None, [span])
    with pytest.raises(AssertionError, match="step 8 has used the perturbed parameters"):
        job.call("training", job.name, "perturb", "--undo")
    return 5


def stop(job: Served) -> str:
    """Stop the job, once the ranks have obeyed some of the orders that wait; return the output."""
    while True:
        try:
            return job.call("training", job.name, "stop", "--force")
        except AssertionError as refused:
            assert "orders wait for the ranks" in str(refused), refused
        time.sleep(0.1)


def test_a_job_is_paused_stepped_killed_fought_over_and_stopped(job: Served, tmp_path: pathlib.Path) -> None:
    assert until_state(job, "paused", 0)["step"] == 0
    assert job.cli("training", job.name, "step", "3") == "runs 3 steps after 0 steps, then pauses again\n"
    job._until(lambda: until_state(job, "paused", 0)["step"] == 3)
    assert job.status()["phase"] == "Running"
    check_captures(job)
    check_probe_texts(job)
    assert job.call("training", job.name, "capture", "--off") == "captures no step from now on, after 3 steps\n"
    job.call("training", job.name, "step", "1")
    job._until(lambda: until_state(job, "paused", 0)["step"] == 4)
    assert job.call("training", job.name, "capture") == "captures the next step, after 4 steps\n"
    job.call("training", job.name, "step", "3")
    assert until_state(job, "paused", 0)["captureEvery"] is None
    job._until(lambda: captured_steps(job) == [2, 5])
    job._until(lambda: until_state(job, "paused", 0)["step"] == 7)
    job._until(lambda: "Running,Paused" in job.call("get", job.name))
    given_before = 5 + perturb(job, tmp_path / "recipe.json")

    attempt = 0
    if FULL:  # another gang of torch to start
        os.kill(job.rank(1), signal.SIGKILL)
        again, attempt = until_state(job, "paused", 1), 1
        assert again["step"] == 0 and all(order["attempt"] == 0 for order in again["orders"])

    rivals = [Rival(job, seed) for seed in (1, 2)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(600)
    assert all(rival.accepted >= ORDERS // 2 for rival in rivals)
    assert {code for rival in rivals for code in rival.codes} <= {"lease-lost", "order-refused", "orders-wait"}
    stopped = stop(job)
    step = int(re.findall(r"stops after (\d+) steps", stopped)[0])
    job._until(lambda: job.status().get("phase") == "Succeeded")
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(step)
    if attempt == 0:
        (manifest,) = (tmp_path / "checkpoints").glob("iter_*/megatronapp.json")
        assert [entry["first_step"] for entry in json.loads(manifest.read_text())["perturbed"]] == [8]
    first, second = decisions(job, attempt)
    given = sum(rival.accepted for rival in rivals) + 1 + given_before * (attempt == 0)
    assert first == second and len(first) == given
