// gdn_prefill in chunks, phase 2: the states, chunk after chunk, and the outputs.
//
// A block takes 32 rows of one head's state through a sequence, with three kinds of warps:
//
//   4 updating  hold the state in registers, as float32 fragments C of 16 rows by half of K. The result of one product,
//               split into two halves, is operand A of the next: so the chain S -> S k -> v - S k -> u -> S stays in
//               registers, but for what the two warps of the same rows tell each other: their parts of S k, and the
//               corrections u (each solves for half of the tokens).
//   4 reading   take S q and the corrections' part of the outputs.
//   1 fetching  keeps up to three chunks in shared memory. Two blocks of the same head form a cluster, where there are
//               clusters; each fetches half of what they share, for both: the L2 cache's bandwidth is the next limit.
//
//   step   updating                        reading
//    1     publish S in two halves, S k    (outputs of the chunk before)
//    2     v - S k, solve, publish u       S q
//    3     S <- d S + sum u k              outputs
//
// with all but the fetching warp meeting between 1 and 2 and between 2 and 3. What takes time is the updating warps'
// chain, some 2000 cycles per chunk.
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

// By one warp, into a stage that is free in all blocks of the cluster.
template <class T, int K>
__device__ __forceinline__ void fetch(Stage<T, K>& to, Barrier& full, const Source<T>& from) {
  const int lane = threadIdx.x % kWarp;
  constexpr int keys = 2 * kChunk * K * sizeof(f16);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const int blocks = cluster_size(), rank = cluster_rank();
  const auto share = [&](void* to, const void* from, int size) {  // this block's, for all of them
    const int first = size / 16 * rank / blocks * 16, end = size / 16 * (rank + 1) / blocks * 16;
    copy_to_all((char*)to + first, (const char*)from + first, end - first, full, blocks);
  };
  if (lane == 0) {
    expect(full, keys + sizeof(HeadChunk));
    share(to.keys, from.keys, keys);
    share(&to.head, from.head, sizeof(HeadChunk));
  }
#else
#pragma unroll 4
  for (int i = lane; i < keys / 16; i += kWarp)
    copy_async(shared_address((uint4*)to.keys + i), (const uint4*)from.keys + i, true);
#pragma unroll 4
  for (int i = lane; i < int(sizeof(HeadChunk) / 16); i += kWarp)
    copy_async(shared_address((uint4*)&to.head + i), (const uint4*)from.head + i, true);
#endif
#pragma unroll
  for (int i = lane; i < kChunk * kSlice / 8; i += kWarp) {
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
    for (int i = 0; i < kStages; ++i) init(exchange.full[i], 2 * kWarp), init(exchange.empty[i], cluster_size());
    publish_barriers();
  }
  cluster_sync();

  const int kind = threadIdx.x < kUpdating ? 0 : threadIdx.x < kMeeting ? 1 : 2;
  Updating<T, K> updating;
  const auto state = [&](auto f) {  // f(value, where it lies from the start of this head's state)
    updating.each([&](float& x, int row, int column) { f(x, (slice * kSlice + row) * K + column); });
  };
  float* const carry = scratch.carry + head * p.V * K;
  int32_t& redo = scratch.redo[(n * p.HV + head) * slices + slice];
  int now = 0, parity = 0;  // of the stage with the chunk at hand
  const auto advance = [&] { now + 1 < stages ? ++now : (now = 0, parity ^= 1); };

  if (kind == 0) {
    state([&](float& x, int64_t at) {
      x = !begins ? carry[at] : !sequence.continued ? 0.0f
          : pool_is_f32 ? ((const float*)pool)[sequence.state + at] : to_f32(((const T*)pool)[sequence.state + at]);
    });
    for (int chunk = 0; chunk < count; ++chunk, advance()) {
      float product[8][4], up0, up1;
      wait(exchange.full[now], parity);
      updating.publish(stage[now], exchange, product);
      meet(kMeeting);
      updating.correct(stage[now], exchange, product, up0, up1);
      meet(kMeeting);
      updating.update(stage[now], exchange, up0, up1);
    }
    float top0, top1;
    updating.tops(top0, top1);
  } else if (kind == 1) {
    const Reading<T, K> reading;
    const int token_stride = int(p.HV * p.V);
    T* out = o + (first_token * p.HV + head) * p.V + slice * kSlice;
    for (int chunk = 0; chunk < count; ++chunk, advance(), out += kChunk * token_stride) {
      float product[4][4];
      wait(exchange.full[now], parity);
      meet(kMeeting);
      if (chunk > 0 && threadIdx.x < kUpdating + cluster_size())  // none is at work with the chunk before
        arrive_at(exchange.empty[now ? now - 1 : stages - 1], threadIdx.x - kUpdating);
      reading.ask(stage[now], exchange, product);
      meet(kMeeting);
      reading.answer(stage[now], exchange, product, out, token_stride, tokens_at(chunk));
    }
  } else {
    for (int chunk = 0; chunk < count; ++chunk, advance()) {
      wait(exchange.empty[now], parity ^ 1);
      const int64_t place = first + chunk - part.first;
      const Source<T> from = {scratch.keys + (place * p.H + sequence.shared) * 2 * kChunk * K,
                              scratch.heads + place * p.HV + head,
                              v.at(first_token + chunk * kChunk, head) + slice * kSlice, v.token_stride,
                              tokens_at(chunk), packs};
      fetch(stage[now], exchange.full[now], from);
    }
  }

  const bool irregular = __syncthreads_or(updating.irregular || (!begins && redo));
  if (begins) clear_uncovered(p, sequence, o, slice * kSlice, kSlice);
  if (threadIdx.x == 0) redo = irregular;
  if (kind == 0 && (!ends || (sequence.kept && !irregular)))
    state([&](float& x, int64_t at) {
      if (!ends) carry[at] = x;
      else if (pool_is_f32) ((float*)pool)[sequence.state + at] = x;
      else ((T*)pool)[sequence.state + at] = from_f32<T>(x);
    });
  cluster_sync();  // the others may still send to this block
}

}  // namespace
