#!/usr/bin/env bash
# Download the wheels that a GPU host without a package index needs into .whl: ours depend on them, torch is there.
# Usage: bench/gpu_wheels.sh [PYTHON_VERSION]     then, on the host: . bench/gpu_setup.sh && python3 -m pytest tests/gpu
set -euo pipefail
cd "$(dirname "$0")/.."
version="${1:-3.12}"
names=(
  annotated-doc annotated-types anyio cachetools cel-expr-python certifi click einops fastapi h11 httpcore httpx hypothesis idna
  iniconfig jinja2 libucx-cu13 markupsafe megatron-core msgpack nvidia-ml-py opentelemetry-api packaging pathspec pluggy prometheus-client psutil pybind11 pydantic
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
.venv/bin/python - .whl/libucx_cu13-*.whl <<'PY'
"""Keep what UCX needs to run: the static libraries, test programs and third copies are most of its wheel."""
import pathlib, sys, zipfile

wheel = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(wheel.with_suffix(".small"), "w", zipfile.ZIP_DEFLATED) as target:
    for entry in source.infolist():
        name = entry.filename
        if not name.endswith((".a", ".so.0.0.0", ".h")) and "perftest" not in name and "/bin/" not in name:
            target.writestr(entry, source.read(entry))
wheel.with_suffix(".small").replace(wheel)
PY
du -sh .whl
