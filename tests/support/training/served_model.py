"""A tiny model with its tokenizer in a folder, and a server in front of it, as processes of their own.

`python` is the command of an interpreter: `forkserver.python()` starts a program without seconds of imports.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx
from shared_tls import SHARED_TLS

from megatronapp_common.web.tokens import TokenRole, derive_token, new_secret

DEADLINE_S = 240.0
VOCABULARY = 300
POSITIONS = 2048
TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TEXTS = ["hello world, this is a small text about whales and ships. " * 20, "né à Paris, 日本語 " * 10]


def write_model(folder: str) -> None:
    """A tokenizer, a chat template, and a checkpoint after one step on random tokens. Runs where torch is imported."""
    from megatronapp_trainer.data.tokenizer import train
    from megatronapp_trainer.pretrain import main

    train(TEXTS, VOCABULARY).backend.save(f"{folder}/tokenizer.json")
    pathlib.Path(folder, "chat_template.jinja").write_text(TEMPLATE)
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    steps = "--micro-batch-size 1 --train-iters 1 --lr 0.001 --eval-iters 0 --mock-data"
    flags = f"{shape} {steps} --max-position-embeddings {POSITIONS} --vocab-size {VOCABULARY} --save {folder}/saved"
    code = main(flags.split())
    assert code == 0


class ModelServer:
    """Process of `megatronapp_trainer.serve`: one rank with its secret."""

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, *arguments: str, python: Sequence[str]) -> None:
        folder.mkdir(exist_ok=True)
        self.secret = new_secret()
        (folder / "secret").write_text(self.secret)
        self.address = folder / "serve.url"
        self.log = folder / "log"
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "MEGATRONAPP_SECRET_FILE": str(folder / "secret"),
            "MEGATRONAPP_RUN_DIR": str(folder),
            "MEGATRONAPP_JOB": "tiny",
        }
        command = [*python, "-m", "megatronapp_trainer.serve", "--load", str(model / "saved"), "--port", "0"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, *arguments], env=os.environ | environment, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def url(self) -> str:
        """Address of its API."""
        return self.address.read_text().strip()

    def client(self, token: str | None = None) -> httpx.Client:
        """Return a client with the key, unless another is given."""
        key = derive_token(self.secret, TokenRole.SERVE) if token is None else token
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=DEADLINE_S, trust_env=False, verify=SHARED_TLS)

    def until_ready(self) -> None:
        """Wait until it takes requests."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._ready():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError, httpx.HTTPError), self.client() as client:
            return client.get("/readyz").is_success
        return False


@contextlib.contextmanager
def started(
    folder: pathlib.Path, model: pathlib.Path, *arguments: str, python: Sequence[str] = (sys.executable,)
) -> Iterator[ModelServer]:
    """Start a server, wait until it is ready, and stop it at the end."""
    server = ModelServer(folder, model, *arguments, python=python)
    try:
        server.until_ready()
        yield server
    finally:
        server.process.kill()
        server.process.wait()
