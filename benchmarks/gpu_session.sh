#!/usr/bin/env bash
# Everything of this project that needs a GPU, for a machine with one, two or eight that is rented
# briefly.
#
# Usage: gpu_session.sh GROUP...
#
# A GROUP is one section, or several joined by '+' that run at the same time; groups run one after
# the other. A SECTION is NAME[:SECONDS][@GPU]: the time that it may take, and the one GPU that it
# sees. Needs an installed torch of a release in patches/, numpy, pytest, pytest-timeout and
# expecttest. That torch stays as it is: setup, which comes first by itself, patches a copy made of
# hard links. A section that fails or runs out of time does not stop the others.
#
#   setup      the patched copy of torch, and both imported once
#   doctor     build.sh doctor on stock and on patched torch
#   tests      the tests of the patches, patched and stock (gpu_tests.py)
#   threads1   3 and 6 threads compile at once on one GPU, caches off and on, 10 times each, many
#              processes side by side; stock, and stock with the workaround, a few times
#   threads2   the same with 2 and 6 threads on two GPUs
#   firststep  time to the first step on one GPU and two, beside processes; three repetitions, alone
#   firstmore  the same for more threads and with caches on; one repetition
#   stress     stress.py with CUDA tensors, patched and stock
#   train1     three drafters on one GPU train for 200 steps (qwen2.5-0.5b)
#   train2     a drafter on each of two GPUs trains for 200 steps (qwen3-4b)
#   drafters1  drafters.py, three drafters on one GPU (DRAFTERS1, default qwen2.5-0.5b; three of
#              qwen3-4b need more than the 140 GiB of an H200)
#   drafters2  drafters.py, a drafter on each of two GPUs, qwen3-4b
#   drafters3  the same, qwen2.5-0.5b
#   drafters8  the setup of the first report: targets on GPUs 0 to 4 of eight, a drafter on each of
#              5 to 7, qwen3-4b
#   limit      the same with Dynamo's recompile_limit so low that the drafters use it up: the slow case
#
# In calls of less than ten minutes on a machine with two GPUs and 32 cores; what measures throughput
# or times is alone there, and what a call left out the next one does:
#
#   gpu_session.sh doctor+tests:430+threads1:430+threads2:430
#   gpu_session.sh drafters2:560
#   gpu_session.sh drafters3:480
#   gpu_session.sh firststep:360 limit:200
#   gpu_session.sh drafters1:280@0 train1:270@0+train2:270+stress:270
#   gpu_session.sh drafters2:300 firstmore:200
#
# With eight GPUs:
#
#   gpu_session.sh drafters8:560
#   gpu_session.sh drafters8:300 tests:280
#
# Environment:
#   OUT       where results go (default ./gpu-results): summary.txt, results.tar.gz with the JSON
#             files, logs.tar.gz; both archives are written anew every half minute
#   PYTHON    the interpreter with torch (default python3)
#   OVERLAY   the folder of the patched copy (default fxctx-overlay in the temporary folder)
#   GROW      GiB of memory to touch in setup, for a virtual machine whose memory grows only as fast
#             as one process fills it, while many are about to start (default 0)
#   REPETITIONS  of threads1 and threads2 (default 10)
#   SMOKE=1   try the script itself: on the CPU, tiny sizes, one repetition
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
export PYTHON
export PYTHONUNBUFFERED=1
OUT=${OUT:-$PWD/gpu-results}
OVERLAY=${OVERLAY:-${TMPDIR:-/tmp}/fxctx-overlay}
SMOKE=${SMOKE:-}
cores=$(nproc)

usage() {
  awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "${BASH_SOURCE[0]}"
}

fail() {
  printf 'gpu_session.sh: %s\n' "$1" >&2
  exit 2
}

# --- sections: each writes results to $results and logs to its standard output -----------------

# Run a command with the patched torch.
with_patched() {
  PYTHONPATH="$OVERLAY${PYTHONPATH:+:$PYTHONPATH}" "$@"
}

first_step() {
  local name=$1
  shift
  local small=()
  if [[ -n $SMOKE ]]; then
    small=(--hidden 32 --head-dim 16 --layers 1 --lengths "128,256" --backend aot_eager)
  fi
  "$PYTHON" "$root/benchmarks/first_step.py" --patched-pythonpath "$OVERLAY" \
    --json "$results/$name.json" "$@" "${small[@]}"
}

