"""A clock that tests set."""

import dataclasses


@dataclasses.dataclass
class FakeClock:
    """Time in seconds that stays until the test changes `now`."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now
