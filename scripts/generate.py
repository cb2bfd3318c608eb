"""Write what is made from the types: CRD, reference, wire vectors; --check fails if a file drifted."""

import argparse
import json
import pathlib
import re
import sys
from typing import Any

import numpy as np
import yaml
from chart_reference import render_chart
from python_reference import render_client

from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.job.admission import admission_policy
from megatronapp_common.job.api.profile import ProfileKind
from megatronapp_common.job.crd import custom_resource_definition
from megatronapp_common.job.profiles.definition import profile_definition
from megatronapp_common.job.reference import render_reference
from megatronapp_common.migration.page import render_page
from megatronapp_common.scope.codes import TensorCode, decode, encode
from megatronapp_common.scope.layer_statistics import SiteLayer, of_values, statistics_frame
from megatronapp_common.trace import RECORD, Flag, RecordKind
from megatronapp_trainer.hooks.sites import known_sites

ROOT = pathlib.Path(__file__).resolve().parents[1]
WIRE = "tests/fixtures/wire"
RULES = "charts/megatronapp/rules"
MADE = "Made from the types by 'make generate'; do not edit."
LARGEST_SAFE_INTEGER = 2**53 - 1  # JavaScript's numbers
STEPS_BODY = np.array([[[0.5, np.nan], [0.25, 1.5]], [[0, 0.125], [np.nan, 2]]], dtype="<f4")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a file would change")
    arguments = parser.parse_args()
    drifted = [name for name, content in sorted(render().items()) if not put(name, content, write=not arguments.check)]
    if arguments.check and drifted:
        print(f"not what the types say: {', '.join(drifted)}; run 'make generate'", file=sys.stderr)
        return 1
    return 0


def put(name: str, content: bytes, *, write: bool) -> bool:
    """Return true if the file already had this content; write it otherwise if ``write``."""
    path = ROOT / name
    if path.exists() and path.read_bytes() == content:
        return True
    if write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return False


def render() -> dict[str, bytes]:
    """Every generated file: name below the repository's root, and content."""
    definitions = {"megatronjob": custom_resource_definition()} | {
        kind.lower(): profile_definition(kind) for kind in ProfileKind
    }
    crds = {name: made_yaml(definition) for name, definition in definitions.items()}
    policy = yaml.safe_dump_all(admission_policy(), sort_keys=False, width=120, allow_unicode=True)
    return {
        "charts/megatronapp/files/admission-policy.yaml": f"# {MADE}\n{policy}".encode(),
        **{f"crds/{name}.yaml": content for name, content in crds.items()},
        **{f"charts/megatronapp/files/{name}.yaml": content for name, content in crds.items()},
        "frontend/src/scope/builtInSites.ts": render_sites(),
        "docs/reference-megatronjob.md": render_reference().encode(),
        "docs/from-megatronapp.md": render_page().encode(),
        "docs/reference-chart.md": render_chart().encode(),
        "docs/reference-python.md": render_client().encode(),
        "README.md": counted_readme(),
        **render_vectors(),
        "tests/fixtures/scope/codes.json": (json.dumps(render_codes(), indent=1) + "\n").encode(),
    }


