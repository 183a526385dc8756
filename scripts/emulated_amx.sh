#!/usr/bin/env bash
# The tests of the AMX kernels on a processor without AMX: in a machine that Bochs emulates, 50 to 100 times as slow.
# It shows whether results are right, and says nothing of speed.
#
#   scripts/emulated_amx.sh [ARGS]           the C++ tests, by ARGS of core_test: --every 40 (the default), "few queries", ...
#   scripts/emulated_amx.sh --python ARGS    the Python tests that ARGS of pytest name, by the Python and torch of .venv
#
# Needs root, a processor with AVX2, a C++ compiler and Debian's mmdebstrap, cpio, xz-utils and e2fsprogs. It unpacks a guest
# system of 1 GB into build/emulated.
#
# Three things of Bochs 3.0, which Debian 13 has, are worked around here. (3.1 of Debian 14 did not start Linux.)
# - It has no XFD, without which Linux turns tiles off. So Linux starts without them, and a module turns them on.
# - A kernel so started refuses permission to use them. A library that is loaded first answers that question.
# - Its VCVTNE2PS2BF16 takes wrong lanes. So the kernels are compiled with two VCVTNEPS2BF16 in its place.
# And one test fails there on every instruction set: `expressions: functions float64` compares with logarithms of the x87
# unit, which are some units in the last place off in Bochs.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:$root/.venv/bin # the pinned cmake, where the system has none
build=$root/build/emulated python=$root/.venv/bin/python
debian=$build/debian machine=$build/debian/machine start=$build/start
target=core_test more=(-DTILEWISE_PYTHON=OFF)
if [ "${1:-}" = --python ]; then
  shift
  [ $# -gt 0 ] || { echo "emulated_amx: --python needs the tests to run, e.g. tests/test_key_lists.py" >&2; exit 1; }
  target=_core more=(-DTILEWISE_PYTHON=ON -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)")
elif [ $# -eq 0 ]; then
  set -- --every 40
fi
[ "$(id -u)" = 0 ] || { echo "emulated_amx: run it as root: it unpacks a system and works in it" >&2; exit 1; }
for tool in cmake gcc mmdebstrap cpio xz mke2fs; do
  command -v "$tool" >/dev/null || { echo "emulated_amx: $tool is not installed (see the head of this script)" >&2; exit 1; }
done

libraries() { # libraries FOLDER PROGRAM...: what the programs load, by its name, into FOLDER/lib; the loader into FOLDER/lib64
  local folder=$1 path
  shift
  mkdir -p "$folder/lib" "$folder/lib64"
  for path in $(ldd "$@" 2>/dev/null | grep -o '/[^ )]*' | sort -u); do
    case $path in
      */ld-linux-*) cp -L "$path" "$folder/lib64/" ;;
      /lib/* | /usr/lib/*) cp -L "$path" "$folder/lib/" ;;
    esac
  done
}

# ---- the guest system: the emulator, a kernel, and the module that turns tiles on ----------------------------------
if [ ! -e "$machine/tiles.ko" ]; then
  rm -rf "$debian"
  mkdir -p "$build"
  mmdebstrap --quiet --variant=apt --include=bochs,bochsbios,vgabios,linux-image-cloud-amd64,linux-headers-cloud-amd64,gcc,make,isolinux \
    --include=syslinux-common,xorriso,busybox-static,cpio,e2fsprogs trixie "$debian"
  mkdir -p "$machine"
  cat >"$machine/tiles.c" <<'C'
#include <linux/module.h>
static int __init tiles_init(void) {
  u32 low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  asm volatile("xsetbv" : : "a"(low | 3 << 17), "d"(high), "c"(0)); /* the tiles' configuration and their data */
  return 0;
}
module_init(tiles_init);
MODULE_DESCRIPTION("Turn AMX on for the one process that uses it: tiles are not saved between processes.");
MODULE_LICENSE("GPL");
C
  cat >"$machine/permitted.c" <<'C'
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <sys/syscall.h>
long syscall(long number, ...) {
  static long (*real)(long, ...);
  long given[6];
  va_list all;
  va_start(all, number);
  for (int i = 0; i < 6; i++) given[i] = va_arg(all, long);
  va_end(all);
  if (number == SYS_arch_prctl && given[0] == 0x1023) return 0; /* ARCH_REQ_XCOMP_PERM */
  if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
C
  echo 'obj-m := tiles.o' >"$machine/Makefile"
  chroot "$debian" sh -c 'make -s -C /lib/modules/*/build M=/machine modules 2>&1' | grep -v '^Skipping BTF' || true
  [ -e "$machine/tiles.ko" ] || { echo "emulated_amx: the module was not built" >&2; exit 1; }
fi

# ---- the core, without the instruction that Bochs gets wrong ---------------------------------------------------------
cat >"$build/bochs.new" <<'C'
#include <immintrin.h>
#define _mm512_cvtne2ps_pbh(high, low)                                                               \
  ((__m512bh)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(low)),            \
                                (__m256i)_mm512_cvtneps_pbh(high), 1))
