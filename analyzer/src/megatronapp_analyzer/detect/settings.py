"""Thresholds of the detector, in one place."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLevel:
    """Thresholds of healthy noise on one kind of clock."""

    compute_floor: float
    """Smallest scale of healthy log-duration residuals."""
    compute_ratio: float
    """Smallest slowdown of compute that is named, against own history."""
    peer_ratio: float
    """The same against peers."""
    peer_spread: float
    """Deviation of the constant differences between peers, where too few are known to measure it."""
    least_peer_spread: float
    """Least deviation of these differences where they are measured."""
    share: float
    """Smallest part of a step that a stall or a late delivery must cost, against own history."""
    cold_share: float
    """The same against others that do the same."""
    share_floor: float
    """Smallest deviation of healthy delays, as a part of a step."""
    share_spread: float
    """Deviation of their constant differences between columns."""
    impact: float
    """Smallest part of a step that the delays of a subject must add up to."""
    weaker: float
    """A second subject is named in addition to a first only if its delays are at least this part of those of the first.
    """
    hits: int
    """Steps that must be evidence against a subject before it is named.

    A virtual machine whose host withdraws a processor for a second or two makes a rank slow for up to five short steps;
    a device knows nothing like it.
    """


PROCESSOR = NoiseLevel(
    compute_floor=0.08,
    compute_ratio=1.40,
    peer_ratio=1.60,
    peer_spread=0.08,
    least_peer_spread=0.05,
    share=0.06,
    cold_share=0.10,
    share_floor=0.008,
    share_spread=0.01,
    impact=0.03,
    weaker=0.35,
    hits=6,
)
DEVICE = NoiseLevel(
    compute_floor=0.004,
    compute_ratio=1.012,
    peer_ratio=1.012,
    peer_spread=0.012,
    least_peer_spread=0.004,
    share=0.005,
    cold_share=0.01,
    share_floor=0.0005,
    share_spread=0.001,
    impact=0.006,
    weaker=0.0,
    hits=3,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetectorSettings:
    """Settings of the detector; defaults suit a shared laptop as well as a GPU node."""

    warmup_steps: int = 3
    """First steps of an attempt, which are slow for known reasons (allocation, autotuning, caches)."""
    window: int = 64
    """Healthy steps that make up a history."""
    min_history: int = 8
    """Steps from which on a history is used."""
    independent_tests: float = 1e5
    """Independent tests of each column, of which chance lets about one reach the limit of the score.

    The largest of m independent standard normal numbers is about the root of 2 log m: m is this number times that of
    the columns. 10,000 windows of 120 steps, which are to have no alarm, are 1e5 tests where noise lasts for 12 steps.
    """
    sigmas: float = 4.0
    """Robust deviations from the healthy residual from which on an observation is over."""
    votes: int = 5
    """Window of the persistence rule, in steps."""
    suspect_votes: int = 3
    confirm_votes: int = 4
    harm: float = 0.1
    """Part of a step from which an excess needs one step less, as a suspect and to be named, on a device's clock."""
    clear_steps: int = 10
    """Clean steps after which a verdict is cleared; twice the longest pause of a fault that stops and starts."""
    longest_pause: int = 60
    """Clean steps after which it is cleared in any case, and a fault of the same subject is another one."""
    cost_share: float = 0.005
    """Smallest part of a step by which the replayed step must be shorter without a fault that is named.

    The impact above adds up delays; the replay shows which of them anything waited for.
    """
    imbalance_ratio: float = 1.8
    """How much longer than the median of the other stages a stage must take to be mentioned, without any reference."""
    last_stage_ratio: float = 3.0
    """The same for the stage that carries the vocabulary and the loss by design: the last, in a vee the first."""
    imbalance_steps: int = 12
    group_share: float = 0.6
    """Share of a node's ranks that must be slow together to blame the node."""
    processor: NoiseLevel = PROCESSOR
    device: NoiseLevel = DEVICE
    hang_after_s: float = 10.0
    """Time without progress after which a rank hangs; at least `hang_steps` usual steps."""
    hang_steps: float = 10.0
    startup_s: float = 300.0
    """The same before the first step of an attempt has ended."""
    pause_s: float = 600.0
    """The same inside a checkpoint or an evaluation."""
