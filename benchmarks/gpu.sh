#!/usr/bin/env bash
# Measure everything anew on one GPU with FP8, in parts of at most ten minutes each.
#
#   benchmarks/gpu.sh DATA [PART ...]      DATA: folder with the KuaiRand files; default: all parts
#
# Parts: quality (one per model: quality-wukong, ..), flights, census, synthetic, norm-blocks, each-mod, figure-3, figure-8,
# figure-9, speed, latency, tiles, kernels, backward, launch, weights, interaction, pointwise, quantise, gemm, gemm-torchao, gemm-triton, costs, pricing,
# dispatch (one per batch: dispatch-4096, ..; and dispatch-fp32, dispatch-host), deep-gemm (likewise per batch), regret, estimator, startup, plan, overhead, sanitize, training, tests. Each
# part keeps its work and goes on where it stopped when it is run again. `costs` fills the user's cost table, which
# `dispatch` then reads, and exports it to the work folder. JSON goes to benchmarks/results (RESULTS overrides);
# `make results` then rebuilds docs/results.md, on any machine.
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
data="${1:?usage: benchmarks/gpu.sh DATA [PART ...]}"
shift
results="${RESULTS:-$here/results}"
work="${WORK:-loka-paper}"
jobs="${JOBS:-19}"
mkdir -p "$results" "$work"
export OMP_WAIT_POLICY=PASSIVE

compare() { # name, arguments of `loka compare`
  local name="$1"
  shift
  timeout 600 loka compare --device cuda --jobs "$jobs" --time-limit 480 --out "$work/$name" --json "$results/$name.json" "$@"
}
paper() { timeout 600 python "$here/paper/$1.py" --out "$results/$2.json" "${@:3}"; }

# Processes that hold a model on the device at once.
side_by_side() { if [ "$1" -ge 16384 ]; then echo 9; else echo 14; fi; }

