"""Noise of simulated machines: what makes healthy ranks, nodes and spans differ from step to step.

Slowness that lasts for some steps is autocorrelated in reality, and a detector that takes consecutive steps for
independent fails on it. So the pace of a rank is the sum of a constant, of a process of first order (`rank_sigma`,
`rank_memory`), and of a process for each node and for the job; or of a constant and of blocks cut from a recording.
"""

import dataclasses
import pathlib

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """Noise of recorded steps (`bench/detect_noise.py --write`), as logarithms of durations."""

    pace: Floats
    """Pace of a rank around its own mean and that of the job, [row, step]; a row is a rank in consecutive steps."""
    job: Floats
    """Pace of the job, which all ranks have in common, [row, step]."""
    spans: Floats
    """Single spans around the median of their rank and step, in any order."""

    @classmethod
    def read(cls, path: pathlib.Path) -> "Recording":
        """Read a file of `write`."""
        with np.load(path) as stored:
            return cls(**{field.name: stored[field.name].astype(np.float64) for field in dataclasses.fields(cls)})

    def write(self, path: pathlib.Path) -> None:
        """Write a compressed file, in single precision."""
        with path.open("wb") as stream:  # savez would add a suffix to the name
            np.savez_compressed(
                stream,
                **{field.name: getattr(self, field.name).astype(np.float32) for field in dataclasses.fields(self)},
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseModel:
    """Sizes of the noise: sigmas are of logarithms of durations, times in seconds."""

    name: str
    device: bool
    """True for device clocks: spans carry the lead of the host instead of a run-queue delay."""
    body: float = 0.0
    """Sigma of each span by itself."""
    bias: float = 0.0
    """Sigma of a constant difference between ranks, as no two devices are equally fast."""
    rank_sigma: float = 0.0
    rank_memory: float = 0.0
    """Sigma of the slow part of a rank's pace, and its correlation from step to step."""
    node_sigma: float = 0.0
    node_memory: float = 0.0
    job_sigma: float = 0.0
    job_memory: float = 0.0
    tail_fraction: float = 0.0
    tail_factor: float = 0.0
    """Share of spans that last longer, by an exponential with this mean."""
    hiccup_fraction: float = 0.0
    hiccup_s: float = 0.0
    """Share of steps in which a rank is held up once (garbage collection, a daemon), and the mean of the delay."""
    queue_fraction: float = 0.0
    queue_s: float = 0.0
    """Share of spans with a run-queue delay that the record shows, and its mean."""
    delivery_s: float = 20e-6
    delivery_fraction: float = 0.0
    delivery_tail_s: float = 0.0
    gap_s: float = 50e-6
    launch: float = 0.3
    """Time in which a host launches a span's kernels, over their time on the device."""
    recorded: Recording | None = None
    """In place of `body`, of tails, and of the processes of ranks, nodes and the job."""
    block: int = 32
    """Steps of the blocks that are cut from a recording."""


GPU = NoiseModel(
    name="gpu", device=True, body=0.017, bias=0.004, rank_sigma=0.004, rank_memory=0.93, node_sigma=0.002,
    node_memory=0.95, job_sigma=0.008, job_memory=0.993, tail_fraction=0.002, tail_factor=0.3, hiccup_fraction=0.004,
    hiccup_s=0.01, delivery_fraction=0.05, delivery_tail_s=2e-4,
)  # fmt: skip
"""Devices in dedicated nodes. Sizes of spans, biases, ranks and the job are those of a trace of another cluster, the
healthy workers of the artifact of OSDI 2025: `python bench/detect_noise.py trace-AR.parquet`, both kinds of passes,
with the memory from step to step taken from steps that lie 28 apart. Nodes, tails, disturbances and deliveries are
assumed.
"""
CPU = NoiseModel(
    name="cpu", device=False, body=0.12, bias=0.03, rank_sigma=0.05, rank_memory=0.8, node_sigma=0.05, node_memory=0.9,
    job_sigma=0.05, job_memory=0.9, tail_fraction=0.05, tail_factor=0.6, hiccup_fraction=0.02, hiccup_s=0.02,
    queue_fraction=0.4, queue_s=5e-3, delivery_s=2e-4, delivery_fraction=0.3, delivery_tail_s=3e-3, gap_s=3e-4,
)  # fmt: skip
"""Ranks that share the cores of a busy virtual machine; all sizes are assumed."""
QUIET = NoiseModel(name="quiet", device=False, gap_s=0.0)


def autocorrelated(rng: np.random.Generator, steps: int, columns: int, sigma: float, memory: float) -> Floats:
    """Draw stationary processes of first order, [steps, columns]."""
    out = rng.standard_normal((steps, columns))
    if not sigma:
        return np.zeros((steps, columns))
    fresh = np.sqrt(1.0 - memory * memory)
    for step in range(1, steps):
        out[step] = memory * out[step - 1] + fresh * out[step]
    return out * sigma


def resampled(rng: np.random.Generator, steps: int, columns: int, recorded: Floats, block: int) -> Floats:
    """Cut blocks of consecutive steps from the rows of a recording, [steps, columns]: their correlation stays."""
    length = min(block, recorded.shape[1])
    count = -(-steps // length)
    row = rng.integers(recorded.shape[0], size=(count, columns))
    first = rng.integers(recorded.shape[1] - length + 1, size=(count, columns))
    inside = first[:, None, :] + np.arange(length)[None, :, None]
    out: Floats = recorded[row[:, None, :], inside].reshape(count * length, columns)[:steps]
    return out


def paces(noise: NoiseModel, rng: np.random.Generator, steps: int, node_of: NDArray[np.int64]) -> Floats:
    """Draw the factor of each rank's durations in each step, [steps, ranks]."""
    world = len(node_of)
    logs = rng.normal(0.0, noise.bias, world)[None, :] if noise.bias else np.zeros((1, world))
    if noise.recorded is not None:
        logs = logs + resampled(rng, steps, world, noise.recorded.pace, noise.block)
        logs = logs + resampled(rng, steps, 1, noise.recorded.job, noise.block)
    else:
        logs = logs + autocorrelated(rng, steps, world, noise.rank_sigma, noise.rank_memory)
        nodes = int(node_of.max()) + 1
        logs = logs + autocorrelated(rng, steps, nodes, noise.node_sigma, noise.node_memory)[:, node_of]
        logs = logs + autocorrelated(rng, steps, 1, noise.job_sigma, noise.job_memory)
    out: Floats = np.exp(logs)
    return out


def span_factors(noise: NoiseModel, rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw the factor of single spans."""
    if noise.recorded is not None:
        found: NDArray[np.float32] = np.exp(rng.choice(noise.recorded.spans, shape)).astype(np.float32)
        return found
    if not noise.body:
        return np.ones(shape, np.float32)
    out: NDArray[np.float32] = np.exp(np.float32(noise.body) * rng.standard_normal(shape, np.float32))
    if noise.tail_fraction:
        hit = rng.random(shape, np.float32) < noise.tail_fraction
        out[hit] *= 1.0 + rng.exponential(noise.tail_factor, int(hit.sum())).astype(np.float32)
    return out


def rare(rng: np.random.Generator, shape: tuple[int, ...], fraction: float, mean_s: float) -> Floats:
    """Draw delays of which only a share is above zero."""
    out = np.zeros(shape)
    if fraction > 0:
        hit = rng.random(shape, np.float32) < fraction
        out[hit] = rng.exponential(mean_s, int(hit.sum()))
    return out
