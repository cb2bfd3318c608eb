"""Windows of anchors: a jump of a clock is found, drift and a single damaged record are not taken for one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatronapp_analyzer.align.anchor_window import AnchorWindow
from megatronapp_analyzer.align.line_fit import Anchor

UNCERTAINTIES_NS = st.floats(2e4, 2e5)
DRIFTS = st.floats(-100e-6, 100e-6)


@st.composite
def clocks(draw: st.DrawFn, wide: float = 0.1) -> list[Anchor]:
    """Anchors of clocks that drift and wander, each within its uncertainty; a part of them is of wide uncertainty."""
    period_s, uncertainty_ns = draw(st.floats(0.05, 30.0)), draw(UNCERTAINTIES_NS)
    drift, wander = draw(DRIFTS), draw(st.floats(-5e-6, 5e-6))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    anchors = []
    for number in range(draw(st.integers(10, 90))):
        time_s = number * period_s
        truth_ns = 3e6 + 1e9 * (drift * time_s + wander * 300.0 * (1.0 - np.cos(time_s / 300.0)))
        wide_ns = uncertainty_ns * (50.0 if rng.random() < wide else rng.uniform(1.0, 2.0))
        anchors.append((time_s, truth_ns + rng.uniform(-1.0, 1.0) * wide_ns, wide_ns))
    return anchors


@given(anchors=clocks())
def test_drift_and_noise_are_no_jump(anchors: list[Anchor]) -> None:
    window = AnchorWindow()
    for anchor in anchors:
        window.add(anchor)
        assert not window.doubt_ns
    assert list(window.points) == anchors[-64:]


def moved(anchor: Anchor, by_ns: float) -> Anchor:
    return anchor[0], anchor[1] + by_ns, anchor[2]


@given(anchors=clocks(wide=0.0), place=st.floats(0, 1), more=st.floats(1.1, 1e4), sign=st.sampled_from([-1, 1]))
def test_after_a_jump_only_anchors_from_after_it_count(
    anchors: list[Anchor], place: float, more: float, sign: int
) -> None:
    at = 4 + int(place * (len(anchors) - 6))
    largest_ns = max(anchor[2] for anchor in anchors)
    period_ns = (anchors[1][0] - anchors[0][0]) * 1e9
    jump_ns = sign * more * (24 * largest_ns + 200e-6 * period_ns)
    window = AnchorWindow()
    for anchor in anchors[:at]:
        window.add(anchor)
    window.add(moved(anchors[at], jump_ns))
    assert window.doubt_ns >= abs(jump_ns) / 2, "the clocks are in doubt"
    window.add(moved(anchors[at + 1], jump_ns))
    assert not window.doubt_ns
    assert list(window.points) == [moved(anchor, jump_ns) for anchor in anchors[at : at + 2]]


@given(anchors=clocks(), place=st.floats(0, 1), wrong_ns=st.floats(1e8, 1e12))
def test_a_single_wrong_anchor_changes_nothing(anchors: list[Anchor], place: float, wrong_ns: float) -> None:
    at = 2 + int(place * (len(anchors) - 4))
    window = AnchorWindow()
    for number, anchor in enumerate(anchors):
        window.add(moved(anchor, wrong_ns) if number == at else anchor)
        assert bool(window.doubt_ns) == (number == at)
    assert list(window.points) == [anchor for number, anchor in enumerate(anchors) if number != at][-64:]


def test_a_wrong_first_anchor_is_dropped() -> None:
    window = AnchorWindow()
    for anchor in [(0.0, 1e9, 2e4), (1.0, 5.0, 2e4), (2.0, 6.0, 2e4)]:
        window.add(anchor)
    assert list(window.points) == [(1.0, 5.0, 2e4), (2.0, 6.0, 2e4)]


def test_a_slow_link_is_no_jump() -> None:
    """A link that is slower in a direction moves the offset, and widens its bounds as much."""
    window = AnchorWindow()
    for number in range(20):
        slow_ns = 2e7 if number >= 10 else 0.0
        window.add((float(number), slow_ns / 2, 2e4 + slow_ns / 2))
        assert not window.doubt_ns
