"""Numbers that the page can export equal plain torch's, for any layout, by the path that users take.

Ranks over gloo -> a Unix socket -> a real agent -> a real hub -> WebSocket and HTTP. Tolerances are of the numbers'
own precision: exact ones within some roundings of 32 bits, coded ones within half a step of their code.
"""

import asyncio
import contextlib
import functools
import io
import itertools
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import chain_comparison
import httpx
import numpy as np
import pytest
import scope_chain
import scope_session
import websocket_clients
from numpy.typing import NDArray
from pytest_workers import FULL
from scope_model import TinyGptShape
from shared_tls import SHARED_TLS
from websockets.typing import Subprotocol

from megatronapp_analyzer.scope.probes.rank0_client import Rank0Client
from megatronapp_analyzer.scope.views import export_values
from megatronapp_common import frames
from megatronapp_common.frames import Frame, FrameType
from megatronapp_common.names import Env, ExitCode
from megatronapp_common.scope.codes import TensorCode, decode
from megatronapp_common.scope.protocol import SUBPROTOCOL, Tensor, unpack
from megatronapp_common.web.tokens import TokenRole, derive_token

pytestmark = [pytest.mark.asyncio, pytest.mark.torch]
RunRanks = Callable[..., list[Any]]
Array = NDArray[Any]
RUNS = "/api/v1/scope/runs"
LAYERS, HEADS, TILE = 2, 4, 256
DEADLINE_S = 120
ENDED = {"done", "cancelled", "failed"}
AT_ONCE = 16
"""Probes that wait, of the 24 that a page may have."""
SHOWN_HEADS = range(HEADS) if FULL else (0, HEADS - 1)
"""Heads whose exact numbers are requested: two of them are on all ranks."""
CASES = [(layout, variant) for layout in scope_chain.LAYOUTS for variant in scope_chain.VARIANTS]


