"""Another server of this machine, which stores the cookies that browsers send to it, and shows them a given page."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Spy:
    """Requests that it has seen, and the page that it shows."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookies: list[str | None] = []
        self.page = "<!doctype html>"


@contextlib.contextmanager
def spying(address: str = "127.0.0.1", port: int = 0) -> Iterator[Spy]:
    """Start one at this port, or a free one, and stop it at the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kept.cookies.append(self.headers.get("Cookie"))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(kept.page.encode())

        def log_message(self, format: str, *_: object) -> None:
            """Write no log lines."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

    server = Server((address, port), Handler)
    kept = Spy(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield kept
    server.shutdown()
    server.server_close()
    thread.join()
