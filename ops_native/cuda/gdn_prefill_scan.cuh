// gdn_prefill in chunks, phase 2 by mma.sync, where there is no wgmma: the states, chunk after chunk, and the outputs.
//
// A block takes 32 rows of one head's state through a sequence, with two kinds of warps:
//
//   8 updating  four to 16 rows. The state stays in their registers, in float32: each has a quarter of the columns, and
//               corrects a quarter of the chunk's tokens. The four meet between steps, and wait for nobody else: S k of
//               the own columns; v - S k of the own tokens; the same in two halves; u; S <- d S + sum u k.
//   4 reading   take S q and the corrections' part of the outputs, a step or two behind, and keep up to three chunks in
//               shared memory.
//
// Twelve warps can have 168 registers each, one more only 128. Per chunk the chain of steps, shared memory (some 370
// KB) and the tensor cores (252 products per scheduler) should need some 2000, 2900 and 1800 cycles, in part at once;
// an H200, before it had its own form, took some 5000.
#pragma once
#include "gdn_prefill_warps.cuh"

namespace {

// By the reading threads, into a stage that is free.
template <class T, int K>
__device__ __forceinline__ void fetch(Stage<T, K>& to, Barrier& full, const Source<T>& from) {
  const int thread = threadIdx.x - kUpdating;
  constexpr int keys = 2 * kChunk * K * sizeof(f16);
#pragma unroll 4
  for (int i = thread; i < keys / 16; i += kReading)
    copy_async(shared_address((uint4*)to.keys + i), (const uint4*)from.keys + i, true);
#pragma unroll 4
  for (int i = thread; i < int(sizeof(HeadChunk) / 16); i += kReading)
    copy_async(shared_address((uint4*)&to.head + i), (const uint4*)from.head + i, true);
  fetch_values<kReading>(to.values, thread, from);
  arrive_after_copies(full);
  arrive(full);
}

// by_chunk: see Walk.
template <class T, int K>
__global__ void __launch_bounds__(kScanThreads, 1) scan_kernel(
    Prefill p, Rows<const T> v, void* pool, bool pool_is_f32, T* o, Scratch scratch, Part part, bool by_chunk,
    bool packs, int stages) {
#if !defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  Exchange<K>& exchange = *(Exchange<K>*)memory;
  Stage<T, K>* const stage = (Stage<T, K>*)(memory + sizeof(Exchange<K>));
  start_early();

  const Walk walk(p, part, by_chunk);
  if (!walk.works) return;
  const int count = walk.count;
  if (threadIdx.x == 0) {
    exchange.walk = walk;
    for (int i = 0; i < kStages; ++i)
      init(exchange.full[i], 2 * kReading), init(exchange.empty[i], kScanThreads / kWarp);
    for (RowGroup<K>& x : exchange.rows)
      init(x.published, kParts), init(x.asked, kParts + 2), init(x.corrected, kParts), init(x.answered, 2);
  }
  __syncthreads();

  const int warp = __shfl_sync(kAllLanes, int(threadIdx.x) / kWarp, 0);  // the compiler is to see that it is a warp's
  const bool updates = warp < kUpdating / kWarp;
  Updating<T, K> updating(warp);
  int now = 0, parity = 0;  // of the stage with the chunk at hand
  const auto advance = [&] { now + 1 < stages ? ++now : (now = 0, parity ^= 1); };
  const auto leave = [&] { arrive_warp(exchange.empty[now]); };  // this warp is done with the chunk at hand

  if (updates) {
    exchange.walk.template load<T, K>(updating, p, pool, pool_is_f32, scratch);
    RowGroup<K>& x = exchange.rows[updating.rows];
    if (count > 0) {
      wait(exchange.full[0], 0);
      updating.load_keys(stage[0]);
    }
    for (int chunk = 0; chunk < count; ++chunk, advance())
      updating.step(stage[now], x, chunk % 2, [&] {
        leave();
        if (chunk + 1 == count) return;
        const int next = now + 1 < stages ? now + 1 : 0;
        wait(exchange.full[next], next ? parity : parity ^ 1);
        updating.load_keys(stage[next]);
      });
    updating.finish(x);
  } else {
    const Reading<T, K> reading(warp - kUpdating / kWarp);
    RowGroup<K>& x = exchange.rows[reading.rows];
    const int token_stride = int(p.HV * p.V);
    T* out = o + (walk.first_token * p.HV + walk.sequence.head) * p.V + walk.slice * kSlice;
    const auto fetch_chunk = [&](int chunk, int to) {
      fetch(stage[to], exchange.full[to], Source<T>::template of<K>(walk, chunk, p, part, scratch, v, packs));
    };
    for (int chunk = 0; chunk < min(stages, count); ++chunk) fetch_chunk(chunk, chunk);
    for (int chunk = 0; chunk < count; ++chunk, advance(), out += kChunk * token_stride) {
      float product[4][4];
      wait(exchange.full[now], parity);
      wait(x.published, chunk % 2);
      reading.ask(stage[now], x, product);
      arrive_warp(x.asked);
      if (chunk > 0 && chunk - 1 + stages < count) {  // into the stage of the chunk before, which most have left
        const int before = now ? now - 1 : stages - 1;
        wait(exchange.empty[before], now ? parity : parity ^ 1);
        fetch_chunk(chunk - 1 + stages, before);
      }
      wait(x.corrected, chunk % 2);
      reading.answer(stage[now], x, product, out, token_stride, walk.tokens_at(chunk));
      arrive_warp(x.answered);
      leave();
    }
  }

  exchange.walk.template finish<T, K>(updating, updates, p, pool, pool_is_f32, o, scratch);
#endif
}

}  // namespace
