"""Bytes of MegaScope on a page's WebSocket: of a prompt of 2,048 tokens and of each token after it, L32 H32.

    python bench/bench_scope_bytes.py

A GPT of 32 layers of 32 heads is served by `megatronapp serve` with its hub and generates; a page counts what it gets.
Heads are 4 wide, so that a CPU can do it: what is sent does not depend on their width. One run of each preset; that of
`default` has 8 pinned heads. Minutes. Exit code 1 if a goal is missed.
"""

import argparse
import collections
import json
import pathlib
import statistics
import tempfile
from typing import Any

from scope_job import Page, Size, host, prompt_of, serving

from megatronapp_common.frames import FrameType

GOALS = {"default": 32 << 10, "lite": 12 << 10}
"""Most bytes of a token."""
OVERVIEW_GOAL = 256 << 10
PINNED = 8
OF_STEPS = {FrameType.SCOPE_STEP, FrameType.SCOPE_ROWS}


def capture_of(preset: str, size: Size) -> dict[str, Any]:
    """Return a capture of everything that the preset has."""
    heads = [(place * size.layers // PINNED, place * size.heads // PINNED) for place in range(PINNED)]
    pinned = [{"layer": layer, "head": head} for layer, head in heads] if preset == "default" else []
    return {"preset": preset, "pinned": pinned}


def measured(page: Page, text: str, preset: str, size: Size, tokens: int) -> dict[str, Any]:
    """Bytes of one run, and what its frames held."""
    request = {"prompts": [text], "tokens": tokens, "sampling": {"temperature": 1, "seed": 1}}
    run = page.start_run(request | {"capture": capture_of(preset, size)})
    steps: collections.Counter[int] = collections.Counter()
    others: collections.Counter[str] = collections.Counter()
    names: set[str] = set()
    for frame, count in page.until_end(run):
        if frame.type in OF_STEPS and frame.header["step"] > 0:
            steps[frame.header["step"]] += count
            names |= {str(tensor["n"]) for tensor in frame.header["tensors"]}
        else:
            others[FrameType(frame.type).name] += count
    prompt = page.detail(run)["prompts"][0]
    every = list(steps.values())
    return {
        "preset": preset,
        "prompt_tokens": len(prompt["ids"]),
        "steps": len(every),
        "bytes_per_token_median": statistics.median(every),
        "bytes_per_token_most": max(every),
        "goal": GOALS[preset],
        "overview_bytes": others["SCOPE_OVERVIEW"],
        "overview_goal": OVERVIEW_GOAL,
        "other_bytes": dict(others),
        "tensors": sorted(names),
    }


def main() -> int:
    """Print a line of JSON for each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens that are generated (default: %(default)s)")
    given = parser.parse_args()
    size = Size(layers=given.layers, heads=given.heads, head_width=4, positions=given.prompt + given.new + 64)
    print(json.dumps({"machine": host()}), flush=True)
    missed = False
    with tempfile.TemporaryDirectory() as name, serving(pathlib.Path(name), size) as job, job.hub() as hub:
        page, text = Page(hub), prompt_of(pathlib.Path(name), given.prompt)
        for preset, goal in GOALS.items():
            found = measured(page, text, preset, size, given.new)
            print(json.dumps(found), flush=True)
            missed |= found["bytes_per_token_most"] > goal or found["overview_bytes"] > OVERVIEW_GOAL
        page.close()
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
