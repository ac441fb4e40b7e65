#!/usr/bin/env bash
# Real acceptance and real speed of two heads on their target, in engines and in servers:
# bench/run_real.sh TARGET PROMPTS FOLDER [HEAD_PEAGLE HEAD_EAGLE3]
# PROMPTS is a folder with human_eval.jsonl and, for acceptance, mt_bench.jsonl, gsm8k_test.jsonl and spec_bench.jsonl.
# On a CUDA GPU; without one it measures batch 1 on the CPU. Started again, it goes on where it ended.
set -uo pipefail
usage="usage: bench/run_real.sh TARGET PROMPTS FOLDER [HEAD_PEAGLE HEAD_EAGLE3]"
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
folder() { [ -d "$1" ] || { echo "no folder $1"; echo "$usage"; exit 2; } >&2; realpath "$1"; }
[ $# -ge 3 ] || { echo "$usage" >&2; exit 2; }
target=$(folder "$1") && prompts=$(folder "$2") && peagle=$(folder "${4:-$root/examples/heads/smollm2-135m-peagle}") &&
  eagle3=$(folder "${5:-$root/examples/heads/smollm2-135m-eagle3}") && mkdir -p "$3" && out=$(folder "$3") || exit 2
[ -f "$prompts/human_eval.jsonl" ] || { echo "no $prompts/human_eval.jsonl"; echo "$usage"; exit 2; } >&2
python=$(command -v "${PYTHON:-python3}") && python=$(realpath -s "$python") || { echo "no ${PYTHON:-python3}" >&2; exit 2; }
cd "$root" || exit 2
sets=()
for name in human_eval mt_bench gsm8k_test spec_bench; do
  if [ -f "$prompts/$name.jsonl" ]; then sets+=(--prompts "$name=$prompts/$name.jsonl"); else echo "left out: $name (no $prompts/$name.jsonl)"; fi
done
sweep() {
  "$python" bench/sweep.py --out "$out/sweep.json" --continue --target "$target" --head-peagle "$peagle" \
    --head-eagle3 "$eagle3" --prompts "$prompts/human_eval.jsonl" "$@" || worst=$?
}
worst=0
if [ -e /dev/nvidia0 ]; then
  "$python" bench/acceptance.py --target "$target" --peagle "$peagle" --eagle3 "$eagle3" --k 1,3,5,7,10 "${sets[@]}" \
    --long-code 8 --limit 120 --concurrency 128 --engine mem_fraction_static=0.9 --out "$out/acceptance.json" || worst=$?
  sweep --k 7 3 5 1 10 --profile 1 --interleave
  "$python" bench/serve.py --out "$out/serve.json" --target "$target" --peagle "$peagle" --eagle3 "$eagle3" \
    --prompts "$prompts/human_eval.jsonl" --k 7 || worst=$?
else
  sweep --device cpu --k 3 5 7 --concurrency 1 --prompts-per-cell 12 --output-tokens 96 --profile --repeats 1
fi
"$python" bench/report.py "$out/sweep.json" --out "$out/report" || worst=$?
exit $worst