@functools.cache
def models(run_ranks: RunRanks, root: pathlib.Path, variant: str) -> str:
    """A folder with the model of one variant, shared by all layouts."""
    folder = root / variant
    folder.mkdir()
    run_ranks(1, scope_chain.write_model, str(folder), variant)
    return str(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def folder(run_ranks: RunRanks, root: pathlib.Path, case: tuple[str, str]) -> str:
    return models(run_ranks, root, case[1])


@functools.cache
def truth(run_ranks: RunRanks, folder: str, variant: str, texts: tuple[tuple[int, ...], ...]) -> list[dict[str, Array]]:
    """Layouts that generate the same share a reference."""
    (found,) = run_ranks(1, scope_chain.plain_sites, folder, variant, [list(ids) for ids in texts])
    return list(found)


class Page:
    """View and requests of a page with the controller's role."""

    def __init__(self, hub: Any, client: httpx.AsyncClient, connection: Any) -> None:
        self.hub = hub
        self._client = client
        self._connection = connection
        self._limit = asyncio.Semaphore(AT_ONCE)
        self.frames: list[Frame] = []

    async def until(self, condition: Callable[[Frame], bool]) -> Frame:
        """The next frame that is it; all are kept."""
        while True:
            frame = frames.decode(await asyncio.wait_for(self._connection.recv(), DEADLINE_S))
            self.frames.append(frame)
            if condition(frame):
                return frame

    async def generate(self, request: dict[str, Any]) -> str:
        """Start a run and wait until it is done; repeat the request while the model starts."""
        async with asyncio.timeout(DEADLINE_S):
            while (answer := await self._client.post(RUNS, json=request)).status_code == 503:
                await asyncio.sleep(0.05)
        assert answer.status_code == 201, answer.text
        run = str(answer.json()["run"])
        end = await self.until(lambda frame: frame.header.get("run") == run and frame.header.get("state") in ENDED)
        assert end.header["state"] == "done", end.header["error"]
        return run

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self._client.post(path, json=body)

    async def delete(self, path: str) -> None:
        (await self._client.delete(path)).raise_for_status()

    async def get(self, path: str) -> httpx.Response:
        """An answer, after the probe that brings it."""
        async with self._limit, asyncio.timeout(DEADLINE_S):
            while (answer := await self._client.get(path)).status_code == 202:
                await asyncio.sleep(answer.json()["retryMs"] / 1000)
        assert answer.status_code == 200, (path, answer.text)
        return answer


@contextlib.asynccontextmanager
async def opened(hub: Any) -> AsyncIterator[Page]:
    """A page that may control."""
    bearer = {"Authorization": f"Bearer {derive_token(hub.secret, TokenRole.CONTROLLER)}"}
    url = f"ws://127.0.0.1:{hub.port}/api/v1/scope"
    async with (
        httpx.AsyncClient(base_url=hub.url, headers=bearer, timeout=DEADLINE_S, verify=SHARED_TLS) as client,
        websocket_clients.connect(
            url, additional_headers=bearer, subprotocols=[Subprotocol(SUBPROTOCOL)], compression=None
        ) as connection,
    ):
        yield Page(hub, client, connection)


async def wait_until_ready(ranks: asyncio.Task[Any], condition: Callable[[], bool]) -> None:
    """Wait for something of the ranks; if they end first, that is the failure."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            if ranks.done():
                pytest.fail(f"the ranks ended: {ranks.result()}")
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def chain(
    case: tuple[str, str], *, serve: Any, worker: Any, run_ranks: RunRanks, folder: str, place: pathlib.Path
) -> AsyncIterator[Page]:
    """Connect a rank's model with a page."""
    layout, variant = case
    run_dir, stop = place / "run", place / "stop"
    run_dir.mkdir()
    os.mkfifo(stop)
    address, (world, _) = run_dir / "serve.url", scope_chain.LAYOUTS[layout]
    with serve(place / "state") as hub:
        hub_worker = worker(hub.url)
        hub_worker.environment[str(Env.RUN_DIR.value)] = str(run_dir)
        hub_worker.open_rings()
        arguments = (world, scope_chain.serve_rank, folder, variant, layout, str(stop))
        async with hub_worker.agent() as process:
            ranks = asyncio.create_task(
                asyncio.to_thread(run_ranks, *arguments, environment=dict(hub_worker.environment))
            )
            await wait_until_ready(ranks, address.exists)
            hub.hub.scope.probe_client.client = Rank0Client(
                address.read_text().strip(), derive_token(hub.secret, TokenRole.SERVE)
            )
            await wait_until_ready(ranks, lambda: len(hub.hub.scope.core.publishers.ranks) == world)
            try:
                async with opened(hub) as page:
                    yield page
            finally:
                await asyncio.to_thread(stop.write_text, "stop")
                codes = await ranks
            assert set(codes) == {ExitCode.PREEMPTED}
            hub_worker.close_rings(unlink=True)
            await asyncio.wait_for(process.wait(), DEADLINE_S)


class ChainCase:
    """Run as plain torch computes it, and what the page received of it."""

    def __init__(self, page: Page, run: str, detail: dict[str, Any], sites: list[dict[str, Array]]) -> None:
        self.page = page
        self.run = run
        self.recording = scope_session.Recording(
            shape=TinyGptShape(layers=LAYERS),
            prompts=[list(prompt["ids"]) for prompt in detail["prompts"]],
            generated=[[cell["id"] for cell in sample_cells] for sample_cells in detail["generated"]],
            sites=sites,
            capture=scope_chain.CAPTURE,
        )
        self.sites = sites

    def frames(self, kind: FrameType) -> list[Frame]:
        return [frame for frame in self.page.frames if frame.type == kind and frame.header.get("run") == self.run]

    def tables(self, rows: Iterable[tuple[int, int]]) -> dict[str, Array]:
        """Before any code; PCA apart."""
        rows = list(rows)
        found = [scope_session.tables(self.recording, sample) for sample in range(len(self.sites))]
        names = set(found[0]) - {"pca"}
        return {name: np.stack([found[sample][name][place] for sample, place in rows]) for name in names}


def close(found: Array, expected: Array, what: object) -> None:
    """Compare within some roundings of the largest number."""
    largest = max(1.0, float(np.abs(expected).max()))
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * largest, err_msg=str(what))


