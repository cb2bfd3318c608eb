#!/usr/bin/env bash
# Checks of the native code: scripts/native_checks.sh test | asan | tsan | lint | bench
set -euo pipefail
cd "$(dirname "$0")/../csrc"
python=${PYTHON:-$PWD/../.venv/bin/python}
fuzz_cases=$([ -n "${MEGATRONAPP_FULL:-}" ] && echo 1000 || echo 40) # of each target

build() { # build NAME CMAKE_ARGUMENTS...
    local name=$1
    shift
    cmake -S . -B "build/$name" -G Ninja -DMEGATRONAPP_WERROR=ON "$@" >"build/$name.log" || { cat "build/$name.log"; return 1; }
    cmake --build "build/$name" --parallel "${JOBS:-2}"
}

tests() { # tests NAME CMAKE_ARGUMENTS...
    local ucx
    ucx=$("$python" -c 'import libucx, pathlib; print(pathlib.Path(libucx.__file__).parent)')
    build "$1" -DMEGATRONAPP_TESTS=ON -DMEGATRONAPP_UCX_INCLUDE="$ucx/include" "${@:2}"
    export MEGATRONAPP_UCX_LIBRARY=$ucx/lib/libucp.so.0
    [ "$1" != tsan ] || settings_of_tsan
    # Rings live in memory; on a busy disk the thousands of small files of these tests take half a minute.
    export TMPDIR=${TMPDIR:-/dev/shm}
    local commands=("GTEST_TOTAL_SHARDS=2 GTEST_SHARD_INDEX="{0,1}" build/$1/transport_tests --gtest_brief=1")
    commands+=("build/$1/ring_tests --gtest_brief=1" "build/$1/nccl_tests --gtest_brief=1" "build/$1/transport_c_tests")
    # Not with the thread sanitizer: what the fuzzer writes into slots races with the ranks, as it is meant to.
    [ "$1" = tsan ] || commands+=("build/$1/transport_fuzz $fuzz_cases")
    printf '%s\n' "${commands[@]}" | xargs -P "${JOBS:-2}" -I {} bash -c {} # much of their time is waiting
    exported "build/$1/libmegatronapp_transport.so"
}

settings_of_tsan() { # for UCX, which is not built for the thread sanitizer and is loaded while threads run
    # UCX patches madvise of libc to follow memory, and takes a lock in it. glibc calls madvise at the end of each thread,
    # when the sanitizer has discarded its state of that thread, and its lock functions crash without one. Only caches
    # of registered memory need these events; TCP, which the tests use, has none.
    export UCX_MEM_EVENTS=n
    # The sanitizer of GCC 12 recognises thread-local blocks of loaded libraries by a header that an older glibc put
    # before them, and takes one of 256 to have it. It then clears a range of any size: "failed to allocate". The glibc
    # of today allocates these blocks by malloc, which the sanitizer follows by itself.
    export TSAN_OPTIONS="intercept_tls_get_addr=0 ${TSAN_OPTIONS:-}"
}

exported() { # exported LIBRARY: it exports the functions of its header and nothing else
    diff <(nm -D --defined-only "$1" | awk '{print $3}' | sort) \
        <(grep -oE 'megatronapp_(transport|message)_[a-z_]+\(' include/megatronapp/transport.h | tr -d '(' | sort -u)
}

lint() {
    local sources=(src/*.cpp src/*/*.cpp src/*/*/*.cpp bindings/*.cpp tests/*.cpp tests/*/*.cpp tests/*/*/*.cpp benchmarks/*.cpp)
    clang-format --dry-run --Werror include/megatronapp/*.h include/megatronapp/*.hpp include/megatronapp/*/*.hpp include/megatronapp/*/*/*.hpp bindings/*.hpp tests/*.hpp tests/*/*.hpp tests/*/*/*.hpp tests/*/*/*.c "${sources[@]}"
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
