#!/usr/bin/env bash
# Download the wheels that a GPU host without a package index needs into .whl: ours depend on them, torch is there.
# Usage: bench/gpu_wheels.sh [PYTHON_VERSION]     then, on the host: . bench/gpu_setup.sh && python3 -m pytest tests/gpu
set -euo pipefail
cd "$(dirname "$0")/.."
version="${1:-3.12}"
names=(
  annotated-doc annotated-types anyio cachetools cel-expr-python certifi click einops fastapi h11 httpcore httpx hypothesis idna
  iniconfig jinja2 libucx-cu13 markupsafe megatron-core msgpack nvidia-ml-py opentelemetry-api packaging pathspec pluggy prometheus-client psutil pyarrow pybind11 pydantic
  pydantic-core pygments pytest pytest-asyncio pytest-timeout pyyaml safetensors scikit-build-core setuptools shtab
  sniffio sortedcontainers starlette tokenizers tqdm typing-extensions typing-inspection uvicorn websockets
)
platforms=()
for glibc in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
rm -rf .whl
mkdir .whl
for name in "${names[@]}"; do
  pinned=$(grep -iE "^${name//-/[-_]}==" constraints.txt || true)
  .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: -d .whl \
    --python-version "$version" --implementation cp "${platforms[@]}" "${pinned:-$name}" || echo "no wheel: $name" >&2
done
.venv/bin/python bench/small_wheels.py .whl/*.whl
du -sh .whl
