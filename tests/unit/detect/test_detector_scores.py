"""The scorer of the detector benchmark, against cases worked by hand."""

from collections import Counter

import pytest
from detect.layout import Grid
from detect.protocol import NamedSubject, Verdict
from detect.score import Truth, Window, judge, macro_f1, poisson_upper, reliability, score

GRID = Grid(dp=4, pp=2, tp=2, ranks_per_worker=8, ranks_per_node=8)
RANK_3 = NamedSubject((3,))
NODE = NamedSubject(tuple(range(8)))
LINK = NamedSubject((1, 9), is_link=True)


def truth(subject: NamedSubject, cause: str = "compute", begin: int = 10, end: int = 100, cost: float = 0.1) -> Truth:
    return Truth(
        subject=subject, cause=cause, begin=begin, end=end, noticeable_from=begin, cost_s=cost, cost_fraction=cost
    )


def named(
    subject: NamedSubject, steps: range, cause: str = "compute", cost_s: float = 0.1
) -> dict[int, tuple[Verdict, ...]]:
    return {step: (Verdict(subject=subject, cause=cause, cost_s=cost_s),) for step in steps}


def window(*truths: Truth, verdicts: dict[int, tuple[Verdict, ...]] | None = None, hours: float = 1.0) -> Window:
    return Window(grid=GRID, truths=truths, named=verdicts or {}, steps=110, hours=hours)


@pytest.mark.parametrize(
    ("true", "subject", "step", "kind"),
    [
        (truth(RANK_3), RANK_3, 10, "hit"),
        (truth(RANK_3), RANK_3, 9, "false"),  # before it begins
        (truth(RANK_3), RANK_3, 119, "hit"),  # within the grace after its end
        (truth(RANK_3), RANK_3, 120, "false"),
        (truth(RANK_3), NamedSubject((2,)), 50, "false"),
        (truth(RANK_3), NamedSubject((2, 3)), 50, "wide"),  # its tensor-parallel unit
        (truth(RANK_3), NODE, 50, "false"),
        (truth(NODE), RANK_3, 50, "part"),
        (truth(NODE), NODE, 50, "hit"),
        (truth(LINK, "link"), LINK, 50, "hit"),
        (truth(LINK, "link"), NamedSubject((9, 1), is_link=True), 50, "false"),  # the other direction
        (truth(LINK, "link"), NamedSubject((9,)), 50, "false"),
        (truth(NamedSubject((1, 9))), LINK, 50, "false"),
        (truth(RANK_3, cost=0.004), RANK_3, 50, "neutral"),
        (truth(NODE, cost=0.004), RANK_3, 50, "neutral"),
    ],
)
def test_a_named_subject_is_judged(true: Truth, subject: NamedSubject, step: int, kind: str) -> None:
    assert judge(window(true), subject, step)[0] == kind


def test_windows_add_up() -> None:
    flickering = {**named(RANK_3, range(14, 55), "host", 0.3), **named(RANK_3, range(80, 100), "compute", 0.15)}
    total = score(
        [
            window(truth(RANK_3), verdicts=flickering),
            window(truth(NODE), verdicts=named(RANK_3, range(20, 100))),
            window(truth(RANK_3), truth(LINK, "link"), verdicts=named(NamedSubject((5,)), range(50, 60))),
            window(truth(RANK_3, cost=0.004)),
            window(hours=2.0),
            window(verdicts={30: named(RANK_3, range(1))[0] + named(NODE, range(1))[0]}),
        ]
    )
    assert (total.faulty, total.healthy, total.faults) == (4, 2, 4)
    assert (total.hits, total.parts, total.wide, total.false) == (1, 1, 0, 3)
    assert (total.precision, total.recall) == (0.25, 0.25)
    assert (total.victim_windows, total.false_windows, total.alarms, total.healthy_hours) == (1, 2, 2, 3.0)
    assert (total.delays, total.cause_delays) == ([5], [71])
    assert total.causes == Counter({("compute", "host"): 1})
    assert total.named_fraction == [pytest.approx(61 / 86)]
    assert total.cost_errors == [pytest.approx(0.5)]


def test_a_ramp_is_late_from_where_it_is_noticeable() -> None:
    slow = Truth(subject=RANK_3, cause="compute", begin=10, end=100, noticeable_from=40, cost_s=0.1, cost_fraction=0.1)
    early, late = (score([window(slow, verdicts=named(RANK_3, range(first, 100)))]) for first in (30, 45))
    assert (early.delays, late.delays) == ([0], [6])


def test_f1_is_the_mean_over_causes() -> None:
    # compute: 8 of 8 right, 2 more named: 16/18; host: 2 of 4 right, none wrong: 4/6
    confusion = Counter({("compute", "compute"): 8, ("host", "host"): 2, ("host", "compute"): 2})
    assert macro_f1(confusion) == pytest.approx((16 / 18 + 4 / 6) / 2)


@pytest.mark.parametrize(("events", "bound"), [(0, 2.9957), (1, 4.7439), (10, 16.9622)])
def test_upper_bounds_of_counts(events: int, bound: float) -> None:
    assert poisson_upper(events) == pytest.approx(bound, abs=1e-4)  # tables of the Poisson distribution


def test_confidence_is_compared_with_what_was_right() -> None:
    right = window(truth(RANK_3), verdicts={20: (Verdict(subject=RANK_3, cause="compute", confidence=0.97),)})
    wrong = window(truth(RANK_3), verdicts={20: (Verdict(subject=LINK, cause="link", confidence=0.96),)})
    neutral = window(truth(RANK_3, cost=0.004), verdicts=named(RANK_3, range(20, 30)))
    total = score([right, wrong, neutral])
    assert total.confidences == [(0.97, True), (0.96, False)]
    ((bounds, count, stated, correct),) = reliability(total.confidences)
    assert (bounds, count, correct) == ("0.95 to 0.99", 2, 0.5)
    assert stated == pytest.approx(0.965)