def close_coded(tensor: Tensor, expected: Array, what: object) -> None:
    """Compare within half a step of the code."""
    found: Array = tensor.data.astype(np.float64)
    atol = 1e-4 * max(1.0, float(np.abs(expected).max()))
    if tensor.code == "i8":
        assert tensor.scales is not None
        found = decode(TensorCode.I8, tensor.data, tensor.scales)
        off = np.abs(found - expected) - 0.51 * tensor.scales[..., None]
        assert float(off.max()) <= atol, (what, float(off.max()))
        return
    rtol = 6e-4 if tensor.code == "f16" else 1e-4
    if tensor.code == "u8":
        found, atol = found / 255, 0.51 / 255 + 1e-5
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol, err_msg=str(what))


def check_steps(case: ChainCase) -> None:
    """Pixels, norms, measures of heads; candidates, probabilities, entropy, partition sums."""
    steps = case.frames(FrameType.SCOPE_STEP)
    assert [step.header["step"] for step in steps] == list(range(scope_chain.TOKENS))
    for step, frame in enumerate(steps):
        rows = [(sample, place) for sample, place in frame.header["rows"]]
        assert rows == case.recording.rows(step)
        found = {tensor.name: tensor for tensor in unpack(frame)}
        expected = case.tables(rows)
        expected |= {tensor.name: tensor.data for tensor in unpack(scope_session.tokens_frame(case.recording, step))}
        assert set(found) - {"pca"} == set(expected)
        for name, values in expected.items():
            close_coded(found[name], values, (name, step))


def check_greedy(case: ChainCase) -> None:
    """Check that each generated token is the most likely one of plain torch."""
    for ids, generated, sites in zip(case.recording.prompts, case.recording.generated, case.sites, strict=True):
        best = sites["logits"][len(ids) - 1 :]
        chosen = best[np.arange(len(generated)), generated]
        assert (best.max(-1) - chosen <= 1e-4).all()


def check_overviews(case: ChainCase) -> None:
    for frame in case.frames(FrameType.SCOPE_OVERVIEW):
        sample = frame.header["sample"]
        length = len(case.recording.prompts[sample])
        found = {tensor.name: tensor for tensor in unpack(frame)}
        atlas = scope_session.atlas(case.sites[sample]["attention"][:, :, :length, :length])
        near(found.pop("atlas").data, atlas)
        positions = frame.header["positions"]
        assert positions[0] == 0 and len(positions) >= length // 4
        expected = case.tables((sample, place) for place in positions)
        assert set(found) - {"pca"} == set(expected)
        for name, values in expected.items():
            close_coded(found[name], values, (name, sample))
    assert len(case.frames(FrameType.SCOPE_OVERVIEW)) == len(case.recording.prompts)


def near(found: Array, codes: Array) -> None:
    """Codes of probabilities, where a rounding may fall to the other side."""
    assert found.shape == codes.shape
    off = np.abs(found.astype(int) - codes.astype(int))
    assert off.max(initial=0) <= 1 and (off > 0).mean() < 0.02


def check_rows(case: ChainCase) -> None:
    """Rows of pinned heads, as they stream."""
    seen_heads = set()
    for frame in case.frames(FrameType.SCOPE_ROWS):
        (flat,) = unpack(frame)
        ends = np.cumsum([0, *frame.header["keys"]])
        for key, (first, end) in zip(frame.header["rows"], itertools.pairwise(ends), strict=True):
            sample, layer, head, place = key
            expected = case.sites[sample]["attention"][layer, head, place, : place + 1]
            near(flat.data[first:end], scope_session.codes_of(expected))
            seen_heads.add(tuple(key))
    pins = [(pin["layer"], pin["head"]) for pin in scope_chain.CAPTURE["pinned"]]
    rows = [row for step in range(1, scope_chain.TOKENS) for row in case.recording.rows(step)]
    assert seen_heads == {(sample, *pin, place) for sample, place in rows for pin in pins}


