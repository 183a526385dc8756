#!/usr/bin/env bash
# The C++ tests for aarch64: cross-compiled (static), and run under qemu on a processor with bfloat16 dot products and on one
# without. And the Python tests of the CPU kernels, by a Python and a torch for aarch64.
#
#   scripts/cross_test.sh            needs aarch64-linux-gnu-g++ and qemu-aarch64
#                                    (Debian, Ubuntu: apt install g++-aarch64-linux-gnu qemu-user)
#   scripts/cross_test.sh --python [ARGS]    the Python tests, or those that ARGS of pytest name. Needs mmdebstrap, a .venv with the
#                                    Python of Debian 12 (3.11), and 1 GB
#   scripts/cross_test.sh --all [FOLDERS]    the whole default selection of them, folder by folder, those that call the core first.
#                                    It takes hours. It writes each outcome down, and goes on from there where it was stopped
#   scripts/cross_test.sh --build TARGET     builds and runs nothing
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
build=$root/build/aarch64
compiler=${AARCH64_CXX:-aarch64-linux-gnu-g++}
emulator=${AARCH64_RUN:-qemu-aarch64}
mode=${1:-} target=core_test tools=("$compiler" "$emulator" cmake) more=(-DTILEWISE_PYTHON=OFF) python_mode=
case $mode in
  --build) target=$2 ;;
  --python | --all) shift && python_mode=1 target=_core && tools+=(mmdebstrap) ;;
esac

for tool in "${tools[@]}"; do
  command -v "$tool" >/dev/null || { echo "cross_test: $tool is not installed (see the head of this script)" >&2; exit 1; }
done

# ---- a Python for aarch64 -------------------------------------------------------------------------------------------
debian=$build/debian site=$build/site here=$build/python python=$root/.venv/bin/python outcomes=$build/outcomes.tsv
# The last torch whose wheel for aarch64 is built without CUDA. Later ones want NVIDIA's libraries before they load.
torch=2.10.0

get_python() { # Debian's, unpacked and not installed; and what the tests import, each by name: pip would add what an x86-64 needs
  local sources=/etc/apt/sources.list.d/debian.sources packages
  "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    { echo "cross_test: $python is not the Python of Debian 12, 3.11" >&2; exit 1; }
  if [ ! -e "$debian/usr/bin/python3.11" ]; then
    grep -qs bookworm "$sources" || sources=
    rm -rf "$debian" && mkdir -p "$build"
    mmdebstrap --quiet --variant=extract --architectures=arm64 --include=python3.11,libpython3.11-dev,libstdc++6,libgomp1 \
      bookworm "$debian" ${sources:+"$sources"}
    cp "$debian"/usr/include/aarch64-linux-gnu/python3.11/pyconfig.h "$debian/usr/include/python3.11/"
  fi
  if [ ! -e "$site/done" ]; then
    rm -rf "$site"
    packages=(filelock fsspec hypothesis iniconfig jinja2 markupsafe mpmath networkx numpy packaging pluggy pygments pytest safetensors
      sortedcontainers sympy typing_extensions)
    "$python" -m pip install --disable-pip-version-check --quiet --target "$site" --no-deps --only-binary=:all: \
      --implementation cp --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
      --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
      -c <(grep -v '^torch==' "$root/constraints.txt") "torch==$torch" "${packages[@]}"
    touch "$site/done"
  fi
}

install_python() { # the package beside its core, and a Python that tests can start again by the name that it has itself
  rm -rf "$here"
  mkdir -p "$here"
  cp -r "$root/src/tilewise" "$build"/_core.*.so "$here"
  mv "$here"/_core.*.so "$here/tilewise/"
  cat >"$here/python3" <<END
#!/bin/sh
export PYTHONHOME="$debian/usr" PYTHONPATH="$here:$site:$root/lab/src:$root/scripts" OMP_NUM_THREADS=1 CXX="$(command -v "$compiler")"
unset PYTHONDONTWRITEBYTECODE
exec "$(command -v "$emulator")" -cpu max -L "$debian" -0 "$here/python3" "$debian/usr/bin/python3.11" "\$@"
END
  chmod +x "$here/python3"
}

python_tests() {
  (cd "$root" && "$here/python3" -m pytest -q -p no:cacheprovider -m "not slow and not thorough" "$@")
}

all_python_tests() { # one process a folder; a folder's tests without those of the folders in it
  local folder failed=0
  [ $# -gt 0 ] || set -- tests/kernels/cpu tests/kernels tests/engine tests/variants tests/serving tests/sparse tests/nn tests/plan \
    tests/reference tests/compat tests tests/distributed tests/integrations tests/fuzz $(cd "$root" && find tests/lab -name 'test_*.py' -printf '%h\n' | sort -u)
  export TILEWISE_OUTCOMES=$outcomes
  [ ! -e "$outcomes" ] || echo "cross_test: goes on after $(wc -l <"$outcomes") lines of $outcomes (remove it to begin anew)"
  for folder; do
    echo "cross_test: $folder"
    # Code 5: no test is left to run.
    python_tests -p cross_progress "$root/$folder"/test_*.py || [ $? = 5 ] || failed=1
  done
  # A test whose tear-down fails has passed before.
  awk -F '\t' '$1 == "began" { begun[$2]; next } $1 == "failed" || !($2 in end) { end[$2] = $1 }
    END { for (name in begun) stopped += !(name in end); for (name in end) count[end[name]]++
      printf "cross_test: %d passed, %d failed, %d skipped, %d expected to fail, %d did not end\n", count["passed"], count["failed"],
        count["skipped"], count["xfailed"], stopped }' "$outcomes"
  return $failed
}

if [ $python_mode ]; then
  get_python
  more=(-DTILEWISE_PYTHON=ON -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$debian/usr/include/python3.11"
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" -DNB_SUFFIX=.cpython-311-aarch64-linux-gnu.so)
fi

# ---- the core, and its tests ----------------------------------------------------------------------------------------
cmake -S "$root" -B "$build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
  -DTILEWISE_TESTS=ON -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}" -DCMAKE_EXE_LINKER_FLAGS=-static "${more[@]}" >/dev/null
cmake --build "$build" --target "$target" --parallel "$(nproc)"
[ "$mode" != --build ] || exit 0
if [ $python_mode ]; then
  install_python
  if [ "$mode" = --all ]; then all_python_tests "$@"; exit; fi
  [ $# -gt 0 ] || set -- tests/kernels/test_exact.py tests/kernels/cpu/test_{decode,expressions}.py -k 'not tiled'
  python_tests "$@"
  exit
fi
"$root/scripts/check_objects.sh" "$build"
# One process a core, each with a share of the tests; TILEWISE_EVERY=4 runs one case in four. What both processors have,
# the second one runs in part.
failed=0 count=$(nproc) every=${TILEWISE_EVERY:-1}
rm -f "$build"/said-*.txt
for cpu in max cortex-a72; do
  processes=()
  for ((i = 0; i < count; i++)); do
    "$emulator" -cpu "$cpu" "$build/core_test" --share "$i" "$count" --every "$every" | tee "$build/said-$cpu-$i.txt" &
    processes+=($!)
  done
  for each in "${processes[@]}"; do wait "$each" || failed=1; done
  every=$((every * 4))
done
awk '/^[0-9]+ passed, / { passed += $1; lost += $3; ended++ }
  END { printf "cross_test: %d passed, %d failed, %d of %d processes ended\n", passed, lost, ended, ARGC - 1 }' "$build"/said-*.txt
exit $failed
