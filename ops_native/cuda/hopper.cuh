// sm_90a's PTX that attention and the matrix products share: barriers in shared memory, which warps and copies arrive
// at, the registers that warps hand to each other, and what goes around wgmma: a product by four warps together, a
// warpgroup, that takes operands from shared memory.
#pragma once
#include "copies.cuh"

namespace {

constexpr int kWarpgroup = 4 * kWarp;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

struct BarrierAddress {
  uint32_t value;
  __device__ __forceinline__ BarrierAddress(uint32_t address) : value(address) {}
  __device__ __forceinline__ BarrierAddress(const uint64_t* barrier) : value(shared_address(barrier)) {}
};

__device__ __forceinline__ void init_barrier(BarrierAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier.value), "r"(arrivals) : "memory");
}
// Barriers just initialised are seen by the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(BarrierAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier.value) : "memory");
}
// Arrives, for a phase that also waits for that many bytes.
__device__ __forceinline__ void arrive_expecting(BarrierAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier.value), "r"(bytes) : "memory");
}
// Arrives once all copies that this thread has started are there.
__device__ __forceinline__ void arrive_after_copies(BarrierAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier.value) : "memory");
}
// Waits for the end of the phase of that parity; that of the phase before the first, 1, has ended.
__device__ __forceinline__ void wait_barrier(BarrierAddress barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      ::"r"(barrier.value), "r"(parity)
      : "memory");
}
// Of the threads of one warpgroup; barrier 0 is __syncthreads()'.
__device__ __forceinline__ void sync_warpgroup(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kWarpgroup) : "memory");
}

template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// An operand of 128-byte rows, swizzled (piece i of 16 bytes lies at i ^ row % 8), that starts at `address`, its groups
// of eight rows 1024 bytes apart: of a K-major one, wgmma takes 16 of k; with `next_panel`, it is MN-major, and wgmma
// takes 16 rows. An address that is further by n bytes is a descriptor greater by n / 16.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, int next_panel = 16) {
  return uint64_t(1) << 62 | uint64_t(1024 / 16) << 32 | uint64_t(next_panel / 16) << 16 | address / 16;
}

// wgmma sees what other instructions, copies too, wrote to shared memory before.
__device__ __forceinline__ void fence_shared_for_wgmma() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// No use of these registers, which wgmma adds up in, moves across.
template <int N> __device__ __forceinline__ void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

#endif

}  // namespace