def places(site: str, key_heads: int) -> list[str]:
    """Return the places at which a site is requested."""
    if site in export_values.LAYERLESS:
        return [""]
    if site not in export_values.HEADED:
        return [f"&layer={layer}" for layer in range(LAYERS)]
    heads = range(key_heads) if site in {"k", "v"} else SHOWN_HEADS
    return [f"&layer={layer}&head={head}" for layer in range(LAYERS) for head in heads]


def expected_of(sites: dict[str, Array], site: str, where: str) -> Array:
    found = sites[site] if site == "attention" else np.moveaxis(sites[site], 0, -2)
    for condition in where.split("&")[1:]:
        found = found[int(condition.partition("=")[2])]
    return found


async def check_values(case: ChainCase) -> None:
    """Exact numbers: all sites, layers and heads of the short sample; the last ones, in all forms, of the long one."""
    key_heads = case.sites[0]["k"].shape[2]

    async def check_site(site: str, sample: int, where: str, suffix: str = "") -> None:
        path = f"{RUNS}/{case.run}/values/{site}?sample={sample}{where}{suffix and '&rotary=before'}&format="
        expected = expected_of(case.sites[sample], site + suffix, where)
        close(np.load(io.BytesIO((await case.page.get(path + "npy")).content)), expected, (site, where))
        if sample == 1:
            answered = (await case.page.get(path + "json")).json()
            close(np.array(answered["values"]), expected, (site, where, "json"))
            lines = (await case.page.get(path + "csv")).text.splitlines()[1:]
            close(np.array([list(map(float, line.split(",")[1:])) for line in lines]), expected, (site, where, "csv"))

    async with asyncio.TaskGroup() as group:
        for site in sorted(export_values.SITES):
            every = places(site, key_heads)
            group.create_task(check_site(site, 1, every[-1]))
            for where in every:
                group.create_task(check_site(site, 0, where))
                if site in {"q", "k"}:
                    group.create_task(check_site(site, 0, where, " before"))


async def check_tiles(case: ChainCase) -> None:
    """All tiles of the heads of the long sample, at level 0 and 1."""

    async def check_tile(layer: int, head: int, level: int, q: int, k: int) -> None:
        answer = await case.page.get(f"{RUNS}/{case.run}/attention/1/{layer}/{head}/{level}/{q}/{k}")
        side, span = 1 << level, TILE << level
        codes = scope_session.codes_of(case.sites[1]["attention"][layer, head])
        part = codes[q * span : (q + 1) * span, k * span : (k + 1) * span]
        padded = np.pad(part, [(0, -size % side) for size in part.shape])
        pooled = padded.reshape(padded.shape[0] // side, side, padded.shape[1] // side, side).max(axis=(1, 3))
        shape = [int(size) for size in answer.headers["X-Tile-Shape"].split(",")]
        near(np.frombuffer(answer.content, np.uint8).reshape(shape), pooled)

    async with asyncio.TaskGroup() as group:
        for layer, head in itertools.product(range(LAYERS), SHOWN_HEADS):
            for place in ((0, 0, 0), (0, 1, 0), (0, 1, 1), (1, 0, 0)):
                group.create_task(check_tile(layer, head, *place))


def projected(case: ChainCase, rows: Iterable[Iterable[int]]) -> Array:
    """Coordinates in the hub's basis, [rows, layers, 8]."""
    bases = case.page.hub.hub.scope.pca.bases
    residual = np.stack([case.sites[sample]["residual"][place] for sample, place in rows]).astype(np.float64)
    every = [(residual[:, layer] - bases[layer].mean) @ bases[layer].axes.T for layer in range(LAYERS)]
    return np.stack(every, axis=1)


def check_basis(case: ChainCase) -> None:
    """Axes at right angles, and the shares of the variance that plain torch's states of the first prompt have."""
    for layer, basis in case.page.hub.hub.scope.pca.bases.items():
        rows = case.sites[0]["residual"][: len(case.recording.prompts[0]), layer].astype(np.float64)
        close(basis.mean, rows.mean(axis=0), ("mean", layer))
        np.testing.assert_allclose(basis.axes @ basis.axes.T, np.eye(len(basis.axes)), atol=1e-6)
        variance = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False) ** 2
        close(basis.explained, (variance / variance.sum())[: len(basis.axes)], ("explained", layer))
        spread = ((rows - rows.mean(axis=0)) @ basis.axes.T).var(axis=0) * len(rows)
        close(spread / variance.sum(), basis.explained, ("along the axes", layer))


