#!/usr/bin/env bash
# The tests of the core with other versions of torch and Python: all but those of the lab, of the integrations, of the GPU
# kernels, and of the record that this script writes. Then the key GPU kernels are compiled by the Triton that torch brings.
#
#   scripts/matrix.sh                          the pairs of this system in .ci/matrix.json, which continuous integration
#                                              runs on every system
#   scripts/matrix.sh 2.15.0/3.13 ...          these pairs of torch and Python
#   scripts/matrix.sh --record                 only write the record anew, from the results that are there
#
# Run it by hand before a release. Each pair gets a fresh virtual environment of about 6 GB, since pip's default torch for
# Linux is a CUDA build, and some ten minutes on two cores. Environments are removed after their tests; KEEP=1 keeps them,
# and the next run starts with them. TILEWISE_MATRIX names the folder (default: build/matrix), PYTHONS a folder with other
# interpreters (PYTHONS/*/bin/python3.13). pip's own settings are honoured.
#
# The record is benchmarks/matrix.json (or what MATRIX_RECORD names). A pair that could not be run here is in it too, with
# the reason. It ends with 0 only where every pair ran and passed.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
place=${TILEWISE_MATRIX:-$root/build/matrix}
CHIPS=sm_90a,sm_100a,gfx942 # for which the key GPU kernels are compiled
any_python=$(command -v python3 || command -v python)

needs='import sys, tomllib
projects = [tomllib.load(open(path, "rb"))["project"] for path in sys.argv[1:]]
found = [each for project in projects for each in project["dependencies"]]
found += [each for project in projects for name in ("data", "dev") for each in project["optional-dependencies"].get(name, ())]
print(*(each for each in found if not each.startswith(("tilewise", "tilelab", "torch"))), sep="\n")'

# The words of Python's platform module: what uname says differs on Windows.
read -ra default < <("$any_python" - "$root/.ci/matrix.json" <<'PY'
import json, platform, sys
here = f"{platform.system()}-{platform.machine()}"
print(*("{torch}/{python}".format(**e) for e in json.load(open(sys.argv[1]))["pairs"] if e["system"] == here))
PY
)

say() { printf 'matrix: %s\n' "$*" >&2; }

find_python() { # find_python 3.13: prints an interpreter that can make virtual environments
  local candidate
  for candidate in "python$1" python "${PYTHONS:-$HOME/.pyenv/versions}"/*/bin/"python$1"; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != tuple(map(int, sys.argv[1].split("."))))' \
      "$1" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

python_of() { # python_of FOLDER: the interpreter of a virtual environment
  local candidate
  for candidate in "$1/bin/python" "$1/Scripts/python.exe"; do
    if [ -x "$candidate" ]; then echo "$candidate"; fi
  done
}

prepare() { # prepare FOLDER TORCH BASE: the environment, and the package with its core in it
  local folder=$1 torch=$2 base=$3 python
  [ -d "$folder" ] || "$base" -m venv "$folder" || return 1
  python=$(python_of "$folder")
  # The pinned versions, but for what the pair decides: torch, and the Triton that it brings.
  grep -Ev '^(torch|triton|setuptools)==' "$root/constraints.txt" >"$folder/constraints.txt"
  # A file, and no <(...): a Python of Windows cannot open what bash names there.
  "$python" -c "$needs" "$root/pyproject.toml" "$root/lab/pyproject.toml" >"$folder/requirements.txt" || return 1
  "$python" -m pip install --disable-pip-version-check --quiet -c "$folder/constraints.txt" "torch==$torch" \
    numpy setuptools -r "$folder/requirements.txt" || return 1
  PATH=$(dirname "$python"):$PATH "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation \
    --config-settings=build-dir="$root/build/matrix-$(basename "$folder")" -e "$root" &&
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e "$root/lab"
}

run_pair() { # run_pair TORCH/PYTHON: leaves NAME.xml or NAME.why in the folder of results
  local torch=${1%/*} version=${1#*/} name=torch-${1%/*}-python-${1#*/} base python
  local results=$place/results folder=$place/$name
  mkdir -p "$results"
  rm -f "$results/$name".*
  if ! base=$(find_python "$version"); then
    echo "no Python $version on this machine" >"$results/$name.why"
    return 1
  fi
  say "torch $torch, Python $version"
  if ! prepare "$folder" "$torch" "$base" >"$results/$name.log" 2>&1; then
    echo "could not be installed here" >"$results/$name.why"
    tail -n 20 "$results/$name.log" >&2
    return 1
  fi
  python=$(python_of "$folder")
  "$python" - "$root" >"$results/$name.versions" <<'PY'
