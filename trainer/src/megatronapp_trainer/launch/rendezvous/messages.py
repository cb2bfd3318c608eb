"""Messages between launchers, independent of sockets.

A connection begins with a greeting of both sides, `{"protocol", "nonce"}`. From then on every line is a JSON object
`{"body": text, "mac": hex}`: the body is JSON, the code is HMAC-SHA256 over direction, running number and body, keyed
by HMAC-SHA256(gather token, both nonces). So the secret is never sent, a wrong one is detected by the first message,
and lines cannot be replayed, reordered or reflected. A refusal may be sent without a code, because a refused peer may
not be able to check it; such a refusal costs no more than the connection, and only a sealed one can be final.
"""

import dataclasses
import hashlib
import hmac
import ipaddress
import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeVar

from megatronapp_common.names import ExitCode
from megatronapp_trainer.errors import MessageError, RefusedError

PROTOCOL = 1
COORDINATOR = 0
"""Index of the worker that gathers the others."""
NONCE_BYTES = 16
JOIN_S = 10.0
"""Seconds after which a connection that has not joined is closed."""
MAX_LINE_BYTES = 8 * 1024 * 1024
"""Limit of a line; a table of 16,384 ranks has about 1 MiB."""

MAX_GREETING_BYTES = 1024
"""Limit of a greeting, whose sender is not authenticated yet."""

