// gdn_prefill in chunks, phase 2: the states, chunk after chunk, and the outputs.
//
// A block takes 32 rows of one head's state through a sequence, with two kinds of warps:
//
//   8 updating  four to 16 rows. The state stays in their registers, in float32: each has a quarter of the columns, and
//               corrects a quarter of the chunk's tokens. The four meet between steps, and wait for nobody else: S k of
//               the own columns; v - S k of the own tokens; the same in two halves; u; S <- d S + sum u k.
//   4 reading   take S q and the corrections' part of the outputs, a step or two behind, and keep up to three chunks in
//               shared memory. Two blocks of the same head form a cluster, where there are clusters; each fetches half
//               of what they share, for both: the L2 cache's bandwidth is the next limit.
//
// Twelve warps can have 168 registers each, one more only 128. Per chunk the chain of steps, shared memory (some 370
// KB) and the tensor cores (252 products per scheduler) should need some 2000, 2900 and 1800 cycles, in part at the same
// time; an H200 takes some 5000.
#pragma once
#include "gdn_prefill_warps.cuh"

namespace {

constexpr int kCluster = 2;  // blocks

// Where a chunk of this block's head lies.
template <class T> struct Source {
  const f16* keys;
  const HeadChunk* head;
  const T* values;
  int64_t token_stride;
  int count;    // of tokens
  bool packs;   // values: by 16 bytes
};

// By the reading threads, into a stage that is free in all blocks of the cluster.
template <class T, int K>
__device__ __forceinline__ void fetch(Stage<T, K>& to, Barrier& full, const Source<T>& from) {
  const int thread = threadIdx.x - kUpdating;
  constexpr int keys = 2 * kChunk * K * sizeof(f16);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const int blocks = cluster_size(), rank = cluster_rank();
  const auto share = [&](void* to, const void* from, int size) {  // this block's, for all of them
    const int first = size / 16 * rank / blocks * 16, end = size / 16 * (rank + 1) / blocks * 16;
    copy_to_all((char*)to + first, (const char*)from + first, end - first, full, blocks);
  };
  if (thread == 0) {
    expect(full, keys + sizeof(HeadChunk));
    share(to.keys, from.keys, keys);
    share(&to.head, from.head, sizeof(HeadChunk));
  }
#else
#pragma unroll 4
  for (int i = thread; i < keys / 16; i += kReading)
    copy_async(shared_address((uint4*)to.keys + i), (const uint4*)from.keys + i, true);
#pragma unroll 4
  for (int i = thread; i < int(sizeof(HeadChunk) / 16); i += kReading)
    copy_async(shared_address((uint4*)&to.head + i), (const uint4*)from.head + i, true);
#endif
#pragma unroll
  for (int i = thread; i < kChunk * kSlice / 8; i += kReading) {
    const int token = i / (kSlice / 8), eight = i % (kSlice / 8);
    const bool real = token < from.count;
    const T* at = from.values + (real ? token : 0) * from.token_stride + eight * 8;
    T* place = to.values + value_offset(token, eight);
    if (from.packs) {
      copy_async(shared_address(place), at, real);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) place[j] = real ? at[j] : T(0.0f);
    }
  }
  arrive_after_copies(full);
  arrive(full);
}