C
cmp -s "$build/bochs.new" "$build/bochs.h" || cp "$build/bochs.new" "$build/bochs.h" # a newer one would build everything again
cmake -S "$root" -B "$build/$target" -DTILEWISE_TESTS=ON -DCMAKE_CXX_FLAGS="-include $build/bochs.h" "${more[@]}" >/dev/null
cmake --build "$build/$target" --target "$target" --parallel "$(nproc)"

# ---- what the machine starts with, and its disk ----------------------------------------------------------------------
rm -rf "$start"
mkdir -p "$start"/{bin,dev,disk,proc,sys}
cp "$debian/bin/busybox" "$start/bin/"
cp "$machine/tiles.ko" "$start/"
for module in scsi_common scsi_mod libata ata_piix sd_mod; do
  xz -dc "$(find "$debian"/usr/lib/modules/*/kernel -name "$module.ko.xz")" >"$start/$module.ko"
done
gcc -O1 -shared -fPIC -o "$start/permitted.so" "$machine/permitted.c" -ldl
libraries "$start" "$start/permitted.so"
{
  printf '#!/bin/busybox sh\n/bin/busybox --install -s /bin\n'
  printf 'mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev\n'
  printf 'for module in scsi_common scsi_mod libata ata_piix sd_mod tiles; do insmod /$module.ko; done; sleep 1\n'
} >"$start/init"
disk=
if [ "$target" = core_test ]; then
  strip -o "$start/bin/core_test" "$build/core_test/core_test"
  libraries "$start" "$start/bin/core_test"
  printf 'LD_PRELOAD=/permitted.so core_test --isa avx512_amx%s\n' "$(printf ' %q' "$@")" >>"$start/init"
