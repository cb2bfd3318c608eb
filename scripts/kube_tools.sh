#!/usr/bin/env bash
# Build the programs of a real Kubernetes from tests/tools and print the folder that holds them.
# Usage: kube_tools.sh api|cluster
#   api      kube-apiserver, kubectl and etcd, for tests against the API alone (200 s on two cores, once)
#   cluster  the controllers, the scheduler, the kubelet and kube-proxy, too (90 s more)
# A folder in KUBEBUILDER_ASSETS is taken as it is. Else they are kept under XDG_CACHE_HOME, by the hash of what made them.
set -euo pipefail
cd "$(dirname "$0")/../tests/tools"

case "${1:?usage: kube_tools.sh api|cluster}" in
  api) programs=(kube-apiserver kubectl etcd) ;;
  cluster) programs=(kube-apiserver kubectl etcd kube-controller-manager kube-scheduler kubelet kube-proxy) ;;
  *)
    echo "kube_tools.sh: unknown set '$1'; use api or cluster" >&2
    exit 2
    ;;
esac

if [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
  for program in "${programs[@]}"; do
    [ -x "$KUBEBUILDER_ASSETS/$program" ] && continue
    echo "KUBEBUILDER_ASSETS is $KUBEBUILDER_ASSETS, which has no $program; put it there, or unset the variable" >&2
    exit 1
  done
  echo "$KUBEBUILDER_ASSETS"
  exit 0
fi

command -v go >/dev/null 2>&1 || {
  echo "kube_tools.sh: needs Go $(sed -n 's/^go //p' go.mod) or newer, or programs in KUBEBUILDER_ASSETS" >&2
  exit 1
}
version=$(sed -n 's/^\tk8s.io\/kubernetes \(v[0-9.]*\).*/\1/p' go.mod)
made_by=$({ cat go.mod go.sum "../../scripts/kube_tools.sh"; go env GOOS GOARCH GOVERSION; } | sha256sum | cut -c1-12)
folder="${XDG_CACHE_HOME:-$HOME/.cache}/megatronapp/kubernetes-$version-$made_by"
mkdir -p "$folder"

exec 9>"$folder/.lock"
flock 9 # two runs at once build once
IFS=. read -r major minor _ <<<"${version#v}"
stamp=k8s.io/component-base/version
flags="-s -w -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor"
for program in "${programs[@]}"; do
  [ -x "$folder/$program" ] && continue
  source=k8s.io/kubernetes/cmd/$program
  [ "$program" != etcd ] || source=go.etcd.io/etcd/server/v3
  echo "kube_tools.sh: building $program ($version)" >&2
  CGO_ENABLED=0 GOFLAGS=-mod=readonly go build -trimpath -ldflags "$flags" -o "$folder/.$program.part" "$source"
  mv "$folder/.$program.part" "$folder/$program"
done
echo "$folder"