// by_chunk: blocks per chunk of the part, which work where a sequence's part begins; else blocks per sequence.
template <class T, int K>
__global__ void __launch_bounds__(kScanThreads, 1) scan_kernel(
    Prefill p, Rows<const T> v, void* pool, bool pool_is_f32, T* o, Scratch scratch, Part part, bool by_chunk,
    int stages, bool packs) {
  extern __shared__ __align__(16) unsigned char memory[];
  Exchange<K>& exchange = *(Exchange<K>*)memory;
  Stage<T, K>* const stage = (Stage<T, K>*)(memory + sizeof(Exchange<K>));
  start_early();

  const int64_t slices = p.V / kSlice, slice = blockIdx.x % slices, head = blockIdx.x / slices % p.HV;
  const int64_t unit = blockIdx.x / slices / p.HV, n = by_chunk ? sequence_of(p, part.first + unit) : unit;
  if (n < 0) return;
  const int64_t first_of_all = first_chunk(p, n);
  if (by_chunk && part.first + unit != max(first_of_all, part.first)) return;
  const Sequence sequence(p, n, head);
  const int64_t chunks = ceil_div<int64_t>(sequence.end - sequence.first, kChunk);
  const int64_t end_of_all = first_of_all + max(chunks, int64_t(1));  // without tokens: one, in which nothing is done
  if (first_of_all >= part.end || end_of_all <= part.first) return;
  const bool begins = first_of_all >= part.first, ends = end_of_all <= part.end;
  const int64_t first = max(first_of_all, part.first);
  const int count = int(min(first_of_all + chunks, part.end) - first);  // of chunks
  const int64_t first_token = sequence.first + (first - first_of_all) * kChunk;
  const auto tokens_at = [&](int chunk) {
    return int(min(sequence.end - first_token - chunk * kChunk, int64_t(kChunk)));
  };

  if (threadIdx.x == 0) {
    exchange.task = Task{sequence, slice, begins, ends};
    for (int i = 0; i < kStages; ++i)
      init(exchange.full[i], 2 * kReading), init(exchange.empty[i], cluster_size() * kScanThreads / kWarp);
    for (RowGroup<K>& x : exchange.rows)
      init(x.published, kParts), init(x.asked, kParts + 2), init(x.corrected, kParts), init(x.answered, 2);
    publish_barriers();
  }
  cluster_sync();

  const int warp = __shfl_sync(kAllLanes, int(threadIdx.x) / kWarp, 0);  // the compiler is to see that it is a warp's
  const bool updates = warp < kUpdating / kWarp;
  Updating<T, K> updating(warp);
  const Task& task = exchange.task;
  const auto state = [&](auto f) {  // f(value, its place in the pool, if it has one, and in what is carried)
    const int64_t at = task.slice * kSlice * K, carried = task.sequence.head * p.V * K + at;
    updating.each([&](float& x, int row, int column) {
      f(x, task.sequence.state + at + row * K + column, scratch.carry + carried + row * K + column);
    });
  };
  const auto redo = [&]() -> int32_t& {
    return scratch.redo[(task.sequence.n * p.HV + task.sequence.head) * (p.V / kSlice) + task.slice];
  };
  int now = 0, parity = 0;  // of the stage with the chunk at hand
  const auto advance = [&] { now + 1 < stages ? ++now : (now = 0, parity ^= 1); };
  const auto leave = [&] {  // this warp has done with the chunk at hand
    __syncwarp();
    if (int(threadIdx.x % kWarp) < cluster_size()) arrive_at(exchange.empty[now], threadIdx.x % kWarp);
  };

  if (updates) {
    state([&](float& x, int64_t at, const float* carry) {
      x = !task.begins ? *carry : !task.sequence.continued ? 0.0f
          : pool_is_f32 ? ((const float*)pool)[at] : to_f32(((const T*)pool)[at]);
    });
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
    T* out = o + (first_token * p.HV + head) * p.V + slice * kSlice;
    const auto fetch_chunk = [&](int chunk, int to) {
      const int64_t place = first + chunk - part.first;
      const Source<T> from = {scratch.keys + (place * p.H + sequence.shared) * 2 * kChunk * K,
                              scratch.heads + place * p.HV + head,
                              v.at(first_token + chunk * kChunk, head) + slice * kSlice, v.token_stride,
                              tokens_at(chunk), packs};
      fetch(stage[to], exchange.full[to], from);
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
      reading.answer(stage[now], x, product, out, token_stride, tokens_at(chunk));
      arrive_warp(x.answered);
      leave();
    }
  }

  const bool irregular = __syncthreads_or(updating.irregular || (!task.begins && redo()));
  if (task.begins) clear_uncovered(p, task.sequence, o, task.slice * kSlice, kSlice);
  if (threadIdx.x == 0) redo() = irregular;
  if (updates && (!task.ends || (task.sequence.kept && !irregular)))
    state([&](float& x, int64_t at, float* carry) {
      if (!task.ends) *carry = x;
      else if (pool_is_f32) ((float*)pool)[at] = x;
      else ((T*)pool)[at] = from_f32<T>(x);
    });
  cluster_sync();  // the others may still send to this block
}

}  // namespace
