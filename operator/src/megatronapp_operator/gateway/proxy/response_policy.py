"""Types and sizes that a hub may return for each path: JSON; for tiles, tables, sessions and traces also their own.

The requested path, never the hub, decides which file a browser saves, and under which name.
"""

import dataclasses
import re
import urllib.parse
from collections.abc import Mapping

JSON = "application/json"
BYTES = "application/octet-stream"
CSV = "text/csv"
SAID = {JSON: JSON, BYTES: BYTES, CSV: "text/csv; charset=utf-8"}
"""How the gateway calls the types that it lets through."""
MAX_BYTES, MAX_TILE_BYTES, MAX_SESSION_BYTES = 256 << 20, 64 << 10, 1 << 30
"""Limits of a response, of a tile (256 x 256), and of a recorded session, which has a hub's ring and exact numbers."""
MAX_TILES_BYTES = 16 * MAX_TILE_BYTES + (4 << 10)
"""Limit of 16 tiles in a frame, and its header."""
TOTAL_S, SESSION_S = 120.0, 3600.0
"""So long may an answer take in all. None waits for more than half a minute for its next bytes."""
ETAG = re.compile(r'(?:W/)?"[!#-~]{0,128}"')
SHAPE = re.compile(r"[0-9]{1,4},[0-9]{1,4}")
NOTE = re.compile(r"[ -~]{1,200}")
SECONDS = re.compile(r"[0-9]{1,6}")
_RUN = r"scope/runs/(?P<run>[^/]+)"
_SESSION = re.compile(rf"{_RUN}/session")
_TILE = re.compile(rf"{_RUN}/attention/.+")
_TILES = re.compile(rf"{_RUN}/attention(?:/[^/]+){{4}}")
_VALUES = re.compile(rf"{_RUN}/values/(?P<site>[^/]+)")
_ANALYSIS = re.compile(rf"{_RUN}/(?P<kind>lens|attribution|heads)")
_BRANCHES = re.compile(r"scope/(?P<kind>comparison|sweep)s/(?P<name>[^/]+)")
TABLES = {"csv": CSV, "npy": BYTES}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRule:
    """The responses that a path may return."""

    types: frozenset[str] = frozenset({JSON})
    file: str | None = None
    """Name under which a browser saves what is not JSON."""
    tagged: bool = False
    """True if it has an entity tag, with which a browser requests it again."""
    most: int = MAX_BYTES
    total_s: float = TOTAL_S

    def headers(self, said: str, hub: Mapping[str, str]) -> dict[str, str]:
        """The gateway's headers for content of a type, with the few of the hub's that say what they should."""
        headers = {"content-type": SAID[said]}
        if self.file is not None and said != JSON:
            headers["content-disposition"] = f'attachment; filename="{self.file}"'
        return headers | self.bare(hub)

    def bare(self, hub: Mapping[str, str]) -> dict[str, str]:
        """Headers of a response without content."""
        headers = _passed(hub, "Retry-After", SECONDS) | _passed(hub, "Megatronapp-Omitted", NOTE)
        if self.tagged:
            headers |= _passed(hub, "X-Tile-Shape", SHAPE)
            tag = _passed(hub, "ETag", ETAG)
            headers |= tag | ({"cache-control": "private, no-cache"} if tag else {})  # asked again: rights may change
        return headers


PLAIN = ResponseRule()
TILE = ResponseRule(types=frozenset({JSON, BYTES}), tagged=True, most=MAX_TILE_BYTES)
TILES = dataclasses.replace(TILE, most=MAX_TILES_BYTES)


def response_rule_for(path: str, query: str = "") -> ResponseRule:
    """Return the rule of a path below `/api/v1/` of a hub. The path has only plain segments (see `routes`)."""
    if _TILE.fullmatch(path):
        return TILES if _TILES.fullmatch(path) else TILE
    if found := _SESSION.fullmatch(path):
        types = frozenset({JSON, BYTES})
        return ResponseRule(types=types, file=f"{found['run']}.scope", most=MAX_SESSION_BYTES, total_s=SESSION_S)
    form = urllib.parse.parse_qs(query).get("format", [""])[-1]
    if (found := _VALUES.fullmatch(path)) and form in TABLES:
        return ResponseRule(types=frozenset({JSON, TABLES[form]}), file=f"{found['run']}-{found['site']}.{form}")
    if path == "trace" and form == "perfetto":
        return ResponseRule(types=frozenset({JSON, BYTES}), file="trace.pftrace")
    if form == "csv" and (name := _name_of_table(path)) is not None:
        return ResponseRule(types=frozenset({JSON, CSV}), file=f"{name}.csv")
    return PLAIN


def _name_of_table(path: str) -> str | None:
    """Return the name of an analysis, comparison or sweep, which a hub also returns as CSV; None for other paths."""
    if found := _ANALYSIS.fullmatch(path):
        return f"{found['run']}-{found['kind']}"
    if found := _BRANCHES.fullmatch(path):
        return f"{found['kind']}-{found['name']}"
    return None


def _passed(hub: Mapping[str, str], name: str, pattern: re.Pattern[str]) -> dict[str, str]:
    value = hub.get(name, "")
    return {name.lower(): value} if pattern.fullmatch(value) else {}