def made_yaml(document: dict[str, Any]) -> bytes:
    """Return an object as a generated file."""
    text = yaml.dump(document, Dumper=PlainDumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# {MADE}\n{text}".encode()


class PlainDumper(yaml.SafeDumper):
    """Dumper that writes equal parts out: a definition of the API server has no anchors."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401
        return True


def render_sites() -> bytes:
    """Return the page's module with the names of the sites that every model has."""
    names = "".join(f'  "{name}",\n' for name in known_sites())
    return (
        f"// {MADE}\n/** Sites that every model has; all others are of plugins. */\n"
        f"export const BUILT_IN_SITES: ReadonlySet<string> = new Set([\n{names}]);\n"
    ).encode()


def counted_readme() -> bytes:
    """The README with the number of alerts that the chart has, without recorded series."""
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / RULES).glob("*.yaml")]
    groups = (group for document in documents for group in document["groups"])
    alerts = sum("alert" in rule for group in groups for rule in group["rules"])
    text, found = re.subn(r"\b\d+ alerts\b", f"{alerts} alerts", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found == 1, "the README says once how many alerts there are"
    return text.encode()


def render_vectors() -> dict[str, bytes]:
    """The index of wire vectors and one file of bytes for each."""
    valid = {name: (frame, frames.encode(frame)) for name, frame in valid_frames().items()}
    index = {
        "valid": [
            {
                "name": name,
                "file": f"{name}.bin",
                "type": int(frame.type),
                "header": dict(frame.header),
                "bodyHex": bytes(frame.body).hex(),
                "canonical": all_exact(frame.header),
            }
            for name, (frame, _) in valid.items()
        ],
        "invalid": [{"name": name, "file": f"{name}.bin", "why": why} for name, (why, _) in invalid_frames().items()],
        "records": [dict(zip(RECORD.names or (), map(int, record), strict=True)) for record in sample_records()],
        "stepsBody": [
            [[None if np.isnan(value) else float(value) for value in rank] for rank in metric] for metric in STEPS_BODY
        ],
    }
    contents = {name: data for name, (_, data) in valid.items()} | {
        name: data for name, (_, data) in invalid_frames().items()
    }
    files = {f"{WIRE}/{name}.bin": data for name, data in contents.items()}
    return {f"{WIRE}/vectors.json": (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode(), **files}


def render_codes() -> list[dict[str, Any]]:
    """Return rows of 32-bit floats, their codes, and the decoded values, little endian in hex."""
    odd = [np.nan, np.inf, -np.inf, -0.0, 1e-45, -1e-40, 1e-3, 0.5]
    edges = [65504, 65519, 65520, 1e5, -6e-8, 3e-8, 1, 2]  # of half precision
    rows = [odd, [0.0] * 8, [3.4028235e38, 1, *odd[2:]], np.arange(8) / 7, edges]
    ties = (np.arange(-4, 4) + 0.5) * 2.0**-10
    mixed = (np.arange(48).reshape(6, 8) * 37 % 101) / 50 - 1
    values = np.array([*rows, ties, 126 * ties / ties[0], *mixed], "<f4")
    found = {code: encode(code, values) for code in TensorCode}
    return [
        {
            "code": code,
            "shape": list(values.shape),
            "values": values.tobytes().hex(),
            "data": data.data.tobytes().hex(),
            "scales": None if data.scales is None else data.scales.tobytes().hex(),
            "decoded": decode(code, data.data, data.scales).astype("<f4").tobytes().hex(),
        }
        for code, data in found.items()
    ]


def all_exact(value: Any) -> bool:  # noqa: ANN401
    """Return true if all implementations pack the value to the same bytes: JavaScript has no 1.0 or large integers."""
    if isinstance(value, dict):
        return all(all_exact(item) for item in value.values())
    if isinstance(value, list):
        return all(all_exact(item) for item in value)
    if isinstance(value, float):
        return not value.is_integer()
    return not isinstance(value, int) or abs(value) <= LARGEST_SAFE_INTEGER


def sample_records() -> Any:  # noqa: ANN401
    rows = [
        (1_000_000_000, 125_000, 7, 0, 2_500, 0xFFFF, 0, RecordKind.FORWARD, 0, 0, Flag.AUX_RUN_QUEUE),
        (1_001_000_123, 5, 7, 3, 4_096, 2, 1, RecordKind.SEND_POST, 1, 0, Flag.AUX_BYTES | Flag.INJECTED),
        (2**63 + 1, 0xFFFF_FFFF, 0xFFFF_FFFF, 0, 0, 0, 0xFFFF, RecordKind.STEP, 255, 255, Flag.SATURATED),
    ]
    return np.array(rows, dtype=RECORD)


def valid_frames() -> dict[str, Frame]:
    """One frame of every type, then the corners of the format."""
    rank = {"rank": 3, "worker": 1, "first": 128, "lost": 0}
    status = {"rank": 3, "heartbeatNs": 1_002_000_000, "nowNs": 1_002_500_000, "openSpan": None, "lost": 0}
    series = {"loss": {"attempts": [0, 0], "steps": [7, 8], "values": [4.875, 4.75]}}
    problem = {"code": "stale_attempt", "message": "attempt 0 has ended", "hint": "start the agent of attempt 1"}
    steps = {"attempt": 0, "steps": [7, 8], "ranks": [0, 1], "metrics": ["compute", "wait"]}
    times = {"startsNs": [1_763_700_000_123_456_789, 1_763_700_001_123_456_789], "durationsNs": [900_000_000, 10**9]}
    text = "Rang 3 ist langsam \u2014 1,5 \u00d7 \U0001f40c"
    numbers = [0, -1, 127, 128, 2**32, 2**63 - 1, -(2**63), 0.1, 1.0, 1e300]
    return {
        "hello": Frame(FrameType.HELLO, {"job": "demo", "uid": "a-1", "attempt": 0, "worker": 1, "protocol": 1}),
        "welcome": Frame(FrameType.WELCOME, {"server": "megatronapp 0.1.0"}),
        "ring": Frame(FrameType.RING, {"rank": None, "worker": 1, "clockPairs": [[1_000, 2_000]], "capacity": 65536}),
        "records": Frame(FrameType.RECORDS, rank, sample_records().tobytes()),
        "status": Frame(FrameType.STATUS, {"rings": [status], "progress": None, "dropped": 0}),
        "bye": Frame(FrameType.BYE, {"reason": "done"}),
        "command": Frame(FrameType.COMMAND, {"version": 2, "faults": [{"rank": 1, "kind": "link", "factor": 2.5}]}),
        "snapshot": Frame(FrameType.SNAPSHOT, {"name": "demo", "phase": "Running", "progress": None}),
        "steps": Frame(FrameType.STEPS, {**steps, **times}, STEPS_BODY.tobytes()),
        "metrics": Frame(FrameType.METRICS, {"series": series}),
        "verdicts": Frame(FrameType.VERDICTS, {"verdicts": [{"sentence": text}]}),
        "error": Frame(FrameType.ERROR, problem),
        **training_frames(),
        **scope_frames(),
        "empty": Frame(FrameType.SNAPSHOT, {}),
        "unknown-type": Frame(200, {"from": "a newer release"}, b"\x00\xff"),
        "body-of-one-byte": Frame(FrameType.RECORDS, {"a": 1}, b"\x01"),
        "numbers": Frame(FrameType.SNAPSHOT, {"values": numbers}),
    }


def training_frames() -> dict[str, Frame]:
    """Frames of captures of a training."""
    header = {"rank": 0, "ranks": 1, "attempt": 0}
    values = of_values(np.array([0.0, 1.0, -2.0])).tobytes()
    rows = [SiteLayer("residual", 3)]
    return {
        "training-rank": Frame(FrameType.TRAINING_RANK, header | {"every": 50}),
        "training-probe": Frame(
            FrameType.TRAINING_PROBE,
            {"rank": 0, "attempt": 0, "step": 50, "kind": "norms", "text": 0, "tokens": 2, "layer": 3, "first": 0}
            | {"arrays": [["<f4", [2]]]},
            np.array([1.0, 2.0], "<f4").tobytes(),
        ),
        "training-statistics": statistics_frame(FrameType.TRAINING_STATISTICS, header | {"step": 50}, rows, values),
    }


def scope_frames() -> dict[str, Frame]:
    """One frame of every type of MegaScope (docs/scope-protocol.md)."""
    run = "0123456789ab"
    codes = np.array([[0, 128, 255]], dtype=np.uint8)
    entropy = [{"n": "head.entropy", "c": "u8", "s": [1, 1, 3], "o": 0}]
    rows = [{"n": "attention", "c": "u8s", "s": [3], "o": 0}]
    signed = [{"n": "q", "c": "i8", "s": [1, 1, 3], "o": 0, "so": 8}]
    part = [signed[0] | {"site": "q", "layers": [0], "heads": [0, 3], "replicated": False}]
    pixels = np.array([-127, 0, 127], np.int8).tobytes().ljust(8, b"\0") + np.array([0.5], "<f4").tobytes()
    values = np.array([[0.5, -1.5]], "<f4").tobytes()
    tile = [{"n": "1,0", "c": "u8s", "s": [1, 3], "o": 0}]
    exact = [{"n": "residual", "c": "f32", "s": [1, 2], "o": 0}]
    publisher = {"rank": 0, "attempt": 0, "coordinates": {"tp": 0, "pp": 0, "dp": 0}, "layers": [0, 4]}
    tokens = {"run": run, "step": 1, "ids": [17], "texts": ["\u00fc"]}
    ranges = {"heads": [0, 4], "keyHeads": [0, 2], "mlp": [0, 64], "sites": ["q", "attention"]}
    state = {"run": run, "state": "decoding", "position": None, "error": None}
    gap = {"seq": 5, "run": run, "what": "rows", "from": 1, "to": 3, "ranks": [], "reason": "slow"}
    kinds = FrameType
    return {
        "scope-publisher": Frame(kinds.SCOPE_PUBLISHER, publisher | ranges),
        "scope-part": Frame(
            kinds.SCOPE_PART, {"rank": 0, "run": run, "step": 1, "rows": [[0, 7, 1]], "tensors": part}, pixels
        ),
        "scope-tokens": Frame(kinds.SCOPE_TOKENS, tokens | {"rows": [[0, 7, 1]], "tensors": []}),
        "scope-run-state": Frame(kinds.SCOPE_RUN_STATE, state),
        "scope-left": Frame(kinds.SCOPE_LEFT, {"rank": 0}),
        "scope-hello": Frame(kinds.SCOPE_HELLO, {"protocol": 1, "role": "viewer", "source": "live", "runs": []}),
        "scope-run": Frame(kinds.SCOPE_RUN, state | {"seq": 1}),
        "scope-step": Frame(
            kinds.SCOPE_STEP, tokens | {"seq": 2, "rows": [[0, 7]], "tensors": entropy}, codes.tobytes()
        ),
        "scope-overview": Frame(
            kinds.SCOPE_OVERVIEW, {"seq": 3, "run": run, "sample": 0, "stride": 4, "tensors": signed}, pixels
        ),
        "scope-rows": Frame(
            kinds.SCOPE_ROWS,
            {"seq": 4, "run": run, "step": 1, "rows": [[0, 3, 1, 2]], "keys": [3], "tensors": rows},
            codes.tobytes(),
        ),
        "scope-gap": Frame(kinds.SCOPE_GAP, gap),
        "scope-state": Frame(kinds.SCOPE_STATE, {"state": "ready", "message": "", "hint": "", "queue": 0}),
        "scope-pca": Frame(
            kinds.SCOPE_PCA,
            {"run": run, "version": 1, "layers": [0], "explained": [[0.5, 0.25]], "fitted": "refit", "tensors": []},
        ),
        "scope-values": Frame(
            kinds.SCOPE_VALUES, {"run": run, "site": "residual", "sample": 0, "layer": 3, "tensors": exact}, values
        ),
        "scope-basis": Frame(kinds.SCOPE_BASIS, {"version": 1, "layers": [0], "tensors": exact}, values),
        "scope-analysis": Frame(
            kinds.SCOPE_ANALYSIS, {"run": run, "sample": 0, "kind": "lens", "count": 3, "tensors": exact}, values
        ),
        "scope-tiles": Frame(
            kinds.SCOPE_TILES,
            {"run": run, "sample": 0, "layer": 3, "head": 1, "level": 0, "tensors": tile},
            codes.tobytes().ljust(8, b"\0"),
        ),
    }


def invalid_frames() -> dict[str, tuple[str, bytes]]:
    """Bytes that every implementation refuses, with the reason."""
    good = frames.encode(Frame(FrameType.RECORDS, {"rank": 3}, b"12345678"))

    def changed(at: int, value: int) -> bytes:
        return good[:at] + bytes([value]) + good[at + 1 :]

    return {
        "bad-short": ("shorter than its prefix", good[:15]),
        "bad-cut": ("shorter than it says", good[:-8]),
        "bad-longer": ("longer than it says", good + bytes(8)),
        "bad-version": ("version 2", changed(4, 2)),
        "bad-header-length": ("header length passes the frame", changed(9, 1)),
        "bad-body-length": ("body length disagrees", changed(12, 9)),
        "bad-total": ("total is not the sum", changed(0, good[0] + 8)),
        "bad-msgpack": ("header is not msgpack", changed(16, 0xC1)),
        "bad-header-type": ("header is not a map", changed(16, 0x90)),
        "bad-huge": ("total passes the limit", b"\xff\xff\xff\xff" + good[4:]),
    }


if __name__ == "__main__":
    sys.exit(main())
