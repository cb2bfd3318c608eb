"""Settings of all tests: generated inputs have no deadline, because a loaded machine is not a failure.

In continuous integration the inputs are the same in every run; elsewhere they are new each time and find more.
"""

import os

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "shared")
