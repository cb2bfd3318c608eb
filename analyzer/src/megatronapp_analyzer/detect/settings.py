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
    """The same against peers, where there is no healthy history."""
    share: float
    """Smallest part of a step that a stall or a late delivery must cost, against own history."""
    cold_share: float
    """The same where there is no healthy history."""
    hits: int
    """Steps that must be evidence against a subject before it is named.

    A virtual machine whose host withdraws a processor for a second or two makes a rank slow for up to five short steps;
    a device knows nothing like it.
    """


PROCESSOR = NoiseLevel(compute_floor=0.08, compute_ratio=1.40, peer_ratio=1.60, share=0.06, cold_share=0.10, hits=6)
DEVICE = NoiseLevel(compute_floor=0.01, compute_ratio=1.05, peer_ratio=1.10, share=0.03, cold_share=0.06, hits=4)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetectorSettings:
    """Settings of the detector; defaults suit a shared laptop as well as a GPU node."""

    warmup_steps: int = 3
    """First steps of an attempt, which are slow for known reasons (allocation, autotuning, caches)."""
    window: int = 64
    """Healthy steps that make up a history."""
    min_history: int = 8
    """Steps from which on a history is used."""
    sigmas: float = 4.0
    """Robust deviations from the healthy residual from which on an observation is over."""
    votes: int = 5
    """Window of the persistence rule, in steps."""
    suspect_votes: int = 3
    confirm_votes: int = 4
    clear_steps: int = 10
    """Clean steps after which a verdict is cleared."""
    impact_share: float = 0.03
    """Smallest part of a step that any verdict must cost."""
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
    weaker_share: float = 0.35
    """A second subject is named in addition to a first only if it costs at least this part of what the first costs."""
    processor: NoiseLevel = PROCESSOR
    device: NoiseLevel = DEVICE
    hang_after_s: float = 10.0
    """Time without progress after which a rank hangs; at least `hang_steps` usual steps."""
    hang_steps: float = 10.0
    startup_s: float = 300.0
    """The same before the first step of an attempt has ended."""
    pause_s: float = 600.0
    """The same inside a checkpoint or an evaluation."""
