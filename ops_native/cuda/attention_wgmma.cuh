// Attention's PTX for sm_90a: barriers in shared memory that copies and warps arrive at, and wgmma, a product by four
// warps together (a warpgroup) that takes its operands from shared memory.
//
// Operands are tiles of panels (chunk_at in attention.cuh), which wgmma knows as 128-byte swizzle. Accumulators and
// operands in registers have the layouts of mma.sync, each warp for its 16 of 64 rows.
#pragma once
#include "attention.cuh"

namespace {

constexpr int kWarpgroup = 4 * kWarp;

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once all copies that this thread has started are there.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of that parity; that of the phase before the first, 1, has ended.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      ::"r"(barrier), "r"(parity)
      : "memory");
}
// Of the threads of one warpgroup
__device__ __forceinline__ void sync_warpgroup(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kWarpgroup) : "memory");
}
// wgmma sees what other instructions, copies too, wrote to shared memory before.
__device__ __forceinline__ void fence_shared_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// A tile that starts at `address`: rows of K-major operands (queries, keys), of which wgmma takes 16 dimensions; with
// `next_panel` the inner index of an MN-major one (values), of which it takes 16 rows. Groups of 8 rows are 1024 bytes
// apart. An address that is further by n bytes is a descriptor greater by n / 16.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int next_panel = 16) {
  return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(next_panel / 16) << 16 | address / 16;
}

__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// No use of these registers moves across.
template <int N> __device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

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
