"""An order from the command line: take the control of the training, give the order, wait until the ranks obey."""

import argparse
import contextlib
import datetime
import json
import pathlib
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import httpx

from megatronapp_common.scope.perturbation.recipe import RecipeError, parse_recipe
from megatronapp_common.text.terminal import replace_control_characters
from megatronapp_operator.cli.inject import problem_of
from megatronapp_operator.cli.text.numbers import parse_count
from megatronapp_operator.cli.text.tables import NONE
from megatronapp_operator.errors import HubError, OperatorError

POLL_S = 0.3
"""Seconds between two requests for the state."""
RENEW_S = 10.0
"""Seconds after which the control is renewed while an order waits for the end of a step."""
CLIENT = "command line"


class HubCall(Protocol):
    """A request to the training's part of the hub."""

    def __call__(self, method: str, path: str, document: Mapping[str, Any] | None = None, /) -> httpx.Response:
        """Send it. `path` is below `training`; raises HubError if the hub does not answer."""


def main(arguments: argparse.Namespace, call: HubCall, *, sleep: Callable[[float], None] = time.sleep) -> int:
    """Give the order of the command line, or print the state; return the exit code."""
    order = order_of(arguments)
    if arguments.order == "status":
        state = _answer(call("GET", ""))
        print(json.dumps(state, indent=2) if arguments.json else replace_control_characters(describe(state)))
        return 0
    taken = {"action": "take", "client": CLIENT, "force": arguments.force}
    key = str(_answer(call("POST", "/lease", taken))["key"])
    try:
        given = _answer(call("POST", "/orders", {"lease": key, "id": uuid.uuid4().hex} | order))
        if not arguments.no_wait:
            given = _decided(call, key, given, sleep)
    finally:
        with contextlib.suppress(HubError):  # after a stop the hub may have ended
            call("POST", "/lease", {"action": "release", "key": key})
    if given["refusal"] is not None:
        raise HubError(replace_control_characters(str(given["refusal"])))
    print(replace_control_characters(outcome(given)))
    return 0


def order_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the order of the command line. Raises OperatorError for options that do not belong together."""
    kind, value = arguments.order, arguments.value
    if (value is None) != (kind not in {"step", "perturb"} or (kind == "perturb" and arguments.undo)):
        raise OperatorError(
            "give a number with step, a file with perturb, and neither otherwise: megatronapp training JOB step 10, "
            "megatronapp training JOB perturb recipe.json"
        )
    if kind != "capture" and (arguments.every is not None or arguments.now or arguments.off):
        raise OperatorError(
            "give --every, --now and --off with capture only: megatronapp training JOB capture --every 50"
        )
    numbers = {"target": arguments.target, "steps": arguments.steps, "replica": arguments.replica}
    chosen = {name: number for name, number in numbers.items() if number is not None}
    if (chosen and (kind != "perturb" or arguments.undo)) or (arguments.undo and kind != "perturb"):
        raise OperatorError(
            "give --target, --steps and --replica with perturb FILE, and --undo with perturb only: "
            "megatronapp training JOB perturb --undo"
        )
    if kind == "perturb":
        return {"kind": "undo"} if arguments.undo else {"kind": kind, "recipe": read_recipe(value)} | chosen
    if kind == "step":
        try:
            return {"kind": kind, "steps": parse_count(value)}
        except argparse.ArgumentTypeError as error:
            raise OperatorError(f"step: {error}") from error
    every = 0 if arguments.off else arguments.every
    return {"kind": kind} | ({} if every is None else {"every": every})


def read_recipe(path: str) -> dict[str, Any]:
    """Read a recipe from a file. Raises OperatorError with the place of a mistake."""
    try:
        document = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        recipe = parse_recipe(document)
    except (OSError, ValueError, RecipeError) as error:
        raise OperatorError(f"{path}: {error}") from error
    parsed: dict[str, Any] = json.loads(recipe.canonical())
    return parsed


def _decided(call: HubCall, key: str, given: dict[str, Any], sleep: Callable[[float], None]) -> dict[str, Any]:
    """Return the order once the ranks have decided on it, at the end of the step that runs."""
    renew_s = time.monotonic() + RENEW_S
    while given["fromStep"] is None and given["refusal"] is None:
        sleep(POLL_S)
        if time.monotonic() > renew_s:
            call("POST", "/lease", {"action": "renew", "key": key})  # a client that has taken it over keeps it
            renew_s = time.monotonic() + RENEW_S
        state = _answer(call("GET", ""))
        given = next((order for order in state["orders"] if order["id"] == given["id"]), given)
        if state["state"] == "ended" and given["fromStep"] is None:
            raise HubError(f"the training has ended before {given['kind']} took effect")
    return given


def outcome(order: Mapping[str, Any]) -> str:
    """Describe an accepted order as one line."""
    step = order["fromStep"]
    if step is None:
        return f"{order['kind']}: ordered; the ranks obey at the end of the step that runs"
    count, every = int(order["steps"]), order["every"]
    captures = "the next step" if every is None else f"every {every} steps" if every else "no step from now on"
    return {
        "pause": f"paused after {step} steps",
        "resume": f"resumed after {step} steps",
        "step": f"runs {count} step{'s' * (count != 1)} after {step} steps, then pauses again",
        "perturb": f"perturbs with recipe {order['digest']} after {step} steps",
        "undo": f"perturbs no longer after {step} steps",
        "capture": f"captures {captures}, after {step} steps",
        "stop": f"stops after {step} steps, with a checkpoint",
    }[str(order["kind"])]


def describe(state: Mapping[str, Any]) -> str:
    """Describe the state of a training for a terminal."""
    total = "" if state["totalSteps"] is None else f" of {state['totalSteps']}"
    step = NONE if state["step"] is None else f"{state['step']}{total}"
    lines = [f"State:    {state['state']}", f"Step:     {step}"]
    if state["stepsLeft"]:
        lines.append(f"Left:     {state['stepsLeft']} steps until the next pause")
    if state["pausedSince"] is not None:
        began = datetime.datetime.fromisoformat(str(state["pausedSince"]))
        seconds = max(0.0, (datetime.datetime.now(datetime.UTC) - began).total_seconds())
        gpus = int(state["gpus"])
        cost = f", {gpus} GPUs x {seconds:.0f} s = {gpus * seconds / 3600:.2f} GPU-hours" if gpus else ""
        lines.append(f"Paused:   for {seconds:.0f} s{cost}")
    if state["captureEvery"] is not None:
        lines.append(f"Captures: every {state['captureEvery']} steps")
    for span in state["perturbed"]:
        last = "" if span["lastStep"] in {None, span["firstStep"]} else f" to {span['lastStep']}"
        force = ", in force" if span["digest"] == state["perturbation"] and span is state["perturbed"][-1] else ""
        lines.append(f"Perturbed: step {span['firstStep']}{last} by recipe {span['digest']}{force}")
    lease = state["lease"]
    control = "no client" if lease is None else f"{lease['who']} ({lease['client']})"
    lines.append(f"Control:  {control}")
    return "\n".join(lines)


def _answer(response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise HubError(replace_control_characters(problem_of(response)))
    try:
        document: dict[str, Any] = response.json()
    except ValueError as error:
        raise HubError(f"the hub's answer is no JSON: {response.text[:200]!r}") from error
    return document