import importlib.metadata as m, json, platform, subprocess, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
commit = subprocess.run(["git", "-C", sys.argv[1], "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True).stdout.strip()
import torch
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__, "triton": version("triton"),
    "numpy": version("numpy"), "machine": platform.machine(), "commit": commit}))
PY
  (cd "$root" && env -u TRITON_INTERPRET OMP_WAIT_POLICY=PASSIVE "$python" -m pytest -q -p no:cacheprovider -n auto \
    --dist loadfile --ignore=tests/lab --ignore=tests/integrations --ignore=tests/kernels/gpu --ignore=tests/test_matrix.py \
    --junit-xml="$results/$name.xml" ${MATRIX_ARGS:-} tests) |
    tee "$results/$name.log" | tail -n 40
  local status=${PIPESTATUS[0]}
  # The interpreter is no compiler: what a version of Triton has renamed shows here alone. Spills are no error here: blocks
  # are chosen for the versions that have a baseline.
  if "$python" -c 'import triton' 2>/dev/null; then
    (cd "$root" && "$python" -m tilelab.gate --quick --targets "$CHIPS") >"$results/$name.gate" 2>&1
    if ! tail -n 1 "$results/$name.gate" | grep -q ' kernels, ' || grep -q '^FAIL .*\(Error\|process ended\)' "$results/$name.gate"; then
      status=1
      tail -n 20 "$results/$name.gate" >&2
    fi
  fi
  [ -n "${KEEP:-}" ] || rm -rf "$folder"
  return "$status"
}

record() { # the results that are there, laid over those in the record
  "$any_python" - "$place/results" "${MATRIX_RECORD:-$root/benchmarks/matrix.json}" "$@" <<'PY'
import json, pathlib, sys
import xml.etree.ElementTree as tree

results, record, *pairs = sys.argv[1:]
results, record = pathlib.Path(results), pathlib.Path(record)
found = {e["asked"]: e for e in (json.loads(record.read_text())["pairs"] if record.exists() else [])}
for pair in pairs:
    base = results / "torch-{}-python-{}".format(*pair.split("/"))
    torch, python = pair.split("/")
    xml, why = base.with_name(base.name + ".xml"), base.with_name(base.name + ".why")
    if xml.exists():
        suite = tree.parse(xml).getroot().find("testsuite")
        count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
        bad = count["failures"] + count["errors"]
        entry = {"status": "failed" if bad else "passed"}
        entry |= json.loads(base.with_name(base.name + ".versions").read_text())
        entry |= {"passed": count["tests"] - bad - count["skipped"], "failed": bad, "skipped": count["skipped"]}
        entry |= {"seconds": round(float(suite.get("time"))), "date": suite.get("timestamp")[:10]}
    elif why.exists():
        entry = {"status": "not run here", "why": why.read_text().strip()}
    elif pair not in found:
        entry = {"status": "not run here", "why": "left out"}
    else:
        continue
    found[pair] = {"asked": pair, **entry}
order = sorted(found.values(), key=lambda e: [[int(x) for x in part.split(".")] for part in e["asked"].split("/")])
about = "scripts/matrix.sh: the tests of the core with each torch/Python; skipped tests need a GPU or what is not installed"
record.write_text(json.dumps({"about": about, "pairs": order}, indent=1) + "\n")
for each in order:
    print(each["asked"], each["status"], each.get("passed", ""), each.get("why", ""))
PY
}

if [ "${1:-}" = --record ]; then
  shift
  record "${@:-${default[@]}}"
  exit
fi
[ $# -gt 0 ] || set -- "${default[@]}"
failed=0
for pair in "$@"; do
  if ! [[ $pair =~ ^[0-9.]+/3\.[0-9]+$ ]]; then
    say "error: $pair is no pair of versions such as 2.15.0/3.11"
    exit 2
  fi
  run_pair "$pair" || failed=1
done
record "$@"
exit $failed
