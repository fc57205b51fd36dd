// What the two forms of phase 2 of gdn_prefill share (gdn_prefill_scan.cuh, gdn_prefill_wgmma.cuh): which chunks a
// block takes its slice of a state through, where those lie, and how the state begins and ends.
#pragma once
#include "gdn_prefill_chunks.cuh"

namespace {

// Of a block, in one part.
struct Walk {
  int64_t slice, unit;  // by chunk: the one of this part where the block begins, else the sequence
  Sequence sequence;
  int64_t first, first_token;  // the first chunk, and its first token
  int count;                   // of chunks
  bool works, begins, ends;    // whether there is anything to do; the sequence begins and ends in this part

  // by_chunk: blocks per chunk of the part, which work where a sequence's part begins; else blocks per sequence.
  __device__ __forceinline__ Walk(const Prefill& p, const Part& part, bool by_chunk)
      : slice(blockIdx.x % (p.V / kSlice)), unit(blockIdx.x / (p.V / kSlice) / p.HV),
        sequence(p, by_chunk ? max(sequence_of(p, part.first + unit), int64_t(0)) : unit,
                 blockIdx.x / (p.V / kSlice) % p.HV) {
    const int64_t first_of_all = first_chunk(p, sequence.n);
    const int64_t chunks = ceil_div<int64_t>(sequence.end - sequence.first, kChunk);
    const int64_t end_of_all = first_of_all + max(chunks, int64_t(1));  // without tokens: one, in which nothing is done
    first = max(first_of_all, part.first);
    works = first_of_all < part.end && end_of_all > part.first && !(by_chunk && part.first + unit != first);
    begins = first_of_all >= part.first, ends = end_of_all <= part.end;
    count = int(min(first_of_all + chunks, part.end) - first);
    first_token = sequence.first + (first - first_of_all) * kChunk;
  }
  __device__ __forceinline__ int tokens_at(int chunk) const {
    return int(min(sequence.end - first_token - chunk * kChunk, int64_t(kChunk)));
  }

  // Whether this slice is to be taken token by token.
  __device__ __forceinline__ int32_t& redo(const Prefill& p, const Scratch& scratch) const {
    return scratch.redo[(sequence.n * p.HV + sequence.head) * (p.V / kSlice) + slice];
  }

  // The state, whose elements this thread has are x.each()'s: f(value, row of the slice, column).
  template <class T, int K, class Elements>
  __device__ __forceinline__ void load(Elements& x, const Prefill& p, const void* pool, bool pool_is_f32,
                                       const Scratch& scratch) const {
    const int64_t at = slice * kSlice * K, carried = sequence.head * p.V * K + at;
    x.each([&](float& value, int row, int column) {
      const int64_t of_slice = row * K + column, of_pool = sequence.state + at + of_slice;
      value = !begins ? scratch.came[carried + of_slice] : !sequence.continued ? 0.0f
              : pool_is_f32 ? ((const float*)pool)[of_pool] : to_f32(((const T*)pool)[of_pool]);
    });
  }
  // By all threads, of which some have elements.
  template <class T, int K, class Elements>
  __device__ __forceinline__ void finish(Elements& x, bool has, const Prefill& p, void* pool, bool pool_is_f32, T* o,
                                         const Scratch& scratch) const {
    const bool irregular = __syncthreads_or(x.irregular || (!begins && redo(p, scratch)));
    if (begins) clear_uncovered(p, sequence, o, slice * kSlice, kSlice);
    if (threadIdx.x == 0) redo(p, scratch) = irregular;
    if (!has || (ends && (!sequence.kept || irregular))) return;
    const int64_t at = slice * kSlice * K, carried = sequence.head * p.V * K + at;
    x.each([&](float value, int row, int column) {
      const int64_t of_slice = row * K + column, of_pool = sequence.state + at + of_slice;
      if (!ends) scratch.goes[carried + of_slice] = value;
      else if (pool_is_f32) ((float*)pool)[of_pool] = value;
      else ((T*)pool)[of_pool] = from_f32<T>(value);
    });
  }
};

// Where a chunk of this block's head lies.
template <class T> struct Source {
  const f16* keys;
  const HeadChunk* head;
  const T* values;
  int64_t token_stride;
  int count;   // of tokens
  bool packs;  // values: by 16 bytes

  template <int K>
  __device__ __forceinline__ static Source of(const Walk& walk, int chunk, const Prefill& p, const Part& part,
                                              const Scratch& scratch, const Rows<const T>& v, bool packs) {
    const int64_t place = walk.first + chunk - part.first;
    return {scratch.keys + (place * p.H + walk.sequence.shared) * 2 * kChunk * K,
            scratch.heads + place * p.HV + walk.sequence.head,
            v.at(walk.first_token + chunk * kChunk, walk.sequence.head) + walk.slice * kSlice, v.token_stride,
            walk.tokens_at(chunk), packs};
  }
};

// Of eight values of a token: their order differs between tokens, so that eight tokens are on different banks.
__device__ __forceinline__ int value_offset(int token, int eight) {
  return token * kSlice + (eight ^ (token / 2 % 4)) * 8;
}
// The values, by one of kThreads threads, whose copies may still be under way afterwards.
template <int kThreads, class T>
__device__ __forceinline__ void fetch_values(T* to, int thread, const Source<T>& from) {
#pragma unroll
  for (int i = thread; i < kChunk * kSlice / 8; i += kThreads) {
    const int token = i / (kSlice / 8), eight = i % (kSlice / 8);
    const bool real = token < from.count;
    const T* at = from.values + (real ? token : 0) * from.token_stride + eight * 8;
    T* place = to + value_offset(token, eight);
    if (from.packs) {
      copy_async(shared_address(place), at, real);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) place[j] = real ? at[j] : T(0.0f);
    }
  }
}

__device__ __forceinline__ bool irregular_chunk(const Scalars& scalars) {
  const int4 rows = *(const int4*)scalars.irregular;
  return rows.x | rows.y | rows.z | rows.w;
}

}  // namespace
