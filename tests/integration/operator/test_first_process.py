"""Tests that operator and gateway end at once where they are process 1 and a signal arrives while they are imported.

The first process of a container does not get a signal that it has no handler for.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys

import psutil
import pytest

DEADLINE_S = 120.0
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
PIPE_BYTES = 4096
"""Room for a few dozen lines of imports: the process waits in an import until the test reads on."""


@pytest.mark.parametrize("module", ["controller", "gateway"])
def test_process_1_ends_while_it_is_imported(module: str) -> None:
    probe = [*NAMESPACE, "true"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("process namespaces are not allowed here")
    # Without arguments both would fail: 0 can only be the end by the signal.
    command = [*NAMESPACE, sys.executable, "-X", "importtime", "-m", f"megatronapp_operator.{module}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KUBE")}
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    outer = subprocess.Popen(command, stderr=write, env=environment)
    os.close(write)
    with open(read) as imports:
        try:
            for line in imports:
                if line.endswith("megatronapp_common\n"):  # imported after the entry point's own lines
                    break
            else:
                pytest.fail("it ended before its imports did")
            [inner] = psutil.Process(outer.pid).children()
            inner.terminate()
            imports.read()
            assert outer.wait(DEADLINE_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                outer.kill()
            outer.wait()
