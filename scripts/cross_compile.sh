#!/usr/bin/env bash
# The core, its Python module and its C++ tests, compiled for systems that are not here, each instruction set of each:
#
#   scripts/cross_compile.sh [macos] [windows]        default: both, objects only and without optimisation
#   RUN=/usr/lib/wine/wine64 scripts/cross_compile.sh windows     links the tests, optimised, and runs them there;
#                                                     TILEWISE_EVERY=4 runs one case in four,
#                                                     TILEWISE_LEVEL=-O0 builds them without optimisation
#
# macOS is arm64, Windows x86-64. The compiler is the ziglang package, which has the headers of both. PYTHON names the
# Python that has it (default: .venv, into which this script installs it). The Python module is compiled against the headers
# of that Python, with the sizes of the other system.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
python=${PYTHON:-$root/.venv/bin/python}
for package in ziglang nanobind; do
  "$python" -c "import $package" 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check $package
done

python_module() { # python_module BUILD SYSTEM: csrc/bind/bind.cc, by the command that compiles another file of the core
  local headers=$1/headers
  rm -rf "$headers"
  cp -r "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')" "$headers"
  # Python's own pyconfig.h is of this system. That of macOS has the same sizes.
  if [ "$2" = windows ]; then
    {
      printf '#pragma once\n#include <basetsd.h>\n#include <io.h>\ntypedef long long Py_ssize_t;\n'
      printf '#define %s\n' MS_WINDOWS MS_WIN32 MS_WIN64 NT_THREADS HAVE_DECLSPEC_DLL 'PY_SSIZE_T_MAX LLONG_MAX' 'WITH_THREAD 1' \
        'HAVE_'{PY_SSIZE_T,WCHAR_H,SYS_TYPES_H,SYS_STAT_H}' 1' 'ALIGNOF_LONG 4' 'ALIGNOF_'{SIZE_T,MAX_ALIGN_T}' 8' 'SIZEOF_'{SHORT,WCHAR_T}' 2' \
        'SIZEOF_'{INT,LONG,OFF_T,FLOAT}' 4' 'SIZEOF_'{LONG_LONG,VOID_P,SIZE_T,TIME_T,DOUBLE}' 8'
    } >"$headers/pyconfig.h"
  fi
  "$python" - "$root" "$1" <<'PY'
import json, pathlib, shlex, subprocess, sys
import nanobind
root, build = map(pathlib.Path, sys.argv[1:])
commands = json.loads((build / "compile_commands.json").read_text())
(command,) = (each["command"] for each in commands if each["file"].endswith("isa/dispatch.cc"))
words = shlex.split(command)
options = words[: words.index("-o")]
options += ["-include", "cstdio", "-iquote", str(build / "code"), "-DNB_DOMAIN=tilewise"]
options += ["-isystem", str(build / "headers"), "-isystem", nanobind.include_dir()]
file = str(root / "csrc/bind/bind.cc")
sys.exit(subprocess.run([*options, "-o", str(build / "bind.o"), "-c", file]).returncode)
PY
}

[ $# -gt 0 ] || set -- macos windows
for system in "$@"; do
  case $system in
    macos) name=Darwin processor=arm64 target=aarch64-macos.11.0 ;;
    windows) name=Windows processor=AMD64 target=x86_64-windows-gnu ;;
    *) echo "cross_compile: no system is called '$system': macos or windows" >&2; exit 2 ;;
  esac
  # Linking costs minutes the first time: zig then compiles a C++ library for the system.
  if [ -n "${RUN:-}" ]; then level=${TILEWISE_LEVEL:--O3} kind=EXECUTABLE; else level=-O0 kind=STATIC_LIBRARY; fi
  build=$root/build/cross-$system$level-${kind,,}
  mkdir -p "$build"
  # The level stands last, where it wins. Zig would trap where the language leaves a result open.
  printf '#!/bin/sh\nexec "%s" -m ziglang c++ -target %s "$@" %s -fno-sanitize=undefined\n' "$python" "$target" "$level" >"$build/c++"
  printf '#!/bin/sh\nexec "%s" -m ziglang ar "$@"\n' "$python" >"$build/ar"
  printf '#!/bin/sh\nexec "%s" -m ziglang ranlib "$@"\n' "$python" >"$build/ranlib"
  chmod +x "$build/c++" "$build/ar" "$build/ranlib"
  cmake -S "$root" -B "$build" -G Ninja -DCMAKE_SYSTEM_NAME=$name -DCMAKE_SYSTEM_PROCESSOR=$processor \
    -DCMAKE_TRY_COMPILE_TARGET_TYPE=$kind -DCMAKE_INSTALL_NAME_TOOL=/bin/true -DCMAKE_RC_COMPILER=/bin/true -DCMAKE_CXX_COMPILER="$build/c++" \
    -DCMAKE_AR="$build/ar" -DCMAKE_RANLIB="$build/ranlib" -DTILEWISE_PYTHON=OFF -DTILEWISE_TESTS=ON \
    -DTILEWISE_WERROR="${TILEWISE_WERROR:-ON}" >/dev/null
  if [ -n "${RUN:-}" ]; then
    cmake --build "$build" --target core_test
    "$RUN" "$build/core_test.exe" --every "${TILEWISE_EVERY:-1}"
  else
    objects=$(sed -n 's/^build \(CMakeFiles\/[^ :]*\.cc\.o[bj]*\):.*/\1/p' "$build/build.ninja")
    cmake --build "$build" --target $objects
    python_module "$build" "$system"
    printf 'cross_compile: %s: %s objects and the Python module for %s\n' "$system" "$(wc -w <<<"$objects")" "$target"
  fi
done
