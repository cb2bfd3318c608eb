#!/usr/bin/env bash
# Build the images with docker or buildah. Usage: build_images.sh [operator|trainer|analyzer]... (all if none is named)
#   REGISTRY       put before the names, as in registry.example/team; left out: megatronapp-operator and so on alone
#   TAG            the tag; left out: the version of the operator's pyproject.toml
#   PLATFORM       linux/amd64 or linux/arm64; left out: this machine's. Another one needs its emulation (binfmt_misc)
#   ENGINE         docker or buildah; left out: docker where its engine answers, else buildah
#   BASE, BUILDER  images to stand on, best by digest (NAME@sha256:...): the same python3 in both, a C++ compiler and
#                  Python's headers in BUILDER
# pip's settings of this machine (pip.conf, PIP_*, UV_*, SSL_CERT_FILE) go into the build as secrets, never into an image.
set -euo pipefail
cd "$(dirname "$0")/.."
images=("$@")
[ ${#images[@]} -gt 0 ] || images=(operator analyzer trainer)
TAG="${TAG:-$(sed -n 's/^version = "\(.*\)"/\1/p' operator/pyproject.toml)}"
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-315532800}" # times of files say nothing, so equal contents give equal layers

for image in "${images[@]}"; do
  [ -f "images/$image/Dockerfile" ] && continue
  echo "build_images.sh: unknown image '$image'; use operator, trainer or analyzer" >&2
  exit 2
done
[ -n "${ENGINE:-}" ] || { ENGINE=buildah && docker info >/dev/null 2>&1 && ENGINE=docker; }
command -v "$ENGINE" >/dev/null 2>&1 || {
  echo "build_images.sh: needs docker or buildah (scripts/system_packages.sh e2e installs it)" >&2
  exit 1
}

secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT
{ env | grep -E '^(PIP|UV)_[A-Z_]+=' || true; } | grep -vE '^(PIP_CERT|PIP_CONFIG_FILE|PIP_FIND_LINKS)=' |
  while IFS='=' read -r name value; do printf '%s=%q\n' "$name" "$value"; done >"$secrets/packages.env"
certificates="${PIP_CERT:-${SSL_CERT_FILE:-}}"
if [ -f "$certificates" ]; then cp "$certificates" "$secrets/ca.crt"; else : >"$secrets/ca.crt"; fi
settings="${PIP_CONFIG_FILE:-/etc/pip.conf}"
# A path in the file is this machine's; the build has the certificates elsewhere.
if [ -f "$settings" ]; then grep -vE '^cert *=' "$settings" >"$secrets/pip.conf" || true; else : >"$secrets/pip.conf"; fi

words=(--build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH")
[ -z "${BASE:-}" ] || words+=(--build-arg "BASE=$BASE")
[ -z "${BUILDER:-}" ] || words+=(--build-arg "BUILDER=$BUILDER")
for secret in packages.env pip.conf ca.crt; do words+=(--secret "id=$secret,src=$secrets/$secret"); done
[ -z "${PLATFORM:-}" ] || words+=(--platform "$PLATFORM")
build=(docker build)
export BUILDX_NO_DEFAULT_ATTESTATIONS=1 # releases attach their own (scripts/release.py)
[ "$ENGINE" = docker ] || build=(buildah bud --layers --format oci --network host --timestamp "$SOURCE_DATE_EPOCH")

for image in "${images[@]}"; do
  [ "$image" = trainer ] || [ -f frontend/dist/index.html ] || make frontend/dist/index.html
  name="${REGISTRY:+$REGISTRY/}megatronapp-$image:$TAG"
  echo "build_images.sh: $name" >&2
  "${build[@]}" "${words[@]}" -f "images/$image/Dockerfile" -t "$name" .
done