# First the reference, then what is compared, threads and processes in turns, then the rest.
run_drafters() {
  local name=$1 preset=$2 devices=$3 steps=$4 targets=${5:-} status=0
  local began=$SECONDS
  if [[ -n $SMOKE ]]; then
    preset=tiny
    steps=8
  fi
  local options=(--patched-pythonpath "$OVERLAY" --preset "$preset" --drafters "$devices"
    --json "$results/$name.json" --resume --shared-caches
    --steps "$steps" --hang-timeout 75 --run-timeout 130 ${targets:+--targets "$targets"})
  local part
  for part in reference:1 patched-threads,processes:3 all:3; do
    local left=$((limit - 15 - (SECONDS - began)))
    if ((left < 20)); then
      status=4
      break
    fi
    local arms=(--arms "${part%:*}")
    if [[ ${part%:*} == all ]]; then
      arms=()
    fi
    "$PYTHON" "$root/benchmarks/drafters.py" "${options[@]}" "${arms[@]}" \
      --repetitions "$(times_or_one "${part#*:}")" --budget "$left" || status=$?
  done
  return "$status"
}

times_or_one() {
  echo "${SMOKE:-$1}"
}

# A set of devices: GPU (0, 1 or 0-1) and how many workers on each.
on() {
  if [[ -n $SMOKE ]]; then
    echo "cpux$2"
  else
    echo "cuda:$1x$2"
  fi
}

section_setup() {
  local site grow=''
  if ((${GROW:-0} > 0)); then
    "$PYTHON" -c "import numpy; kept = [numpy.ones(2**27) for _ in range($GROW)]" &
    grow=$!
  fi
  site=$("$PYTHON" -c 'import importlib.util as u, os
spec = u.find_spec("torch")
print(os.path.dirname(os.path.dirname(spec.origin)) if spec else "")')
  [[ -n $site ]] || fail "$PYTHON has no torch"
  if [[ ! -f $OVERLAY/complete ]]; then
    rm -rf "$OVERLAY"
    mkdir -p "$OVERLAY"
    # build.sh renames new files into place, so the files that are linked stay as they are.
    if ! cp -al "$site/torch" "$OVERLAY/" 2>/dev/null; then
      rm -rf "$OVERLAY/torch"
      cp -a "$site/torch" "$OVERLAY/"
    fi
    cp -a "$site"/torch-*.dist-info "$OVERLAY/"
    # torch's libraries look for CUDA's beside torch.
    if [[ -d $site/nvidia ]]; then
      ln -s "$site/nvidia" "$OVERLAY/nvidia"
    fi
    touch "$OVERLAY/complete"
  fi
  PYTHONPATH=$OVERLAY "$root/build.sh" apply
  # As pip does; without, each process and each compile worker compiles what it imports.
  "$PYTHON" -m compileall -q -j 0 "$site" "$OVERLAY/torch" >"$logs/compileall.log" 2>&1 || true
  local check='import torch, torch._dynamo, torch._inductor.compile_fx
import torch.nn.attention.flex_attention
print(torch.__version__, torch.__file__, torch.cuda.device_count(), "GPUs")'
  "$PYTHON" -c "$check"
  with_patched "$PYTHON" -c "$check"
  if [[ -n $grow ]]; then
    wait "$grow" || echo "memory did not grow to $GROW GiB"
  fi
}

section_doctor() {
  local status=0
  echo "stock:"
  "$root/build.sh" doctor || status=$?
  echo "exit status $status"
  echo "patched:"
  PYTHONPATH=$OVERLAY "$root/build.sh" doctor
}

section_tests() {
  "$PYTHON" "$root/benchmarks/gpu_tests.py" --patched-pythonpath "$OVERLAY" \
    --json "$results/torch_tests.json" --logs "$logs/tests" --jobs "$((cores > 8 ? cores / 3 : 2))" \
    --test-timeout 180 --file-timeout "$((limit - 30))" ${SMOKE:+--select tracing_flag}
}

section_threads1() {
  local side=$((cores > 4 ? cores / 4 : 1)) status=0 sets
  sets=("$(on 0 3)" "$(on "$last_gpu" 6)")
  first_step threads1-stock --devices "${sets[0]}" --arms stock-threads --timeout 90 \
    --repetitions "$(times_or_one 2)" --side-by-side 2 &
  first_step threads1-workaround --devices "${sets[0]}" --arms stock-workaround --timeout 170 \
    --repetitions "$(times_or_one 3)" --side-by-side 3 &
  first_step threads1 --devices "${sets[@]}" --arms patched-threads --caches off on --layers 1 \
    --repetitions "$(times_or_one "${REPETITIONS:-10}")" --side-by-side "$side" --timeout 240 \
    --budget "$((limit - 90))" || status=$?
  wait
  return "$status"
}

section_threads2() {
  local side=$((cores > 5 ? cores / 5 : 1)) status=0
  first_step threads2-stock --devices "$(on 0-1 1)" --arms stock-threads,stock-workaround \
    --timeout 90 --repetitions "$(times_or_one 2)" --side-by-side 2 &
  first_step threads2 --devices "$(on 0-1 1)" "$(on 0-1 3)" --arms patched-threads \
    --caches off on --layers 1 --repetitions "$(times_or_one "${REPETITIONS:-10}")" --side-by-side "$side" \
    --timeout 240 --budget "$((limit - 90))" || status=$?
  wait
  return "$status"
}

# One step is enough to tell when it ends.
section_firststep() {
  local more=(--repetitions "$(times_or_one 3)" --lengths 512 --timeout 90) status=0
  local began=$SECONDS
  first_step firststep-shared --code shared "${more[@]}" --budget "$((limit / 2 - 25))" \
    --devices "stock-threads=$(on 0 1)" "patched-threads=$(on 0 3)" || status=$?
  if ((gpus > 1)); then
    first_step firststep-own --code own --caches empty off "${more[@]}" \
      --budget "$((limit - 25 - (SECONDS - began)))" \
      --devices "patched-threads=$(on 0-1 1)" "processes=$(on 0-1 1)" || status=$?
  fi
  return "$status"
}

section_firstmore() {
  local sets
  sets=("$(on 0 3)" "$(on 0 1)" "$(on 0 6)" "$(on 0 2)")
  if ((gpus > 1)); then
    sets+=("$(on 0-1 1)" "$(on 0-1 3)")
  fi
  first_step firstmore --devices "${sets[@]}" --code own --lengths 512 --caches off on \
    --arms patched-threads,processes --repetitions 1 --timeout 90 --budget "$((limit - 40))" \
    --side-by-side "$((cores > 8 ? cores / 8 : 1))"
}

section_stress() {
  local device=cuda ops=8000 status=0
  if [[ -n $SMOKE ]]; then
    device=cpu ops=100
  fi
  local options=(--device "$device" --ops "$ops" --seed 1 --timeout 60 --quiet)
  "$PYTHON" "$root/benchmarks/stress.py" "${options[@]}" --label "stock, $device" \
    --json "$results/stress-stock.json" >"$logs/stress-stock.log" 2>&1 &
  with_patched "$PYTHON" "$root/benchmarks/stress.py" "${options[@]}" \
    --label "patched, $device" --json "$results/stress-patched.json" || status=$?
  wait || true  # stock is expected to fail
  return "$status"
}

train() {
  local name=$1 preset=$2 devices=$3 steps=200
  if [[ -n $SMOKE ]]; then
    preset=tiny
    steps=8
  fi
  cd "$root"
  with_patched "$PYTHON" -m repro.dflash.train --preset "$preset" --drafters "$devices" \
    --steps "$steps" --hang-timeout 100 --metrics "$results/$name.jsonl"
}

section_train1() { train train1 qwen2.5-0.5b "$(three_on_one)"; }
section_train2() { train train2 qwen3-4b "$(one_on_each)"; }

three_on_one() {
  if [[ -n $SMOKE ]]; then echo cpu,cpu,cpu; else echo cuda:0,cuda:0,cuda:0; fi
}

one_on_each() {
  if [[ -n $SMOKE ]]; then echo cpu,cpu; else echo cuda:0-1; fi
}

section_drafters1() { run_drafters drafters1 "${DRAFTERS1:-qwen2.5-0.5b}" "$(three_on_one)" 60; }
section_drafters2() { run_drafters drafters2 qwen3-4b "$(one_on_each)" 48; }
section_drafters3() { run_drafters drafters3 qwen2.5-0.5b "$(one_on_each)" 120; }
section_drafters8() {
  if [[ -n $SMOKE ]]; then
    run_drafters drafters8 qwen3-4b cpu,cpu,cpu 48 cpu,cpu,cpu,cpu,cpu
  else
    run_drafters drafters8 qwen3-4b cuda:5-7 48 cuda:0-4
  fi
}

# Each device takes three entries of the code that the drafters share.
section_limit() {
  local preset=qwen2.5-0.5b steps=60
  if [[ -n $SMOKE ]]; then
    preset=tiny
    steps=8
  fi
  TORCH_LOGS=recompiles "$PYTHON" "$root/benchmarks/drafters.py" --patched-pythonpath "$OVERLAY" \
    --preset "$preset" --drafters "$(one_on_each)" --arms patched-threads,stock-workaround,processes \
    --train-options "--recompile-limit 4" --repetitions 1 --steps "$steps" \
    --hang-timeout 75 --run-timeout 130 --budget "$((limit - 15))" --json "$results/limit.json"
}

# --- running them ------------------------------------------------------------------------------

# Run one section in a process group of its own, within its time; a line for the summary.
run_section() {
  local name=$1 seconds=$2 gpu=$3 began status=0
  began=$(date +%s)
  local environment=()
  if [[ -n $gpu && -z $SMOKE ]]; then
    environment=(CUDA_VISIBLE_DEVICES="$gpu")
  fi
  env "${environment[@]}" OUT="$OUT" OVERLAY="$OVERLAY" \
    timeout --kill-after=15 "$seconds" bash "${BASH_SOURCE[0]}" --section "$name" "$seconds" \
    >"$logs/$name.log" 2>&1 || status=$?
  local what="exit status $status"
  case $status in
    0) what="done" ;;
    124 | 137) what="out of time" ;;
  esac
  printf '%s: %s, %s s\n' "$name" "$what" "$(($(date +%s) - began))" | tee -a "$OUT/summary.txt"
  {
    printf '=== %s: %s\n' "$name" "$what"
    tail -n 40 "$logs/$name.log"
  } >"$logs/$name.tail"
}