def check_pca(case: ChainCase) -> None:
    """Coordinates that stream with the steps, and those of the prompt."""
    check_basis(case)
    checked = 0
    for frame in case.frames(FrameType.SCOPE_STEP):
        for tensor in unpack(frame):
            if tensor.name == "pca":
                close_coded(tensor, projected(case, frame.header["rows"]), ("pca", frame.header["step"]))
                checked += 1
    assert checked == scope_chain.TOKENS
    for frame in case.frames(FrameType.SCOPE_OVERVIEW):
        (tensor,) = [tensor for tensor in unpack(frame) if tensor.name == "pca"]
        rows = [(frame.header["sample"], place) for place in frame.header["positions"]]
        close_coded(tensor, projected(case, rows), "pca of a prompt")


async def check_refit(case: ChainCase) -> None:
    """New axes, and where rows lie on them."""
    answer = await case.page.post(f"{RUNS}/{case.run}/pca", {"layers": list(range(LAYERS)), "refit": True})
    assert answer.status_code in {200, 202}, answer.text
    frame = await case.page.until(lambda frame: frame.header.get("fitted") == "refit")
    assert (frame.type, frame.header["run"]) == (FrameType.SCOPE_PCA, case.run)
    (points,) = unpack(frame)
    close(points.data.astype(np.float64), projected(case, frame.header["rows"]), "refit")


WHOLE: dict[str, Callable[..., Array]] = {"mean": np.mean, "data.max(dim=-1)": np.max, "std": np.std}


async def check_whole_axes(case: ChainCase) -> None:
    """One number for all heads and for all of an MLP's width, however many ranks have parts of it; of a gated one two.

    What cannot be computed so is refused, and nothing happens.
    """
    for reducer, plain in WHOLE.items():
        expressions = {"qkv": reducer, "mlp": reducer}
        capture = {
            "pixels": {"qkv": 3, "mlp": 1},
            "expression": expressions,
            "states": {"pca": False, "attention": False},
        }
        run = await case.page.generate(scope_chain.request_of(2) | {"capture": capture})
        shown = [frame for frame in case.page.frames if frame.header.get("run") == run]
        assert not [frame for frame in shown if frame.type == FrameType.SCOPE_GAP]
        checked = 0
        for frame in shown:
            if frame.type not in {FrameType.SCOPE_STEP, FrameType.SCOPE_OVERVIEW}:
                continue
            header = frame.header
            rows = header["rows"] if "rows" in header else [(header["sample"], place) for place in header["positions"]]
            for tensor in unpack(frame):
                if tensor.name in {"q", "k", "v", "mlp1", "mlp2"}:
                    check_whole(tensor, np.stack([case.sites[s][tensor.name][place] for s, place in rows]), plain)
                    checked += 1
        assert checked == 5 * (2 + len(case.sites)), reducer
    answer = await case.page.post(RUNS, scope_chain.request_of(2) | {"capture": capture | {"expression": NO_WHOLE}})
    assert answer.status_code == 422 and "ask for 2 pixels" in answer.text, answer.text


NO_WHOLE = {"qkv": "data[:2].mean()", "mlp": "mean"}


