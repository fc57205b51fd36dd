// AMX: whether this process may use it, its instructions, and the tiles of a thread.
#pragma once
#include "opshim.h"

#if defined(__AVX512BW__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define OPSHIM_AMX 1

namespace OPSHIM_ISA {

// The processor has AMX, the kernel grants it to this process, and OPSHIM_CPU_AMX is not 0.
inline bool have_amx() {
  static const bool have = [] {
    const char* wish = std::getenv("OPSHIM_CPU_AMX");
    if (wish && wish[0] == '0') return false;
    unsigned a, b, c, d = 0;
    constexpr unsigned bf16_and_tiles = 1u << 22 | 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & bf16_and_tiles) != bf16_and_tiles) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return have;
}

// Written out, since compilers' own intrinsics do not say that tiles are read from memory just written.
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"(int64_t(stride)) : "memory")
#define TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// Tiles of 16 rows by 64 bytes for the current thread, while it lives. Other code of the process may shape its own.
struct TileScope {
  TileScope() {
    if (!have_amx()) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));
  }
  ~TileScope() {
    if (have_amx()) asm volatile("tilerelease" ::);
  }
};

#else  // no AMX in this build

namespace OPSHIM_ISA {

inline constexpr bool have_amx() { return false; }
struct TileScope {
  TileScope() {}
};

#endif

}  // namespace OPSHIM_ISA
