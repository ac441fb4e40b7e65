#!/usr/bin/env bash
# The whole sweep and its report: bench/run_sweep.sh FOLDER [more options of sweep.py]. Started again, it goes on where it ended.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: bench/run_sweep.sh FOLDER [options of sweep.py]}
shift
python=${PYTHON:-python3}
sweep() { "$python" bench/sweep.py --out "$out/sweep.json" --continue "$@"; }
mkdir -p "$out"
sweep --must-have "$@"
sweep "$@"
sweep --vocab full --k 3 7 "$@"
sweep --preset blog --k 3 7 "$@"
"$python" bench/report.py "$out/sweep.json" --out "$out/report"