pack() {
  local name
  for name in results logs; do
    tar -C "$work" -czf "$work/$name.$BASHPID" "$name" 2>/dev/null || true
    mv -f "$work/$name.$BASHPID" "$OUT/$name.tar.gz"
  done
}

run_group() {
  local section name seconds gpu jobs=() names=()
  for section in ${1//+/ }; do
    IFS=' ' read -r name seconds gpu <<<"$(parse_section "$section")"
    names+=("$name")
    run_section "$name" "$seconds" "${gpu#-}" &
    jobs+=($!)
  done
  wait "${jobs[@]}" || true
  for name in "${names[@]}"; do
    cut -c1-220 "$logs/$name.tail"
  done
  pack
}

# NAME[:SECONDS][@GPU] as three words; the last is - where there is none.
parse_section() {
  local rest=$1 gpu=- seconds=600
  if [[ $rest == *@* ]]; then
    gpu=${rest#*@}
    rest=${rest%@*}
  fi
  if [[ $rest == *:* ]]; then
    seconds=${rest#*:}
    rest=${rest%:*}
  fi
  [[ $gpu =~ ^(-|[0-9]+)$ && $seconds =~ ^[1-9][0-9]*$ ]] || fail "not NAME[:SECONDS][@GPU]: $1"
  declare -F "section_$rest" >/dev/null || fail "no section '$rest' (--help lists them)"
  echo "$rest $seconds $gpu"
}

count_gpus() {
  if [[ -n $SMOKE ]]; then
    echo 2
  elif [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES"
  else
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
  fi
}

case ${1:-} in
  '' | --help | -h)
    usage
    exit 0
    ;;
esac

[[ $OUT == /* ]] || fail "OUT must be an absolute path: $OUT"
# Only the archives and the summary are for taking home.
work=${TMPDIR:-/tmp}/gpu-session-work
results=$work/results
logs=$work/logs
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$work/pycache
gpus=$(count_gpus)
last_gpu=$((gpus > 1 ? 1 : 0))

if [[ $1 == --section ]]; then
  limit=$3
  trap 'wait; exit 124' TERM # once the programs, which get the signal too, have written results
  "section_$2"
  exit
fi

for group in "$@"; do
  for section in ${group//+/ }; do
    parse_section "$section" >/dev/null
  done
done
if [[ -z $SMOKE && $gpus -eq 0 ]]; then
  fail "no GPU here; SMOKE=1 tries the script on the CPU"
fi
mkdir -p "$OUT" "$results" "$logs"
began=$(date +%s)
while sleep 30; do
  pack
done &
packer=$!
trap 'kill "$packer" 2>/dev/null || true' EXIT
run_group setup:300
if ! [[ -f $OVERLAY/complete ]] || ! grep -q GPUs "$logs/setup.log"; then
  fail "setup failed, see above"
fi
for group in "$@"; do
  run_group "$group"
done
printf '\nall: %s s\n' "$(($(date +%s) - began))" | tee -a "$OUT/summary.txt"
cat "$OUT/summary.txt"
