# Sourced on a GPU host whose Python has torch and which reaches no package index: wheels from .whl, ours from source.
# Usage: bench/gpu_wheels.sh where there is an index; then, on the host: . bench/gpu_setup.sh
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl || return 1
python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-cache-dir --upgrade --target /tmp/site ./csrc || return 1
for part in common operator trainer analyzer; do
  python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-cache-dir --upgrade --target /tmp/site ./$part || return 1
done
export PYTHONPATH=/tmp/site NCCL_NVLS_ENABLE=0
