#!/usr/bin/env bash
# How many instructions a call takes on aarch64, counted under qemu: no time is measured.
#
#   scripts/cross_count.sh           needs what scripts/cross_test.sh needs, and a C compiler for this machine
#
# One thread. What the process does besides the call is counted by itself and taken off.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build/aarch64
emulator=${AARCH64_RUN:-qemu-aarch64}
"$root/scripts/cross_test.sh" --build counted

# qemu brings no plugin along; its interface is declared here as far as it is used.
"${CC:-cc}" -shared -fPIC -O2 -o "$build/count.so" -x c - <<'EOF'
#include <stdint.h>
#include <stdio.h>
typedef uint64_t Id;
extern void qemu_plugin_register_vcpu_tb_trans_cb(Id, void (*)(Id, void *));
extern void qemu_plugin_register_vcpu_tb_exec_cb(void *, void (*)(unsigned, void *), int, void *);
extern void qemu_plugin_register_atexit_cb(Id, void (*)(Id, void *), void *);
extern size_t qemu_plugin_tb_n_insns(const void *);
__attribute__((visibility("default"))) int qemu_plugin_version = 1;
static uint64_t count;
static void run(unsigned cpu, void *instructions) { count += (uintptr_t)instructions; }
static void translated(Id id, void *block) {
  qemu_plugin_register_vcpu_tb_exec_cb(block, run, 0, (void *)qemu_plugin_tb_n_insns(block));
}
static void end(Id id, void *data) {
  printf("%llu\n", (unsigned long long)count);
  fflush(stdout);
}
__attribute__((visibility("default"))) int qemu_plugin_install(Id id, const void *info, int argc, char **argv) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, end, NULL);
  return 0;
}
EOF

counted() { "$emulator" -cpu max -plugin "$build/count.so" "$build/counted" "$@" threads=1; }
printf '%-64s %12s %12s %6s\n' "instructions" portable neon_bf16 ratio
for dtype in bfloat16 float32; do
  for call in "queries=512 keys=512 head_dim=64" "queries=512 keys=512 head_dim=128" \
    "queries=512 keys=512 head_dim=64 pass=backward" "queries=512 keys=512 head_dim=128 pass=backward" \
    "queries=1 keys=4096 head_dim=128 heads=8 kv_heads=2"; do
    each=()
    for isa in portable neon_bf16; do
      # shellcheck disable=SC2086 # a call is words
      each+=($(($(counted $call dtype=$dtype isa=$isa what=core) - $(counted $call dtype=$dtype isa=$isa what=nothing))))
    done
    printf '%-64s %12d %12d %6s\n' "$dtype $call" "${each[@]}" "$(awk "BEGIN { printf \"%.2f\", ${each[0]} / ${each[1]} }")"
  done
done
