#!/usr/bin/env bash
# Checks of the native code: scripts/native_checks.sh test | asan | tsan | lint | bench
set -euo pipefail
cd "$(dirname "$0")/../csrc"
python=${PYTHON:-$PWD/../.venv/bin/python}

build() { # build NAME CMAKE_ARGUMENTS...
    local name=$1
    shift
    cmake -S . -B "build/$name" -G Ninja -DMEGATRONAPP_WERROR=ON "$@" >"build/$name.log" || { cat "build/$name.log"; return 1; }
    cmake --build "build/$name" --parallel "${JOBS:-2}"
}

tests() { # tests NAME CMAKE_ARGUMENTS...
    build "$1" -DMEGATRONAPP_TESTS=ON "${@:2}"
    # Rings live in memory; on a busy disk the thousands of small files of these tests take half a minute.
    TMPDIR=${TMPDIR:-/dev/shm} "build/$1/ring_tests" --gtest_brief=1
    TMPDIR=${TMPDIR:-/dev/shm} "build/$1/transport_tests" --gtest_brief=1
}

lint() {
    local sources=(src/*.cpp src/*/*.cpp bindings/*.cpp tests/*.cpp tests/*/*.cpp benchmarks/*.cpp)
    clang-format --dry-run --Werror include/megatronapp/*.hpp include/megatronapp/*/*.hpp bindings/*.hpp tests/*.hpp tests/*/*.hpp "${sources[@]}"
    local pybind11
    pybind11=$("$python" -m pybind11 --cmakedir)
    build lint -DMEGATRONAPP_TESTS=ON -DMEGATRONAPP_BENCHMARKS=ON -DMEGATRONAPP_BINDINGS=ON -DCMAKE_BUILD_TYPE=Debug \
        -Dpybind11_DIR="$pybind11" -DPYTHON_EXECUTABLE="$python"
    printf '%s\n' "${sources[@]}" | xargs -n 1 -P "${JOBS:-2}" clang-tidy --quiet -p build/lint
}

mkdir -p build
case "${1:-}" in
    test) tests release -DCMAKE_BUILD_TYPE=Release ;;
    asan) tests asan -DCMAKE_BUILD_TYPE=Debug -DMEGATRONAPP_SANITIZE=address,undefined ;;
    tsan) tests tsan -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMEGATRONAPP_SANITIZE=thread ;;
    lint) lint ;;
    bench)
        build bench -DMEGATRONAPP_BENCHMARKS=ON -DCMAKE_BUILD_TYPE=Release
        build/bench/record_cost
        ;;
    *)
        echo "usage: $0 test | asan | tsan | lint | bench" >&2
        exit 64
        ;;
esac
