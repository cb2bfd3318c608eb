#!/usr/bin/env bash
# Run the measurements of a host with two or four GPUs in rounds of ten minutes, which is as long as a shared host may be
# lent at a time, or of $END_S seconds. Results and logs are written to $OUT, by default to build/gpu.
# Usage: bench/gpu_rounds.sh two-costs|two-faults|two-data|two-data-costs|four-layouts|four-faults|four-tracing
#        (first bench/gpu_wheels.sh where there is a package index)
set -uo pipefail
if [[ ! " two-costs two-faults two-data two-data-costs four-layouts four-faults four-tracing " == *" ${1:-none} "* ]]; then
  sed -n 's/^# Usage: /usage: /p' "$0" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
round="$1"
out="${OUT:-$PWD/build/gpu}"
logs="$out/logs-$round"
mkdir -p "$logs"
rm -f "$logs/failed"
# shellcheck source=bench/gpu_setup.sh
. bench/gpu_setup.sh > "$logs/setup.log" 2>&1 || { cat "$logs/setup.log"; exit 1; }
export PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1
END_S="${END_S:-580}"

# Run a command until the end of the round at most, with its output in a log of its own, and print the end of that.
run() {
  local name="$1" begun=$SECONDS left=$((END_S - SECONDS)) code=0
  shift
  if ((left > 0)); then
    timeout --kill-after 10 "$left" "$@" > "$logs/$name.log" 2>&1 || code=$?
  else
    code="none, the round is over,"
  fi
  printf '\n=== %s: exit code %s after %d s\n' "$name" "$code" "$((SECONDS - begun))"
  tail -n 15 "$logs/$name.log"
  [[ "$code" == 0 ]] || echo "$name" >> "$logs/failed"
}
# Eight groups of blocks, with four comparisons of A with A, are what a difference is resolved by.
costs() {
  local name="$1" seconds="$2"
  shift 2
  run "$name" python3 bench/gpu_trace_cost.py --hidden 4096 --length 4096 --layers 8 --heads 32 --seconds "$seconds" \
    --out "$out/$name.json" "$@"
}
# A disturbance takes 50 steps, which are half as long with 8 samples. What is measured next to it has other cores. A
# bench that is ended by its limit leaves its job.
faults() {
  local layout="$1" cores="$2" minutes="$3"
  shift 3
  run "faults_$layout" taskset -c "$cores" python3 bench/gpu_faults.py --layout "$layout" --minutes "$minutes" \
    --out "$out/faults_$layout.json" --records "$logs/records_$layout" "$@"
  python3 -m megatronapp_common.cli delete crowded --ignore-not-found >> "$logs/faults_$layout.log" 2>&1
}
four_kinds=(--only "all of" "1.10" "stopped" "copies from")
bursts() {
  run bursts taskset -c "$1" python3 bench/cpu_faults.py --cores "$1" --bursts-only --minutes 7.5 \
    --output "$out/bursts-$round.json"
}
published() {
  run published taskset -c "$1" python3 bench/bench_detectors.py --published --seed 1001 --windows 60 --detectors ours \
    --processes 15 --json "$out/published-$round.json"
}
detector() {
  run "detector_$2" taskset -c "$1" python3 bench/bench_detector_scale.py --process --threads "$2" --steps "$3"
}

case "$round" in
  two-costs)
    costs cost_tp2 175 --layouts tp2
    costs cost_pp2 260 --layouts pp2
    ;;
  two-faults)
    published 16-31 &
    faults tensor 0-15 4 --global-batch 8
    faults pipeline 0-15 4 --global-batch 8
    wait
    ;;
  two-data)
    bursts 16-31 &
    faults data 0-15 6.5
    wait
    ;;
  two-data-costs)
    costs cost_dp2 300 --layouts dp2
    run windows python3 -m pytest -q tests/gpu/test_tracing.py -k "windows or tensor_group"
    ;;
  four-layouts)
    bursts 48-63 &
    run layouts taskset -c 0-47 python3 bench/gpu_layouts.py --gpus 4 --out "$out/layouts.json"
    wait
    ;;
  four-faults)
    detector 48-63 4 9 &
    faults tensor-data 0-47 3.3 "${four_kinds[@]}"
    faults pipeline-4 0-47 3.3 "${four_kinds[@]}"
    wait
    ;;
  four-tracing)
    costs cost_tp2pp2 130 --layouts tp2pp2
    CUDA_VISIBLE_DEVICES=0,1 costs cost_tp2 60 --layouts tp2 &
    CUDA_VISIBLE_DEVICES=2,3 costs cost_pp2 60 --layouts pp2 &
    wait
    run look python3 bench/gpu_look_layouts.py --gpus 4 --out "$out/look.json"
    run generate python3 bench/gpu_generate_layouts.py --gpus 4 --out "$out/generate.json"
    run graphs python3 -m pytest -q tests/gpu/test_graph_layouts.py -k four
    ;;
esac
failed="$(cat "$logs/failed" 2> /dev/null)"
tar czf "$logs.tgz" -C "$out" --remove-files "logs-$round"
[[ -z "$failed" ]] || { printf '\nfailed: %s\n' "$failed"; exit 1; }