part() {
  case "$1" in
    quality-*) compare "quality_kuairand_${1#quality-}" --data "kuairand:$data" --label is_click --model "${1#quality-}" \
      --seeds 16 --batch 512 --eval-from 40000 ;;
    quality) for m in wukong interformer dhen dcn_v2; do part "quality-$m"; done ;;
    census) compare quality_census_wukong --data "parquet:$data/census_income_kdd.parquet,schema=$here/paper/schemas/census_income_kdd.schema.json" \
      --seeds 16 ;;
    flights) compare quality_flights_wukong --data flights --seeds 16 ;;
    synthetic) compare quality_synthetic_wukong --data synthetic:rows=4000000 --seeds 8 --batch 4096 --eval-from 400000 ;;
    figure-3) paper figure_3 figure_3 --data "kuairand:$data" --label is_click --device cuda --jobs "$jobs" --time-limit 480 --work "$work/stress" ;;
    figure-8) paper figure_8 figure_8 --data "kuairand:$data" --label is_click --device cuda --jobs "$jobs" --time-limit 480 --work "$work/figure_8" ;;
    figure-9) paper figure_9 figure_9 --data "kuairand:$data" --label is_click --device cuda --jobs "$jobs" --time-limit 480 --work "$work/stress" ;;
    norm-blocks) paper norm_blocks norm_blocks --data "kuairand:$data" --label is_click --device cuda --jobs "$jobs" --seeds 48 \
      --time-limit 400 --work "$work/norm_blocks" ;;
    each-mod) paper each_mod each_mod --data "kuairand:$data" --label is_click --device cuda --jobs "$jobs" --model dhen \
      --keep 'no_bias=layers.*.interactions.dlrm.mlp.*' --time-limit 480 --work "$work/each_mod" ;;
    figure-6) paper figure_6 figure_6 --data "kuairand:$data" --device cuda ;;
    speed) paper figure_10 figure_10_h200 --budget 540 --jobs 16 ;;
    latency) paper figure_11 figure_11_h200 --budget 300 ;;
    kernels) timeout 600 python "$here/bench_fused_forward.py" --out "$results/fused_forward_h200.json" ;;
    backward) timeout 600 python "$here/bench_fused_backward.py" --out "$results/backward_h200.json" ;;
    launch) timeout 120 python "$here/bench_launch.py" --out "$results/launch_h200.json" ;;
    weights) timeout 120 python "$here/bench_weights.py" --out "$results/weights_h200.json" ;;
    interaction) timeout 300 python "$here/bench_interaction.py" --out "$results/interaction_h200.json" ;;
    gemm) timeout 600 python "$here/bench_gemm.py" --out "$results/gemm_h200.json" --budget-seconds 240 \
      --libraries high_precision torch fbgemm deep_gemm ;;
    gemm-torchao) timeout 600 python "$here/bench_gemm.py" --out "$results/gemm_h200.json" --budget-seconds 240 \
      --libraries torchao ;;
    # Tunes itself for minutes a shape, with the device to itself.
    gemm-triton) timeout 600 python "$here/bench_gemm.py" --out "$results/gemm_h200.json" --budget-seconds 560 \
      --libraries fbgemm_triton ;;
    costs) timeout 600 loka bench --model wukong:base --batch 256 --batch 1024 --batch 4096 --batch 8192 --batch 16384 \
      --libraries loka,torch,torchao,fbgemm,deep_gemm --seconds 540 --export "$work/costs.json" ;;
    pricing) timeout 600 python "$here/bench_pricing.py" --out "$results/pricing_h200.json" ;;
    # The model's parameters and inputs in FP32: TF32 products, and autocast to bf16.
    dispatch-fp32) timeout 600 python "$here/bench_dispatch.py" --scale base --batch 4096 --budget-seconds 420 \
      --params fp32_tf32 fp32_autocast_bf16 --arms bf16_original,bf16_mods,dispatch --side-by-side 6 \
      --out "$results/dispatch_h200.json" ;;
    # The host is the limit: more processes of what is close, whose median counts.
    dispatch-host) timeout 600 python "$here/bench_dispatch.py" --scale base --batch 256 1024 --budget-seconds 420 \
      --arms bf16_mods,dispatch --processes 5 --side-by-side 16 --out "$results/dispatch_h200.json" ;;
    dispatch-*) timeout 600 python "$here/bench_dispatch.py" --scale base --batch "${1#dispatch-}" --budget-seconds 420 \
      --arms bf16_original,bf16_mods,dispatch,torchao:tensorwise,torchao:rowwise,torchao:rowwise_with_gw_hp,fbgemm:rowwise \
      --out "$results/dispatch_h200.json" --side-by-side "$(side_by_side "${1#dispatch-}")" ;;
    # Its kernels are compiled by nvcc at first use, for minutes if one after the other.
    deep-gemm-*) timeout 300 python "$here/compile_deep_gemm.py" --model wukong:base --batch "${1#deep-gemm-}" --processes "$jobs" &&
      timeout 300 python "$here/bench_dispatch.py" --scale base --batch "${1#deep-gemm-}" --budget-seconds 280 \
        --arms deep_gemm:blockwise --ready-seconds 250 --out "$results/dispatch_h200.json" ;;
    deep-gemm) for b in 4096 1024 16384 256 8192; do part "deep-gemm-$b"; done ;;
    dispatch) for b in 4096 1024 16384 256 8192; do part "dispatch-$b"; done ;;
    regret) timeout 600 python "$here/bench_gemm.py" --out "$work/gemm_oracle.json" --fresh --budget-seconds 240 \
      --libraries high_precision torch fbgemm deep_gemm &&
      python "$here/bench_regret.py" --table "$results/gemm_h200.json" --oracle "$work/gemm_oracle.json" \
        --out "$results/dispatch_regret.json" ;;
    estimator) python "$here/bench_estimator.py" --gemm "$results/gemm_h200.json" --out "$results/estimator.json" ;;
    startup) timeout 600 python "$here/bench_startup.py" --out "$results/startup_h200.json" ;;
    plan) timeout 300 python "$here/bench_plan.py" --out "$results/plan_h200.json" &&
      timeout 300 python "$here/bench_plan.py" --linears 300 --out "$results/plan_300_h200.json" ;;
    # A first run leaves its plan in the work folder; with it, another holds more pairs.
    overhead) timeout 600 python "$here/bench_probe_overhead.py" --plan "$work/overhead_plan.json" --pairs 5 \
      --budget-seconds 400 --out "$results/probe_overhead_h200.json" ;;
    tiles) timeout 600 python "$here/tune_tiles.py" --missing --out "$here/../lowering/tiles_h200.json" ;;
    pointwise) timeout 600 python "$here/bench_pointwise.py" --out "$results/pointwise_h200.json" ;;
    quantise) timeout 600 python "$here/bench_quantize.py" --out "$results/quantize_h200.json" ;;
    sanitize) timeout 600 python "$here/sanitize.py" --out "$results/sanitizer_h200.json" ;;
    training) timeout 600 python "$here/bench_train_h200.py" --data "$data" --out "$results/train_h200.json" ;;
    tests) timeout 600 python "$here/run_gpu_tests.py" --out "$results/gpu_tests_h200.json" ;;
    *) echo "unknown part $1" >&2; return 2 ;;
  esac
}

failed=()
for name in "${@:-quality flights census synthetic norm-blocks each-mod figure-3 figure-6 figure-8 figure-9 speed latency tiles kernels backward launch weights interaction pointwise quantise gemm gemm-torchao gemm-triton costs pricing dispatch dispatch-fp32 dispatch-host deep-gemm regret estimator startup plan overhead sanitize training tests}"; do
  for one in $name; do
    echo "== $one"
    part "$one" || failed+=("$one")
  done
done
if [ "${#failed[@]}" -gt 0 ]; then
  echo "did not finish: ${failed[*]}" >&2
  exit 1
fi
