"""Requirements on a machine that runs the cluster, and the resources that the cluster takes."""

import os
import pathlib
import shutil

from cluster.layout import default_folder

DISK_GB = 35
"""Images in the builder's storage with what they are built from, on their way, and on the nodes, where they lie twice
(the trainer's is 5 GB). Other versions in constraints.txt add 6 GB to that storage each time; it may be removed."""
MINUTES = 40
"""The first time on two idle cores: programs 8, base 2 to 4, images 10 and 3 to the nodes, tests 15. With images that
changed little: 20."""
PROGRAMS = (
    *("buildah", "chromium", "containerd", "ctr", "debootstrap", "gcc", "ip", "nft", "nsenter", "openssl", "runc"),
    "skopeo",
)
PLUGINS = pathlib.Path("/usr/lib/cni")
DEVICES = ("/sys/fs/cgroup", "/proc/sys/net/ipv4/ip_forward")
"""One file for each group of kernel settings: their folders may not be written by root either."""


def missing(folder: pathlib.Path | None = None) -> str | None:
    """Return why this machine cannot run the cluster, or None."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, for network namespaces and a container runtime"
    if absent := [program for program in PROGRAMS if not shutil.which(program, path=_path())]:
        return f"needs {', '.join(absent)}; scripts/system_packages.sh e2e installs them on Debian"
    if not shutil.which("go") and not os.environ.get("KUBEBUILDER_ASSETS"):
        return "needs Go, to build Kubernetes, Helm and CoreDNS"
    if not (PLUGINS / "bridge").exists():
        return f"needs the CNI plugins in {PLUGINS}; scripts/system_packages.sh e2e installs them on Debian"
    if absent := [path for path in DEVICES if not os.access(path, os.W_OK)]:
        return f"needs to write in {', '.join(absent)}"
    return _missing_space(folder or default_folder())


def _missing_space(folder: pathlib.Path) -> str | None:
    standing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(standing).free / 1e9
    used = 0.0 if not folder.exists() else DISK_GB / 2
    if free + used < DISK_GB:
        return f"needs {DISK_GB} GB of disk at {folder}, has {free:.0f}; MEGATRONAPP_E2E_FOLDER names another place"
    return None


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
