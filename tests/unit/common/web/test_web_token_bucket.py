"""Token buckets: no key gets more than the burst and the rate, a caller that waits as long as required is served, all
keys or none."""

from hypothesis import given
from hypothesis import strategies as st

from megatronapp_common.web.token_bucket import BucketEmpty, BucketSize, TokenBuckets


@given(
    waits=st.lists(st.floats(0, 3), max_size=60),
    size=st.builds(BucketSize, st.integers(1, 9), st.floats(0.05, 300)),
)
def test_no_key_gets_more_than_the_burst_and_the_rate(waits: list[float], size: BucketSize) -> None:
    buckets, now_s, granted = TokenBuckets(8), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        short = buckets.consume({"one": size}, now_s)
        granted += short is None
        assert granted <= size.burst + size.per_s * now_s + 1e-6
        if short is not None:
            assert short.key == "one" and short.wait_s >= 1
            now_s += short.wait_s
            granted += 1
            assert buckets.consume({"one": size}, now_s) is None, "who waits as long as told is served"
    assert buckets.consume({"another": size}, now_s) is None


def test_an_empty_bucket_consumes_no_tokens_of_the_others() -> None:
    buckets, jane, job = TokenBuckets(8), BucketSize(1, 0.5), BucketSize(3, 0.1)
    assert buckets.consume({"jane": jane, "job": job}, 0) is None
    for _ in range(5):
        assert buckets.consume({"jane": jane, "job": job}, 0) == BucketEmpty("jane", 2)
    assert [buckets.consume({"job": job}, 0) for _ in range(3)] == [None, None, BucketEmpty("job", 10)]


def test_a_request_for_several_tokens_consumes_all_or_none() -> None:
    buckets, size = TokenBuckets(8), BucketSize(4, 0.5)
    assert buckets.consume({"one": size}, 0, 3) is None
    assert buckets.consume({"one": size}, 0, 3) == BucketEmpty("one", 4)
    assert [buckets.consume({"one": size}, 0) for _ in range(2)] == [None, BucketEmpty("one", 2)]
    assert buckets.consume({"one": size}, 6, 3) is None


def test_a_caller_that_is_refused_waits_no_longer_for_asking_again() -> None:
    buckets, size = TokenBuckets(8), BucketSize(1, 0.1)
    assert buckets.consume({"one": size}, 0) is None
    assert [buckets.consume({"one": size}, second) for second in (1, 4, 9.5)] == [
        BucketEmpty("one", n) for n in (9, 6, 1)
    ]
    assert buckets.consume({"one": size}, 10) is None


def test_keys_are_bounded_and_the_least_recently_used_is_reset() -> None:
    buckets, size = TokenBuckets(3), BucketSize(1, 0.001)
    for key in "abcab":
        buckets.consume({key: size}, 0)
    assert len(buckets) == 3
    assert buckets.consume({"d": size}, 0) is None and len(buckets) == 3
    assert buckets.consume({"a": size}, 0) is not None, "a refused request is a use, too"
    assert buckets.consume({"c": size}, 0) is None
