#!/usr/bin/env bash
# Runs inside an image build. Usage: install.sh dependencies | install.sh own PART...
#   dependencies  what requirements.txt lists, by its hashes, into /opt/megatronapp; what builds our parts beside it
#   own           the parts themselves, into /opt/megatronapp/own: a layer apart, so that a release moves kilobytes
# How packages are reached comes as build secrets (packages.env, pip.conf, ca.crt), which no layer keeps. Building our
# parts reaches nothing.
set -euo pipefail
step="${1:?usage: install.sh dependencies | own PART...}"
shift
home=/opt/megatronapp
tools=/opt/build

set -a
# shellcheck disable=SC1091
[ ! -f /run/secrets/packages.env ] || . /run/secrets/packages.env
[ ! -f /run/secrets/pip.conf ] || PIP_CONFIG_FILE=/run/secrets/pip.conf
if [ -s /run/secrets/ca.crt ]; then
  PIP_CERT=/run/secrets/ca.crt
  SSL_CERT_FILE=/run/secrets/ca.crt
fi
UV_LINK_MODE=copy
set +a

# Times of files are levelled in the layers, so bytecode must not be judged by them.
compile() {
  "$home/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$1" >/dev/null || true # templates are no code
}

case "$step" in
  dependencies)
    python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet --no-cache-dir --require-hashes --only-binary :all: -r tools.txt
    python3 -m venv --without-pip "$home"
    "$tools/bin/uv" pip install --no-cache --python "$home/bin/python" --require-hashes --only-binary :all: -r requirements.txt
    site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "$home/own" >"$site/megatronapp-own.pth"
    compile "$site"
    ;;
  own)
    export PATH="$tools/bin:$PATH"
    wheels=$(mktemp -d)
    for part in "$@"; do
      uv build --quiet --no-cache --offline --wheel --no-build-isolation --python "$tools/bin/python" --out-dir "$wheels" "$part"
    done
    uv pip install --no-cache --offline --python "$home/bin/python" --no-deps --target "$home/own" "$wheels"/*.whl
    rm -rf "$wheels"
    compile "$home/own"
    ;;
  *)
    echo "install.sh: unknown step '$step'; use dependencies or own" >&2
    exit 2
    ;;
esac