else
  disk=$build/disk site=$disk/site
  rm -rf "$disk"
  mkdir -p "$site" "$disk"/{bin,dev,proc,sys,tmp}
  prefix=$("$python" -c 'import sys; print(sys.base_prefix)') version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  mkdir -p "$disk$prefix"
  tar -C "$prefix" -cf - --exclude=site-packages --exclude=test --exclude='*.a' bin lib | tar -C "$disk$prefix" -xf -
  (cd "$root/.venv/lib/$version/site-packages" && tar -cf - --exclude='*.a' --exclude=torch/include --exclude=torch/test torch torchgen numpy \
    numpy.libs filelock fsspec hypothesis _hypothesis* iniconfig jinja2 markupsafe mpmath networkx packaging pluggy pygments pytest _pytest \
    py.py sortedcontainers sympy typing_extensions.py safetensors) | tar -C "$site" -xf -
  (cd "$root" && tar -cf - --exclude=__pycache__ src lab tests scripts docs examples pyproject.toml) | tar -C "$site" -xf -
  cp "$build/_core"/_core.*.so "$site/src/tilewise/"
  libraries "$disk" "$disk$prefix/bin/$version" "$disk$prefix/lib/$version"/lib-dynload/*.so "$site"/torch/lib/*.so "$site"/src/tilewise/*.so
  cp "$debian/bin/busybox" "$disk/bin/"
  cp "$start/permitted.so" "$disk/"
  {
    printf 'export PATH=%s/bin:/bin HOME=/tmp OMP_NUM_THREADS=1 LD_PRELOAD=/permitted.so PYTHONDONTWRITEBYTECODE=1\n' "$prefix"
    # Torch's own kernels would use instructions that Bochs gets wrong.
    printf 'export ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 PYTHONPATH=/site:/site/src:/site/lab/src LD_LIBRARY_PATH=/site/torch/lib\n'
    printf 'cd /site && exec %s -m pytest -q -p no:cacheprovider --tb=short -rf -m "not slow and not thorough"%s\n' "$version" "$(printf ' %q' "$@")"
  } >"$disk/task"
  "$python" -m compileall -q -j 0 "$disk" >/dev/null 2>&1 || true # what emulated Python would compile each time
  printf 'mount -t ext4 -o ro /dev/sda /disk; for each in dev proc sys; do mount --bind /$each /disk/$each; done\n' >>"$start/init"
  printf 'mount -t tmpfs tmp /disk/tmp; mkdir /disk/dev/shm; mount -t tmpfs shm /disk/dev/shm; chroot /disk /bin/busybox sh /task\n' >>"$start/init"
  rm -f "$machine/disk.img"
  mke2fs -q -F -t ext4 -O ^has_journal -m 0 -d "$disk" "$machine/disk.img" "$(($(du -sm "$disk" | cut -f1) * 5 / 4 + 100))M"
fi
printf 'echo "emulated_amx: ended with $?"; sleep 60\n' >>"$start/init"
chmod +x "$start/init"

# ---- start it from a CD --------------------------------------------------------------------------------------------
rm -rf "$machine/cd"
mkdir -p "$machine/cd"
cp "$debian"/usr/lib/ISOLINUX/isolinux.bin "$debian"/usr/lib/syslinux/modules/bios/ldlinux.c32 "$machine/cd/"
cp "$debian"/boot/vmlinuz-* "$machine/cd/vmlinuz"
(cd "$start" && find . | cpio -o -H newc --quiet | gzip -1) >"$machine/cd/start.gz"
# Without ACPI, which enters a mode of the BIOS that this one has not set up.
printf '%s\n' 'default linux' 'label linux' 'kernel vmlinuz' 'append initrd=start.gz console=ttyS0,115200 quiet acpi=off nosmp mitigations=off clearcpuid=amx_tile' \
  >"$machine/cd/isolinux.cfg"
chroot "$debian" xorriso -as mkisofs -quiet -o /machine/cd.iso -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table /machine/cd \
  2>/dev/null
cat >"$machine/bochsrc" <<END_OF_FILE
config_interface: textconfig
display_library: rfb, options="timeout=0"
cpu: model=sapphire_rapids, count=1, ips=200000000, reset_on_triple_fault=0
memory: guest=2048, host=2048
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata1: enabled=1, ioaddr1=0x170, ioaddr2=0x370, irq=15
ata1-master: type=cdrom, path=/machine/cd.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=/machine/said
log: /machine/log
panic: action=fatal
error: action=ignore
info: action=ignore
${disk:+ata0-master: type=disk, path=/machine/disk.img, mode=volatile}
END_OF_FILE
: >"$machine/said"
chroot "$debian" bochs -q -unlock -f /machine/bochsrc >"$machine/output" 2>&1 </dev/null &
emulator=$!
tail -n +1 -f "$machine/said" &
shown=$!
trap 'kill $emulator $shown 2>/dev/null || true' EXIT
while kill -0 $emulator 2>/dev/null && ! grep -q '^emulated_amx: ended' "$machine/said"; do sleep 2; done
sleep 1
grep -q '^emulated_amx: ended' "$machine/said" || { echo "emulated_amx: the machine stopped; see $machine/log" >&2; exit 1; }
grep -q '^emulated_amx: ended with 0' "$machine/said"
