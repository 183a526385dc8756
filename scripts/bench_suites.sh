#!/usr/bin/env bash
# Measures what benchmarks/README.md shows of the suites, one after the other: scripts/bench_suites.sh FOLDER [PYTHON]
# Minutes are budgets: a suite that has spent its own leaves out what is longest, and says so. Together some 50, on a
# machine that does nothing else. A suite that fails ends it; what is done is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/bench_suites.sh FOLDER [PYTHON]}
python=${2:-.venv/bin/python}
export OMP_WAIT_POLICY=PASSIVE

bench() {
  echo "== $*"
  PYTHONPATH=src:lab/src "$python" -m tilelab.bench "$@" --out "$out" > /dev/null
}

bench accuracy --minutes 2 --lengths 128,512,2048,8192
bench memory --minutes 3 --lengths 128,512,2048,8192
bench speed --minutes 10 --lengths 128,512,2048,8192,32768
bench paper --minutes 9 --dtype float32 --lengths 128,256,512,1024,2048,4096,8192
bench models --minutes 9 --dtype bfloat16 --lengths 512,2048 --no-flex
bench variants --minutes 4 --dtype float32
bench widths --minutes 4
bench doors --minutes 5 --dtype float32 --dtype bfloat16 --dtype float16 --lengths 128,2048,16384
bench lists --minutes 6 --dtype float32 --lengths 65536 --no-flex
bench list-memory --minutes 10 --dtype float32 --lengths 4096,8192,16384,32768

# Of every page the figures that the README shows.
drawn=$(mktemp -d)
trap 'rm -rf "$drawn"' EXIT
for suite in paper memory speed variants; do
  PYTHONPATH=src:lab/src "$python" -m tilelab.bench show "$out/$suite.json" --figures "$drawn" > /dev/null
done
# Forward and backward of the paper; the double peak, and training; forward, full, in the first dtype; all variants.
for figure in paper-0 memory-0 memory-4 speed-0 variants-bars-float32; do
  if [ -f "$drawn/$figure.svg" ]; then cp "$drawn/$figure.svg" "$out/"; else echo "no figure $figure"; fi
done
PYTHONPATH=src:lab/src "$python" scripts/readme_table.py
