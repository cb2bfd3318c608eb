#!/usr/bin/env bash
# Install the Debian packages that groups of targets need, where they are missing.
# Usage: system_packages.sh build|native|lint|test|e2e...
set -euo pipefail

need() { # need COMMAND PACKAGE
  command -v "$1" >/dev/null 2>&1 || missing+=("$2")
}

missing=()
for group in "${@:?usage: system_packages.sh build|native|lint|test|e2e...}"; do case "$group" in
  build)
    need g++ g++
    need make make
    ;;
  lint)
    need clang-format clang-format
    need clang-tidy clang-tidy
    ;;
  native)
    need cmake cmake
    need ninja ninja-build
    [ -f /usr/include/gtest/gtest.h ] || missing+=(libgtest-dev)
    ;;
  test)
    need chromium chromium
    need openssl openssl
    need promtool prometheus
    [ -d /usr/share/fonts/truetype/dejavu ] || missing+=(fonts-dejavu-core)
    ;;
  e2e)
    need buildah buildah
    need chromium chromium
    need conntrack conntrack
    need containerd containerd
    need debootstrap debootstrap
    need gcc gcc
    need ip iproute2
    need nft nftables
    need openssl openssl
    need runc runc
    need skopeo skopeo
    [ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
    [ -d /usr/share/fonts/truetype/dejavu ] || missing+=(fonts-dejavu-core)
    ;;
  *)
    echo "system_packages.sh: unknown group '$group'; use build, native, lint, test or e2e" >&2
    exit 2
    ;;
esac; done
[ ${#missing[@]} -eq 0 ] && exit 0

sudo=()
[ "$(id -u)" -eq 0 ] || sudo=(sudo)
if ! command -v apt-get >/dev/null 2>&1; then
  echo "Please install: ${missing[*]} (named as in Debian), then run this again." >&2
  exit 1
fi
echo "Installing Debian packages: ${missing[*]}"
"${sudo[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