Side = Literal["coordinator", "worker"]
T = TypeVar("T", int, str)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Identity, address and ports of a worker that joins."""

    uid: str
    attempt: int
    index: int
    address: str
    node: str
    num_ranks: int
    port: int
    """Reserved port, for torch's store if rank 0 runs here."""
    topology: str = ""
    """Values of the node's topology labels, separated by commas."""
    probe_port: int = 0
    """Port at which the worker answers probes of the others; 0: no port."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndNotice:
    """End of a worker, or the problem that will end it."""

    worker: int
    code: int
    rank: int | None = None
    message: str = ""
    early: bool = False
    """True if it was asked to stop before its ranks reached a step boundary: the others would wait for them in vain."""
    reason: str = ""
    """CamelCase reason of its outcome."""
    signal: int | None = None
    """Signal that ended its rank."""
    log: str = ""
    """Last lines of the rank's log; empty if the cause is on another worker."""

    @property
    def orderly(self) -> bool:
        """Return True if the others may continue."""
        return self.code in (ExitCode.OK, ExitCode.PREEMPTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopNotice:
    """Request to stop, which a worker got; the ranks of all workers stop together, at a step boundary."""

    worker: int


Notices = EndNotice | StopNotice
"""Notices that launchers exchange once they are a gang."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGang:
    """The gang that a coordinator gathers."""

    uid: str
    attempt: int
    proc_per_node: tuple[int, ...]
    in_place: bool = False
    """True if launchers outlive their attempt: one that is late gets an order to continue, and tries again then."""


def check_join(join: JoinRequest, expected: ExpectedGang, joined: Collection[int]) -> None:
    """Raise RefusedError with the reason why `join` may not enter.

    A worker that has joined already may try again: its earlier connection may be dead, and its end not detected yet. A
    true duplicate is refused for as long as the first one is connected.
    """
    if join.uid != expected.uid:
        raise RefusedError(f"this is job {expected.uid}, not {join.uid}", final=False)
    if join.attempt != expected.attempt:
        late = join.attempt < expected.attempt
        age = "late: its attempt is over" if late else "early: this gang is about to end"
        final = late and not expected.in_place
        raise RefusedError(f"attempt {join.attempt} joins attempt {expected.attempt}, {age}", final=final)
    if join.index >= len(expected.proc_per_node):
        raise RefusedError(f"index {join.index} in a gang of {len(expected.proc_per_node)}", final=True)
    if join.index in joined:
        raise RefusedError(f"worker {join.index} is already here", final=join.index == COORDINATOR)
    if join.num_ranks != expected.proc_per_node[join.index]:
        expected_ranks = expected.proc_per_node[join.index]
        raise RefusedError(f"worker {join.index} brings {join.num_ranks} ranks, not {expected_ranks}", final=True)
    _check_address(join.address)


def _check_address(address: str) -> None:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise RefusedError(f"the address {address!r} is not one of IPv4", final=True) from None


def new_nonce() -> str:
    """Return a random number in hex, for one connection."""
    return secrets.token_hex(NONCE_BYTES)


def encode(document: Mapping[str, Any]) -> bytes:
    """Encode a document as one line."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes, *, sealed: bool = False) -> dict[str, Any]:
    """Return the object of one line.

    Raises RefusedError if it is a refusal, MessageError if it is not an object.
    """
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MessageError("a line that is not JSON") from error
    if not isinstance(document, dict):
        raise MessageError("a line that is not an object")
    if "refused" in document:
        raise RefusedError(str(document["refused"]), final=sealed and document.get("final") is True)
    return document


def greeting(nonce: str) -> bytes:
    """Return the first line of either side."""
    return encode({"protocol": PROTOCOL, "nonce": nonce})


def parse_greeting(line: bytes) -> str:
    """Return the nonce of the other side.

    Raises MessageError for another protocol.
    """
    document = decode(line)
    nonce = document.get("nonce")
    if document.get("protocol") != PROTOCOL or not isinstance(nonce, str) or len(nonce) != 2 * NONCE_BYTES:
        raise MessageError(f"not a launcher of protocol {PROTOCOL}")
    return nonce


def refusal_to_json(error: RefusedError) -> dict[str, Any]:
    """Return the document that a refused worker gets."""
    return {"refused": error.reason, "final": error.final}


class ChannelCipher:
    """Seals and opens the lines of one connection."""

    def __init__(self, token: str, *, side: Side, coordinator_nonce: str, worker_nonce: str) -> None:
        text = f"{coordinator_nonce}:{worker_nonce}".encode()
        self._key = hmac.digest(token.encode(), text, hashlib.sha256)
        self._side: Side = side
        self._other: Side = "worker" if side == "coordinator" else "coordinator"
        self._sent = 0
        self._received = 0

    @property
    def trusted(self) -> bool:
        """Return True if the other side has proved that it knows the token."""
        return self._received > 0

    def seal(self, document: Mapping[str, Any]) -> bytes:
        """Return the next line to send."""
        body = json.dumps(document, separators=(",", ":"))
        mac = self._code(self._side, self._sent, body)
        self._sent += 1
        return encode({"body": body, "mac": mac})

    def open(self, line: bytes) -> dict[str, Any]:
        """Return the body of the next line.

        Raises RefusedError for a refusal, MessageError for a line of another key.
        """
        document = decode(line)
        body, mac = document.get("body"), document.get("mac")
        if not isinstance(body, str) or not isinstance(mac, str):
            raise MessageError("a message without its code")
        if not hmac.compare_digest(mac.encode(), self._code(self._other, self._received, body).encode()):
            raise MessageError("wrong secret")
        self._received += 1
        return decode(body.encode(), sealed=True)

    def _code(self, sender: Side, number: int, body: str) -> str:
        return hmac.new(self._key, f"{sender}:{number}:{body}".encode(), hashlib.sha256).hexdigest()


def join_to_json(join: JoinRequest) -> dict[str, Any]:
    """Return the body of the first sealed line of a worker."""
    return {"type": "join", **dataclasses.asdict(join)}


def join_from_json(document: Mapping[str, Any]) -> JoinRequest:
    """Parse a join.

    Raises MessageError if a field is missing or of another type.
    """
    if document.get("type") != "join":
        raise MessageError("the first message must be a join")
    return JoinRequest(
        uid=_field(document, "uid", str),
        attempt=_field(document, "attempt", int),
        index=_field(document, "index", int),
        address=_field(document, "address", str),
        node=_field(document, "node", str),
        num_ranks=_field(document, "num_ranks", int),
        port=_field(document, "port", int),
        topology=_field(document, "topology", str),
        probe_port=_field(document, "probe_port", int),
    )


def notice_to_json(notice: Notices) -> dict[str, Any]:
    """Return the body of a line with a notice."""
    return {"type": "stop" if isinstance(notice, StopNotice) else "notice", **dataclasses.asdict(notice)}


def notice_from_json(document: Mapping[str, Any]) -> Notices:
    """Parse a notice.

    Raises MessageError if a field is missing or of another type.
    """
    kind = document.get("type")
    if kind == "stop":
        return StopNotice(worker=_field(document, "worker", int))
    if kind != "notice":
        raise MessageError(f"unexpected message of type {kind!r}")
    return EndNotice(
        worker=_field(document, "worker", int),
        code=_field(document, "code", int),
        rank=None if document.get("rank") is None else _field(document, "rank", int),
        message=_field(document, "message", str),
        early=document.get("early") is True,
        reason=str(document.get("reason") or ""),
        signal=None if document.get("signal") is None else _field(document, "signal", int),
        log=str(document.get("log") or ""),
    )


def progress_to_json(progress: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a line with a worker's progress document, for worker 0."""
    return {"type": "progress", "page": dict(progress)}


def progress_of(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the progress document, or None if the line has none."""
    progress = document.get("page")
    return dict(progress) if document.get("type") == "progress" and isinstance(progress, dict) else None


def _field(document: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = document.get(name)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        raise MessageError(f"the field {name} is {value!r}")
    return value