def check_whole(tensor: Tensor, vectors: Array, plain: Callable[..., Array]) -> None:
    """A code of one number loses nothing of it; of two the smaller one loses what the larger one's step is."""
    assert tensor.scales is not None
    flat = vectors.reshape(*vectors.shape[:2], tensor.data.shape[-1], -1).astype(np.float64)
    assert tensor.data.shape == flat.shape[:3] and tensor.data.shape[-1] <= 1 + (tensor.name == "mlp1")
    expected, found = plain(flat, axis=-1), decode(TensorCode.I8, tensor.data, tensor.scales)
    step = tensor.scales[..., None] * (0.51 if tensor.data.shape[-1] > 1 else 0)
    atol = 1e-5 * max(1.0, float(np.abs(flat).max()))
    assert (np.abs(found - expected) <= step + atol + 1e-4 * np.abs(expected)).all(), tensor.name


async def check_lens(case: ChainCase) -> None:
    """The last layer's lens is the model's own distribution; the numbers of the others are tested on the ranks."""
    logits = case.sites[0]["logits"].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    lens = (await case.page.get(f"{RUNS}/{case.run}/lens?top=4&layers=0-{LAYERS - 1}")).json()
    assert lens["positions"] == list(range(len(logits)))
    close(np.array(lens["logprobs"][-1]), -np.sort(-logs, axis=-1)[:, :4], "lens")
    following = [*case.recording.prompts[0][1:], *case.recording.generated[0]]
    close(np.array(lens["targetLogprob"][-1]), logs[np.arange(len(logits)), following], "lens of the text")
    found = (await case.page.get(f"{RUNS}/{case.run}/attribution?position=4")).json()
    layers = sum(float(np.sum(found[name])) for name in ("heads", "attentionBias", "mlp", "mlpBias"))
    total = np.array(found["embedding"] + layers + found["constant"])
    close(total, np.array(logits[4, following[4]]), "sum of all contributions")
    scores = (await case.page.get(f"{RUNS}/{case.run}/heads")).json()["values"]
    attention = case.sites[0]["attention"].astype(np.float64)
    close(np.array(scores[1]), attention[:, :, 1:, 0].mean(-1), "scores of the first token")


@pytest.mark.full("a model that is cut in both ways has all parts of the chain", but=("TP2 x PP2-GQA",))
@pytest.mark.parametrize("case", CASES, ids=["-".join(case) for case in CASES])
async def test_every_number(
    case: tuple[str, str], *, serve: Any, worker: Any, run_ranks: RunRanks, folder: str, tmp_path: pathlib.Path
) -> None:
    async with chain(case, serve=serve, worker=worker, run_ranks=run_ranks, folder=folder, place=tmp_path) as page:
        await page.generate(scope_chain.request_of(1))
        await page.until(lambda frame: frame.type == FrameType.SCOPE_PCA)
        await asyncio.wait_for(scope_chain.until_ranks_project(page.hub.hub.scope.pca), DEADLINE_S)
        run = await page.generate(scope_chain.request_of())
        detail = (await page.get(f"{RUNS}/{run}")).json()
        texts = tuple(
            (*prompt["ids"], *(cell["id"] for cell in generated[:-1]))
            for prompt, generated in zip(detail["prompts"], detail["generated"], strict=True)
        )
        sites = await asyncio.to_thread(truth, run_ranks, folder, case[1], texts)
        found = ChainCase(page, run, detail, sites)
        assert not found.frames(FrameType.SCOPE_GAP)
        check_greedy(found)
        check_steps(found)
        check_overviews(found)
        check_rows(found)
        check_pca(found)
        await check_values(found)
        await check_tiles(found)
        await check_refit(found)
        await check_lens(found)
        await chain_comparison.check_comparison(page)
        await chain_comparison.check_sweep(page)
        await chain_comparison.check_client(page)
        if case[0].startswith("TP2"):
            await check_whole_axes(found)
