// Asks the processor itself. The compiler's __builtin_cpu_supports needs a table of its runtime library that zig's
// toolchain cannot link into a shared object.
#include "base/processor.h"

#if defined(TILEWISE_X86)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace tilewise {

#if defined(TILEWISE_ARM)
// A process may not read the processor's own registers: the system says what they hold.
static bool detect_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1 << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found != 0;
#else
  return false;
#endif
}

bool has_neon_bf16() {
  static const bool found = detect_bf16();
  return found;
}
bool tiles_refused() { return false; }
bool has_fast_dots() { return has_neon_bf16(); }
bool has_line_streams() { return false; }

#else
namespace {

struct Features {
  bool amd = false, avx2 = false, avx512 = false, avx512_bf16 = false, tiles = false, byte_tables = false;
  bool tiles_refused = false;
};

#if defined(TILEWISE_SOFTWARE_TILES)
constexpr bool kSoftwareTiles = true;
#else
constexpr bool kSoftwareTiles = false;
#endif

// The system saves the contents of tiles only for processes that ask (Linux 5.16 on), once for all their threads.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Features detect() {
  Features found;
  unsigned a, b, c, d;
  const auto bit = [](unsigned word, int index) { return (word >> index & 1) != 0; };
  if (!__get_cpuid(0, &a, &b, &c, &d)) return found;
  found.amd = b == signature_AMD_ebx;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = bit(c, 12), f16c = bit(c, 29), system_saves = bit(c, 27);
  if (!system_saves || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  unsigned saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const bool ymm = (saved & 0x06) == 0x06, zmm = (saved & 0xe6) == 0xe6;
  found.avx2 = ymm && fma && f16c && bit(b, 5) && bit(b, 8);
  found.avx512 = found.avx2 && zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);
  const bool integer_dots = bit(c, 11);  // AVX512_VNNI. Every processor with AVX512_BF16 has it.
  found.byte_tables = found.avx512 && integer_dots && bit(c, 1);
  const bool tiles = bit(d, 22) && bit(d, 24), tiles_saved = (saved & 0x60000) == 0x60000;  // with bfloat16 products
  if (found.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = bit(a, 5) && integer_dots;
  if (found.avx512_bf16 && found.byte_tables && (kSoftwareTiles || tiles)) {
    found.tiles = kSoftwareTiles || (tiles_saved && may_use_tiles());
    found.tiles_refused = !found.tiles;
  }
  return found;
}

const Features& features() {
  static const Features found = detect();
  return found;
}

}  // namespace

bool has_avx2() { return features().avx2; }
bool has_avx512() { return features().avx512; }
bool has_avx512_bf16() { return features().avx512_bf16; }
bool has_tiles() { return features().tiles; }
bool tiles_refused() { return features().tiles_refused; }
bool has_byte_tables() { return features().byte_tables; }
bool has_fast_dots() { return features().amd && features().avx512_bf16; }
bool has_line_streams() { return features().amd; }
#endif

}  // namespace tilewise
