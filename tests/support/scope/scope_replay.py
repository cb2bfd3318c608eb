"""Program `megatronapp scope replay` as a separate process."""

import contextlib
import dataclasses
import pathlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

DEADLINE_S = 240.0


@dataclasses.dataclass(frozen=True)
class Replay:
    """A session that is served."""

    url: str
    token: str
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def replaying(file: pathlib.Path, log: pathlib.Path, *, speed: str = "all", port: int = 0) -> Iterator[Replay]:
    """Serve a session until the block ends. Raises TimeoutError if it does not start."""
    command = [sys.executable, "-m", "megatronapp_common.cli", "scope", "replay", str(file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--speed", speed, "--port", str(port)], stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        token, url = _address(log, process)
        yield Replay(url=url, token=token, process=process)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _address(log: pathlib.Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    end = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text(encoding="utf-8")
        token, url = re.search(r"token for later: (\w+)", text), re.search(r"(http://[\d.:]+)/", text)
        if token and url:
            return token[1], url[1]
        pause.wait(0.05)
    raise TimeoutError(f"the replay did not come up: {log.read_text(encoding='utf-8')}")
