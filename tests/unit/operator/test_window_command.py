"""`megatronapp trace window`: a new window or the end of one, sent to a real server."""

import argparse
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatronapp_operator.cli.inject import delete
from megatronapp_operator.cli.windows.local import check_cancel
from megatronapp_operator.errors import HubError, OperatorError


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"cancel": "window-1", "from_step": None, "ranks": None} | changes))


def test_flags_of_a_new_window_next_to_cancel_are_refused() -> None:
    check_cancel(arguments())
    check_cancel(arguments(cancel=None, from_step=3, ranks=[1]))
    with pytest.raises(OperatorError, match="--from-step and --ranks describe a new window, and --cancel ends one"):
        check_cancel(arguments(from_step=0, ranks=[1]))


@contextlib.contextmanager
def server(status: int) -> Iterator[tuple[str, list[str]]]:
    """Answer DELETE with this status; the requests that were received."""
    received: list[str] = []

    class DeleteHandler(BaseHTTPRequestHandler):
        def do_DELETE(self) -> None:
            received.append(f"{self.path} {self.headers['Authorization']}")
            problem = {"code": "no-such-window", "message": "there is no window 'window-9'", "hint": "All are over."}
            body = b"" if status == 204 else json.dumps(problem).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_: object) -> None:
            """Write no log lines."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), DeleteHandler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", received
    finally:
        running.shutdown()
        running.server_close()
        thread.join()


def test_a_window_is_cancelled_or_refused_with_the_reason() -> None:
    with server(204) as (url, received):
        delete(f"{url}/api/v1/trace/windows/window-1", token="t")
        assert received == ["/api/v1/trace/windows/window-1 Bearer t"]
    with server(404) as (url, _), pytest.raises(HubError, match="there is no window 'window-9'; all are over"):
        delete(f"{url}/api/v1/trace/windows/window-9", token="t")
