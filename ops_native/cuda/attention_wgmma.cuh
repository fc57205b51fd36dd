// Attention's wgmma, on operands that are tiles of panels (chunk_at in attention.cuh), which it knows as 128-byte
// swizzle: K-major queries and keys, 16 dimensions at a time, and MN-major values, 16 rows at a time.
// Accumulators and operands in registers have the layouts of mma.sync, each warp for its 16 of 64 rows.
#pragma once
#include "attention.cuh"
#include "hopper.cuh"

namespace {

#define OPSHIM_REGS_32 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15" \
  ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPSHIM_REGS_64 \
  OPSHIM_REGS_32 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
  ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define OPSHIM_REGS_128 \
  OPSHIM_REGS_64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define OPSHIM_OUT_8(c, i) \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define OPSHIM_OUT_32(c, i) OPSHIM_OUT_8(c, i), OPSHIM_OUT_8(c, i + 8), OPSHIM_OUT_8(c, i + 16), OPSHIM_OUT_8(c, i + 24)
#define OPSHIM_OUT_64(c, i) OPSHIM_OUT_32(c, i), OPSHIM_OUT_32(c, i + 32)
#define OPSHIM_OUT_128(c, i) OPSHIM_OUT_64(c, i), OPSHIM_OUT_64(c, i + 64)

// c [64,N] = A B (+ c where `add`), of 16 inner values. `shared`: A and B K-major in shared memory. `mixed`: A in
// registers, B MN-major in shared memory.
template <class T, int N> struct Wgmma;

#define OPSHIM_WGMMA(T, TYPE, N, REGISTERS, R0, R1, R2, R3, R4)                                                \
  template <> struct Wgmma<T, N> {                                                                                 \
    static __device__ __forceinline__ void shared(float (&c)[N / 2], uint64_t a, uint64_t b, int add) {            \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " R2 ", 0;\n"                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                 \
                   " {" OPSHIM_REGS_##REGISTERS "}, " R0 ", " R1 ", add, 1, 1, 0, 0;\n}"                           \
                   : OPSHIM_OUT_##REGISTERS(c, 0)                                                                  \
                   : "l"(a), "l"(b), "r"(add));                                                                    \
    }                                                                                                              \
    static __device__ __forceinline__ void mixed(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b) {          \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                 \
                   " {" OPSHIM_REGS_##REGISTERS "}, {" R0 ", " R1 ", " R2 ", " R3 "}, " R4 ", add, 1, 1, 1;\n}"     \
                   : OPSHIM_OUT_##REGISTERS(c, 0)                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
    }                                                                                                              \
  };
#define OPSHIM_WGMMAS(T, TYPE)                                               \
  OPSHIM_WGMMA(T, TYPE, 64, 32, "%32", "%33", "%34", "%35", "%36")     \
  OPSHIM_WGMMA(T, TYPE, 128, 64, "%64", "%65", "%66", "%67", "%68")    \
  OPSHIM_WGMMA(T, TYPE, 256, 128, "%128", "%129", "%130", "%131", "%132")
OPSHIM_WGMMAS(f16, "f16")
OPSHIM_WGMMAS(bf16, "bf16")

}  // namespace
