#!/usr/bin/env bash
# Build the programs of a real Kubernetes, or a tool beside it, from tests/tools and print the folder that holds them.
# Usage: kube_tools.sh api|api-1.30|cluster|helm|kwok|coredns|kueue|release|scheduler-plugins|jobset|trainer
#   api      kube-apiserver, kubectl and etcd, for tests against the API alone (four minutes on two cores, once)
#   api-1.30   the same of the oldest minor release that we support, with etcd and kubectl of api (150 s more)
#   cluster  the controllers, the scheduler, the kubelet and kube-proxy, too (90 s more)
#   helm     in the release that is made for this Kubernetes, from the same packages (12 s after api)
#   kwok, coredns   that program alone (75 to 105 s each)
#   kueue    that program (150 s) and its chart
#   release   oras and syft, for releases, and crane, for a registry of tests (four minutes)
#   scheduler-plugins   its scheduler (150 s) and its CRDs
#   jobset, trainer   the controller (six and five minutes) and its CRDs
# For api and cluster a folder in KUBEBUILDER_ASSETS is taken as it is. Else all are kept under XDG_CACHE_HOME, each
# module in a folder named by the hash of what made it.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../tests/tools"

group="${1:?usage: kube_tools.sh api|api-1.30|cluster|helm|kwok|coredns|kueue|release|scheduler-plugins|jobset|trainer}"
module=$group programs=("$group")
case "$group" in
  api) module=kubernetes programs=(kube-apiserver kubectl etcd) ;;
  api-1.30) module=kubernetes-1.30 programs=(kube-apiserver) ;;
  cluster) module=kubernetes programs=(kube-apiserver kubectl etcd kube-controller-manager kube-scheduler kubelet kube-proxy) ;;
  helm) module=kubernetes main=helm.sh/helm/v3/cmd/helm ;;
  kwok) main=sigs.k8s.io/kwok/cmd/kwok ;;
  coredns) main=github.com/coredns/coredns ;;
  kueue) main=sigs.k8s.io/kueue/cmd/kueue ;;
  release) programs=(oras syft crane) ;;
  scheduler-plugins) programs=(kube-scheduler) main=sigs.k8s.io/scheduler-plugins/cmd/scheduler ;;
  jobset) main=sigs.k8s.io/jobset ;;
  trainer) programs=(trainer-controller-manager) main=github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager ;;
  *)
    echo "kube_tools.sh: unknown set '$group'; use api, api-1.30, cluster, helm, kwok, coredns, kueue, release, scheduler-plugins, jobset or trainer" >&2
    exit 2
    ;;
esac

if [[ $group =~ ^(api|cluster)$ ]] && [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
  for program in "${programs[@]}"; do
    [ -x "$KUBEBUILDER_ASSETS/$program" ] && continue
    echo "KUBEBUILDER_ASSETS is $KUBEBUILDER_ASSETS, which has no $program; put it there, or unset the variable" >&2
    exit 1
  done
  echo "$KUBEBUILDER_ASSETS"
  exit 0
fi

[ "$module" = kubernetes ] || cd "$module"
command -v go >/dev/null 2>&1 || {
  echo "kube_tools.sh: needs Go $(sed -n 's/^go //p' go.mod) or newer, or programs in KUBEBUILDER_ASSETS" >&2
  exit 1
}

released() { # released MODULE: the version that go.mod requires
  sed -nE "s#^(require)?[[:space:]]*$1 (v[0-9.]*).*#\2#p" go.mod | head -1
}

# The linker would leave the debugging information out again; panics name their lines all the same.
compiler_flags=all=-dwarf=false
flags="-s -w"
case "$module" in
  kubernetes | kubernetes-1.30)
    version=$(released k8s.io/kubernetes)
    IFS=. read -r major minor _ <<<"${version#v}"
    stamp=k8s.io/component-base/version
    flags+=" -X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor"
    helm=$(released helm.sh/helm/v3)
    [ -z "$helm" ] || flags+=" -X helm.sh/helm/v3/internal/version.version=$helm"
    ;;
  kwok) version=$(released sigs.k8s.io/kwok) ;;
  coredns) version=$(released github.com/coredns/coredns) ;;
  kueue) version=$(released sigs.k8s.io/kueue) ;;
  release) version=$(released github.com/anchore/syft) flags+=" -X main.version=$version" ;;
  scheduler-plugins) version=$(released sigs.k8s.io/scheduler-plugins) ;;
  jobset) version=$(released sigs.k8s.io/jobset) ;;
  trainer) version=$(released github.com/kubeflow/trainer/v2) ;;
esac
made_by=$({ cat go.mod go.sum; echo "CGO_ENABLED=0 -trimpath $compiler_flags $flags"; go env GOOS GOARCH GOVERSION; } | sha256sum | cut -c1-12)
folder="${XDG_CACHE_HOME:-$HOME/.cache}/megatronapp/$module-$version-$made_by"
mkdir -p "$folder"

exec 9>"$folder/.lock"
flock 9 # two runs at once build once
missing=() sources=()
for program in "${programs[@]}"; do
  [ -x "$folder/$program" ] && continue
  source=${main:-k8s.io/kubernetes/cmd/$program}
  case "$program" in
    etcd) source=go.etcd.io/etcd/server/v3 ;;
    oras) source=oras.land/oras/cmd/oras ;;
    syft) source=github.com/anchore/syft/cmd/syft ;;
    crane) source=github.com/google/go-containerregistry/cmd/crane ;;
  esac
  missing+=("$program") sources+=("$source")
done
if [ ${#missing[@]} -gt 0 ]; then # in one go, so that a processor compiles while the other one links
  echo "kube_tools.sh: building ${missing[*]} ($version)" >&2
  rm -rf "$folder/.part"
  CGO_ENABLED=0 GOFLAGS=-mod=readonly go build -trimpath -gcflags "$compiler_flags" -ldflags "$flags" -o "$folder/.part/" "${sources[@]}"
  for i in "${!missing[@]}"; do
    mv "$folder/.part/$(basename "${sources[i]%/v3}")" "$folder/${missing[i]}"
  done
  rmdir "$folder/.part"
fi
if [ "$module" = kubernetes-1.30 ]; then
  newest=$("$here/kube_tools.sh" api)
  ln -sf "$newest/etcd" "$newest/kubectl" "$folder"
fi
definitions= # folder of a module with its CRDs
case "$module" in
  scheduler-plugins) definitions=$(go list -m -f '{{.Dir}}' sigs.k8s.io/scheduler-plugins)/config/crd/bases ;;
  jobset) definitions=$(go list -m -f '{{.Dir}}' sigs.k8s.io/jobset)/config/components/crd/bases ;;
  trainer) definitions=$(go list -m -f '{{.Dir}}' github.com/kubeflow/trainer/v2)/manifests/base/crds ;;
esac
if [ -n "$definitions" ] && [ ! -e "$folder/crds" ]; then
  cp -r "$definitions" "$folder/.crds.part"
  chmod -R u+w "$folder/.crds.part"
  mv "$folder/.crds.part" "$folder/crds"
fi
if [ "$module" = kueue ] && [ ! -e "$folder/chart" ]; then # its CRDs and webhooks
  cp -r "$(go list -m -f '{{.Dir}}' sigs.k8s.io/kueue)/charts/kueue" "$folder/.chart.part"
  chmod -R u+w "$folder/.chart.part"
  mv "$folder/.chart.part" "$folder/chart"
fi
echo "$folder"
