"""Settings of all tests: generated inputs have no deadline, because a loaded machine is not a failure.

In continuous integration the inputs are the same in every run; elsewhere they are new each time and find more.

Signals have their default meaning: a shell that starts us in the background, or `nohup`, has some of them ignored; that
every process that a test starts would inherit and honour.
"""

import os
import signal

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "shared")

signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
