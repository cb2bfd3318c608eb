"""Decoding of the API server's JSON: whole objects, pods without what the operator never reads, and watch events.

Half of a pod's JSON are its managed fields, and most of the rest is its spec: a decoder that has types skips both
without making objects of them, in a tenth of the time.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from megatronapp_common.job.load import is_deeper
from megatronapp_operator.backends.kubernetes.client.errors import ApiError, UnavailableError, api_error_for
from megatronapp_operator.backends.kubernetes.client.resources import Object

T = TypeVar("T")
JsonText = bytes | msgspec.Raw
Decoder = Callable[[JsonText], Object]
"""Decodes an answer to an object. Raises UnavailableError, ApiError."""
MAX_DEPTH = 100
"""Levels of an answer that are decoded if it has more than Python's recursion limit allows."""
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)


class _Fields(msgspec.Struct, omit_defaults=True):
    """Part of an object, of which absent fields stay absent."""


class _Container(_Fields):
    name: str
    restartPolicy: str | None = None


class _Spec(_Fields):
    containers: list[_Container] = []
    initContainers: list[_Container] | None = None
    nodeName: str | None = None


class _Metadata(_Fields):
    name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    resourceVersion: str | None = None
    creationTimestamp: str | None = None
    deletionTimestamp: str | None = None
    deletionGracePeriodSeconds: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    ownerReferences: list[dict[str, Any]] | None = None
    finalizers: list[str] | None = None


class _Pod(_Fields):
    metadata: _Metadata
    kind: str | None = None
    spec: _Spec | None = None
    status: Any = None


class _PodPage(_Fields):
    metadata: dict[str, Any]
    items: list[_Pod] | None = None


class _RawPage(_Fields):
    metadata: dict[str, Any]
    items: list[msgspec.Raw] | None = None


class _Version(msgspec.Struct):
    resourceVersion: str


class _Versioned(msgspec.Struct):
    metadata: _Version


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_OBJECT = msgspec.json.Decoder()
_EVENT = msgspec.json.Decoder(_Event)
_VERSIONED = msgspec.json.Decoder(_Versioned)
_POD = msgspec.json.Decoder(_Pod)
_POD_PAGE = msgspec.json.Decoder(_PodPage)
_RAW_PAGE = msgspec.json.Decoder(_RawPage)


@dataclasses.dataclass(frozen=True, slots=True)
class PodEvents:
    """Events of a watch of pods, in their order."""

    events: Sequence[tuple[str, Object]]
    """Type (ADDED, MODIFIED, DELETED) and pod, as `decode_pod` gives it."""
    version: str | None
    """Resource version of the last of them, or of a bookmark after them; None without any."""


class LineBuffer:
    """Lines of a stream that arrives in parts."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def decode_object(data: JsonText) -> Object:
    """Decode a whole object."""
    try:
        found = _decode(_OBJECT, data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnavailableError("the answer is not from an API server") from error
    if not isinstance(found, dict):
        raise ApiError("the server did not answer with an object")
    return found


def decode_pod(data: JsonText) -> Object:
    """Decode what `pod_record.read_pod` reads of a pod; of another kind of object, kind and metadata."""
    return _builtins(_POD, data)


def decode_pod_page(data: JsonText) -> Object:
    """Decode a page of a list of pods, each as `decode_pod` does, without those that cannot be decoded."""
    with contextlib.suppress(UnavailableError):
        return _builtins(_POD_PAGE, data)
    try:
        page, pods = _decode(_RAW_PAGE, data), list[Object]()
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnavailableError(f"the answer is not from an API server: {error}") from error
    for item in page.items or ():
        with contextlib.suppress(UnavailableError):
            pods.append(decode_pod(item))
    return {"metadata": page.metadata, "items": pods}


def decode_pod_events(lines: Sequence[bytes]) -> PodEvents:
    """Decode lines of a watch of pods. Raises the ApiError that an event of type ERROR describes."""
    events: list[tuple[str, Object]] = []
    version = None
    for line in lines:
        try:
            event = _decode(_EVENT, line)
            if event.type == "ERROR":
                status = decode_object(event.object)
                raise api_error_for(int(status.get("code") or 0), status, "watch")
            version = _VERSIONED.decode(event.object).metadata.resourceVersion
        except (msgspec.DecodeError, RecursionError) as error:
            raise UnavailableError(f"a watch event is not from an API server: {error}") from error
        if event.type != "BOOKMARK":
            with contextlib.suppress(UnavailableError):  # a pod that cannot be read is none of ours
                events.append((event.type, decode_pod(event.object)))
    return PodEvents(events, version)


def bound_depth(data: bytes) -> bytes:
    """Return JSON with null for each object and array that is nested deeper than MAX_DEPTH, for other decoders.

    What is no JSON is returned unchanged.
    """
    try:
        found = _OBJECT.decode(data)
    except RecursionError:
        return _shallow(data)
    except msgspec.DecodeError:
        return data
    return _shallow(data) if is_deeper(found, MAX_DEPTH) else data


def _builtins(decoder: msgspec.json.Decoder[Any], data: JsonText) -> Object:
    try:
        found: Object = msgspec.to_builtins(_decode(decoder, data))
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnavailableError(f"the answer is not from an API server: {error}") from error
    return found


def _decode(decoder: msgspec.json.Decoder[T], data: JsonText) -> T:
    """Decode JSON of any depth. Raises msgspec.DecodeError.

    An API server stores managed fields as deep as a client has written them, up to some ten thousand levels.
    """
    try:
        return decoder.decode(data)
    except RecursionError:
        return decoder.decode(_shallow(bytes(data)))


def _shallow(data: bytes) -> bytes:
    """Return JSON with null for each object and array that is nested deeper than MAX_DEPTH."""
    parts, depth, end = list[bytes](), 0, 0
    for token in _TOKEN.finditer(data):
        if token[0] in {b"{", b"["}:
            depth += 1
            if depth == MAX_DEPTH + 1:
                parts += data[end : token.start()], b"null"
        elif token[0] in {b"}", b"]"}:
            if depth == MAX_DEPTH + 1:
                end = token.end()
            depth -= 1
    return b"".join([*parts, data[end:]])
