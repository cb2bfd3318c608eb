#!/usr/bin/env bash
# Run the measurements of a host with two or four GPUs in rounds of at most ten minutes, which is as long as a shared
# host may be lent at a time. Results and logs are written to $OUT, by default to build/gpu.
# Usage: bench/gpu_rounds.sh two-costs|two-faults|two-data|four-layouts|four-faults|four-tracing
#        (first bench/gpu_wheels.sh where there is a package index)
set -uo pipefail
if [[ ! " two-costs two-faults two-data four-layouts four-faults four-tracing " == *" ${1:-none} "* ]]; then
  sed -n 's/^# Usage: /usage: /p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
out="${OUT:-$PWD/build/gpu}"
mkdir -p "$out/logs"
# shellcheck source=bench/gpu_setup.sh
. bench/gpu_setup.sh > "$out/logs/setup.log" 2>&1 || { cat "$out/logs/setup.log"; exit 1; }
export PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1

# Run a command, at most some seconds of it, with its output in a log of its own, and print the end of that.
run() {
  local name="$1" seconds="$2"
  shift 2
  local begun=$SECONDS code=0
  timeout --kill-after 10 "$seconds" "$@" > "$out/logs/$name.log" 2>&1 || code=$?
  printf '\n=== %s: exit code %d after %d s\n' "$name" "$code" "$((SECONDS - begun))"
  tail -n 15 "$out/logs/$name.log"
}
costs() {
  local name="$1" seconds="$2"
  shift 2
  run "$name" 540 python3 bench/gpu_trace_cost.py --hidden 4096 --length 4096 --layers 8 --heads 32 \
    --seconds "$seconds" --out "$out/$name.json" "$@"
}
# A disturbance takes 65 steps: seven minutes hold all of them, half of that those of the four kinds.
faults() {
  local layout="$1" minutes="$2"
  shift 2
  run "faults_$layout" 560 python3 bench/gpu_faults.py --layout "$layout" --minutes "$minutes" \
    --out "$out/faults_$layout.json" "$@"
}
four_kinds=(--only "all of" "1.10" "stopped" "copies from")

case "$1" in
  two-costs)
    run windows 150 python3 -m pytest -q tests/gpu/test_tracing.py -k "windows or tensor_group"
    costs cost 90 --layouts tp2 pp2 dp2
    ;;
  two-faults)
    run bursts 540 taskset -c 16-31 python3 bench/cpu_faults.py --cores 16-31 --bursts-only --minutes 8 --output "$out/bursts.json" &
    faults tensor 3.5 "${four_kinds[@]}"
    faults pipeline 3.5 "${four_kinds[@]}"
    wait
    ;;
  two-data)
    run detector_4 500 taskset -c 24-31 python3 bench/bench_detector_scale.py --process --threads 4 --steps 9 &
    faults data 6.5
    wait
    run detector_1 90 taskset -c 24-31 python3 bench/bench_detector_scale.py --process --threads 1 --steps 3
    ;;
  four-layouts)
    run bursts 560 taskset -c 48-63 python3 bench/cpu_faults.py --cores 48-63 --bursts-only --minutes 8 --output "$out/bursts.json" &
    run layouts 560 taskset -c 0-47 python3 bench/gpu_layouts.py --gpus 4 --out "$out/layouts.json"
    wait
    ;;
  four-faults)
    run detector_4 500 taskset -c 48-55 python3 bench/bench_detector_scale.py --process --threads 4 --steps 9 &
    faults tensor-data 3.8 "${four_kinds[@]}"
    faults pipeline-4 3.8 "${four_kinds[@]}"
    wait
    ;;
  four-tracing)
    costs cost_tp2pp2 130 --layouts tp2pp2
    CUDA_VISIBLE_DEVICES=0,1 costs cost_tp2 60 --layouts tp2 &
    CUDA_VISIBLE_DEVICES=2,3 costs cost_pp2 60 --layouts pp2 &
    wait
    run look 120 python3 bench/gpu_look_layouts.py --gpus 4 --out "$out/look.json"
    run generate 120 python3 bench/gpu_generate_layouts.py --gpus 4 --out "$out/generate.json"
    run graphs 120 python3 -m pytest -q tests/gpu/test_graph_layouts.py -k four
    ;;
esac
tar czf "$out/logs.tgz" -C "$out" --remove-files logs
