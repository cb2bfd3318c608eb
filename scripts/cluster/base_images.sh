#!/usr/bin/env bash
# Make the images that ours stand on from Debian's packages, for a machine that reaches no image registry:
#   localhost/megatronapp-base      Debian with python3, its headers, a C compiler and the libraries of InfiniBand, which
#                                   the trainer's image needs
#   localhost/megatronapp-builder   the same with a C++ compiler
# Kept in buildah's storage; made again only where they are missing. Needs root, debootstrap and buildah.
set -euo pipefail
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
base=localhost/megatronapp-base:$suite-verbs
builder=localhost/megatronapp-builder:$suite
buildah inspect --type image "$base" >/dev/null 2>&1 && buildah inspect --type image "$builder" >/dev/null 2>&1 && exit 0

# debian.sources (deb822) or sources.list, whichever this machine has; the mirror is its own.
mirror=$(sed -n 's/^URIs: //p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -1)
[ -n "$mirror" ] || mirror=$(sed -nE 's/^deb (\[[^]]*\] )?([^ ]+).*/\2/p' /etc/apt/sources.list | head -1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "base_images.sh: $base" >&2
packages=python3,python3-dev,python3-venv,ca-certificates,gcc,libc6-dev,libibverbs1,ibverbs-providers,librdmacm1,libnuma1
debootstrap --variant=minbase --include="$packages" "$suite" "$work/tree" "$mirror" >"$work/log" ||
  { tail -20 "$work/log" >&2 && exit 1; }
rm -rf "$work"/tree/{etc/apt/sources.list,etc/hostname,etc/resolv.conf,var/lib/apt/lists,var/cache/apt,var/log,usr/share/doc,usr/share/man}
mkdir -p "$work"/tree/{var/lib/apt/lists/partial,var/cache/apt/archives/partial,var/log}
made=$(buildah from scratch)
buildah add --quiet "$made" "$work/tree" / >/dev/null
buildah config --cmd '["python3"]' "$made"
buildah commit --quiet --rm "$made" "$base" >/dev/null

echo "base_images.sh: $builder" >&2
sources="$work/sources.list"
echo "deb $mirror $suite main" >"$sources"
made=$(buildah from "$base")
buildah run --network host --volume "$sources:/etc/apt/sources.list:ro" "$made" -- sh -c \
  'apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ make >/dev/null'
buildah run "$made" -- sh -c 'rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb'
buildah commit --quiet --rm "$made" "$builder" >/dev/null
