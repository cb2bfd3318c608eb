"""Cost of the rules between fields at a real API server: creations and status writes with rules, and without any.

    python bench/bench_rules.py                          # the rules of this checkout, two minutes on two cores
    python bench/bench_rules.py --definition FILE        # those of another definition as well, such as an older one

A fresh kube-apiserver holds each definition under a separate group. Blocks of writes take turns, so that all of them
have the same load of the computer; processor time is that of the API server. Prints a table.
"""

import argparse
import copy
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "control_plane")]

import httpx  # noqa: E402 - after the path above
import kube  # noqa: E402
import psutil  # noqa: E402
import yaml  # noqa: E402
from operator_cluster import cpu_s  # noqa: E402
from operator_jobs import megatron_job  # noqa: E402

from megatronapp_common.job.crd import PLURAL, custom_resource_definition  # noqa: E402
from megatronapp_common.names import VERSION  # noqa: E402

Object = dict[str, Any]
BLOCK = 25
"""Jobs that a block creates, and of which it writes the status twice."""
WARM_UP = 2
"""Blocks that are not counted."""
KINDS = ("creation", "status write")


def main() -> int:
    options = parse_options()
    definitions = {"no rules": without_rules(custom_resource_definition()), "rules": custom_resource_definition()}
    if options.definition is not None:
        definitions[options.definition.name] = yaml.safe_load(options.definition.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, kube.control_plane(pathlib.Path(folder)) as plane:
        found = measure(plane, definitions, options.blocks)
    print(f"\n| definition | write | count | API server, CPU ms each | latency, median ms |\n|{'---|' * 5}")
    for (name, kind), (count, used_s, latencies) in found.items():
        print(f"| {name} | {kind} | {count} | {used_s / count * 1e3:.1f} | {statistics.median(latencies) * 1e3:.1f} |")
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--definition", type=pathlib.Path, help="a further CustomResourceDefinition of MegatronJob")
    parser.add_argument("--blocks", type=int, default=12, help=f"blocks of {BLOCK} jobs for each definition")
    return parser.parse_args()


def without_rules(definition: Object) -> Object:
    """Return the definition without any rule in CEL."""
    made = copy.deepcopy(definition)
    for schema in _with_rules(made):
        del schema["x-kubernetes-validations"]
    return made


def _with_rules(definition: Object) -> Iterator[Object]:
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    yield schema
    yield schema["properties"]["spec"]


Cost = tuple[int, float, list[float]]
"""Count of writes, CPU seconds of the API server, and seconds of each write."""


def measure(plane: kube.ControlPlane, definitions: dict[str, Object], blocks: int) -> dict[tuple[str, str], Cost]:
    """Return the cost of each kind of write with each definition."""
    paths = {name: define(plane, name, made) for name, made in definitions.items()}
    server = next(child for child in psutil.Process().children() if child.name() == "kube-apiserver")
    found: dict[tuple[str, str], Cost] = {(name, kind): (0, 0.0, []) for kind in KINDS for name in definitions}
    with plane.client() as client:
        for block in range(WARM_UP + blocks):
            for name, path in paths.items():
                jobs: list[Object] = []
                for kind in KINDS:
                    before, latencies = cpu_s(server), list[float]()
                    jobs = write(client, path, jobs, latencies) if jobs else create(client, path, block, latencies)
                    if block >= WARM_UP:
                        count, used_s, earlier = found[name, kind]
                        used_s += cpu_s(server) - before
                        found[name, kind] = count + len(latencies), used_s, earlier + latencies
    return found


def define(plane: kube.ControlPlane, name: str, definition: Object) -> str:
    """Store a definition under a separate group; return the path of its jobs once they can be listed."""
    made, group = copy.deepcopy(definition), f"{name.replace(' ', '-').replace('.', '-')}.example.com"
    made["metadata"]["name"] = f"{PLURAL}.{group}"
    made["spec"]["group"] = group
    made["spec"]["names"] |= {"shortNames": [], "categories": []}
    path = plane.folder / f"{group}.yaml"
    path.write_text(yaml.safe_dump(made), encoding="utf-8")
    plane.define(path)
    return f"/apis/{group}/{VERSION}/namespaces/default/{PLURAL}"


def create(client: httpx.Client, path: str, block: int, latencies: list[float]) -> list[Object]:
    """Create the jobs of a block; return them as stored."""
    group = path.split("/")[2]
    made = [megatron_job("default", f"job-{block}-{number}", 1, hub=True) for number in range(BLOCK)]
    return [timed(client, "POST", path, job | {"apiVersion": f"{group}/{VERSION}"}, latencies) for job in made]


def write(client: httpx.Client, path: str, jobs: list[Object], latencies: list[float]) -> list[Object]:
    """Write the status of each job twice, as an operator does when it creates the pods and when they run."""
    for phase in ("Starting", "Running"):
        status = {"phase": phase, "restarts": 0, "attempt": 0, "worldSize": 8, "dataParallelSize": 1}
        replicas = {"desired": 1, "ready": int(phase == "Running"), "running": int(phase == "Running")}
        new = [job | {"status": status | {"replicaStatuses": replicas}} for job in jobs]
        jobs = [timed(client, "PUT", f"{path}/{job['metadata']['name']}/status", job, latencies) for job in new]
    return jobs


def timed(client: httpx.Client, method: str, path: str, body: Object, latencies: list[float]) -> Object:
    """Send a write; return the object as stored."""
    began = time.perf_counter()
    answer = client.request(method, path, json=body)
    latencies.append(time.perf_counter() - began)
    answer.raise_for_status()
    stored: Object = answer.json()
    return stored


if __name__ == "__main__":
    sys.exit(main())
