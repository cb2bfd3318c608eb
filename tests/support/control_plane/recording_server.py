"""Another server of this machine, which stores the cookies that browsers send to it, and shows them a given page."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RecordingServer:
    """Requests that it has seen, and the page that it shows."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookies: list[str | None] = []
        self.page = "<!doctype html>"


@contextlib.contextmanager
def running_server(address: str = "127.0.0.1", port: int = 0) -> Iterator[RecordingServer]:
    """Start one at this port, or a free one, and stop it at the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            recorder.cookies.append(self.headers.get("Cookie"))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(recorder.page.encode())

        def log_message(self, format: str, *_: object) -> None:
            """Write no log lines."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    server = Server((address, port), Handler)
    recorder = RecordingServer(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield recorder
    server.shutdown()
    server.server_close()
    thread.join()
