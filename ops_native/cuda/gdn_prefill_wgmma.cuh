// gdn_prefill in chunks, phase 2 on sm_90a: the states, chunk after chunk, and the outputs, by wgmma.
//
// A block takes 32 rows of one head's state through a sequence: four warps multiply, eight rows each, and one copies.
// Operands A, from registers, hold both parts of a row: of a warp's 16 rows, row r is the high part of state row r, and
// r + 8 the low one. So a thread holds both parts of a product and adds them up, results are operands A of the next
// product as they are, and the warps share nothing but what they read. Per chunk, products 64 x N x 16 for K of 128:
//
//     S k         8 of N = 64     the chain
//     S q         8 of N = 64       beside it, while v - S k is made
//     u          10 of N = 32     the chain: tiles of T, the high part and the low one side by side
//     u to S      8 of N = 64     the chain: two halves of the tokens, as u comes, and of the columns
//     u to o     10 of N = 32       beside it, while S is split
//
// Some 1,090 cycles of the tensor cores, 670 of them on the chain. With its other steps, of a warp per scheduler, it
// should take some 1,350, and takes 2,860 on an H200. Outputs of a chunk are made while the next one's S k is, and
// written while its u is.
//
// At the loop's end all products are done, no accumulator is used in part, and operands A are not made anew before the
// product that reads them is done: else ptxas puts all products one after the other (it says so: C7510 to C7515).
#pragma once
#include "gdn_prefill_walk.cuh"
#include "gdn_wgmma.cuh"

namespace {

constexpr int kRing = 4;  // chunks in shared memory
constexpr int kMultiplying = 4 * kWarp, kWgmmaThreads = kMultiplying + kWarp;

template <int K> struct alignas(16) WgmmaStage {
  f16 keys[kChunk * K], queries[kChunk * K];
  HeadChunk head;
};
// Values are read first: a chunk's are before the chunk before it is left. So there is one place less for them.
template <class T, int K> struct alignas(16) WgmmaShared {
  WgmmaStage<K> stages[kRing];
  T values[kRing - 1][kChunk * kSlice];  // see value_offset
  Walk walk;                             // kept here for the end, as the loop needs all registers
  // `empty` of the last stage has one phase more, at first: chunk 3's values take the place of chunk 0's.
  Barrier full[kRing], empty[kRing];
};
static_assert(sizeof(WgmmaShared<f16, 128>) <= 227 * 1024, "for sm_90");

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// One of the four warps, and in each lane one row: columns 8 n + c and 8 n + c + 1 of it.
template <class T, int K> struct Multiplying {
  static constexpr int kSteps = K / 16, kHalf = K / 2;
  static constexpr int kMatrix = 128, kEightTokens = K / 8 * kMatrix;  // bytes
  int lane, warp, c;
  float s[K / 8][2];
  uint32_t a[kSteps][4];  // the same, in parts
  float product[32];      // S k of the chunk at hand
  float next_up;          // what products with `a` are to be multiplied by
  float read[8][2];       // that, less the sign, and what S k is multiplied by
  uint32_t v[2][4];       // two tokens each
  uint32_t outputs[8];    // of the chunk before, likewise
  float least = 0;        // of the row's largest element: below that, digits may be missing
  bool irregular = false;

  __device__ __forceinline__ explicit Multiplying(int warp)
      : lane(threadIdx.x % kWarp), warp(warp), c(2 * (lane % 4)), outputs() {}

  // f(value, row of the slice, column)
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int n = 0; n < K / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) f(s[n][i], warp * 8 + lane / 4, n * 8 + c + i);
  }

  // The largest magnitude of the row; NaN if there is one.
  template <int N> __device__ __forceinline__ static float row_top(const float (&x)[N][2]) {
    float top[4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) top[n % 4] = larger(top[n % 4], larger(fabsf(x[n][0]), fabsf(x[n][1])));
    float most = larger(larger(top[0], top[1]), larger(top[2], top[3]));
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) most = larger(most, __shfl_xor_sync(kAllLanes, most, offset));
    return most;
  }
  __device__ __forceinline__ void check(float top) { irregular |= !(top >= least && top <= 0x1p100f); }  // and of NaN

  // An operand A of 16 columns, in two parts.
  __device__ __forceinline__ static void stack(uint32_t (&a)[4], const float (&x)[2], const float (&y)[2], float down) {
    split(x[0] * down, x[1] * down, a[0], a[1]);
    split(y[0] * down, y[1] * down, a[2], a[3]);
  }

  // sums = a times tile rows kFrom to kFrom + 1 of a triangle; of each, high parts, then low ones. The diagonal, which
  // is the largest, comes last, as tensor cores truncate each sum.
  template <int kFrom>
  __device__ __forceinline__ static void multiply_rows(float (&sums)[4][16], const uint32_t (&a)[4][4],
                                                       const f16* triangle) {
    const uint64_t b = operand(triangle, kMatrix, 2 * kMatrix);
#pragma unroll
    for (int i = kFrom; i < kFrom + 2; ++i)
#pragma unroll
      for (int j = 0; j <= i; ++j)
        wgmma<false>(sums[i], a[j], further(b, int(sizeof(f16)) * tile_offset(i, j)), j > 0);
  }
  // Column 8 n + c + i of what that makes, without the product of the low parts.
  __device__ __forceinline__ static float of_rows(const float (&sums)[4][16], int n, int i) {
    const float(&sum)[16] = sums[n / 2];
    const int at = n % 2 * 4 + i;
    return sum[at] + (sum[at + 2] + sum[at + 8]);
  }
  __device__ __forceinline__ static void pin_rows(float (&sums)[4][16], int from) {
    pin(sums[from]), pin(sums[from + 1]);
  }

  // Starts on S k of the chunk `next`, once it is there: await() waits for it. It is `product` when all products are
  // done.
  template <class Await> __device__ __forceinline__ void begin(const WgmmaStage<K>& next, Await await) {
    const float top = row_top(s);
    check(top);
    const Power power = power_for<kTopState>(top);
    await();
    const uint64_t keys = operand(next.keys, kMatrix, kEightTokens);
    const auto multiply = [&](int from, int to) {
#pragma unroll
      for (int i = from; i < to; ++i) stack(a[i], s[2 * i], s[2 * i + 1], power.down);
      begin_wgmma();
#pragma unroll
      for (int i = from; i < to; ++i) wgmma<false>(product, a[i], further(keys, i * 2 * kMatrix), i > 0);
      commit_wgmma();
    };
    multiply(0, kSteps / 2);
    multiply(kSteps / 2, kSteps);
    next_up = power.up;
  }
  // What S k is to be combined with.
  __device__ __forceinline__ void load(const WgmmaStage<K>& next, const T* values) {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_transposed(v[i], values + value_offset(i * 32 + lane, warp));
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 two = *(const float2*)&next.head.scalars.read[n * 8 + c];
      read[n][0] = -next_up * two.x, read[n][1] = -next_up * two.y;
    }
  }

  // A chunk, after begin() and load() and the end of all products; does the same for the next. write(): the chunk
  // before's outputs, once this one's u is under way.
  template <class Await, class Leave, class Write>
  __device__ __forceinline__ void step(const WgmmaStage<K>& now, const WgmmaStage<K>& next, const T* next_values,
                                       Await await, Leave leave, Write write) {
    const Scalars& scalars = now.head.scalars;
    float asked[32];
    const uint64_t queries = operand(now.queries, kMatrix, kEightTokens);
    begin_wgmma();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) wgmma<false>(asked, a[i], further(queries, i * 2 * kMatrix), i > 0);
    commit_wgmma();

    float y[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 two = unpack<T>(v[n / 4][n % 4]);
      y[n][0] = fmaf(read[n][0], product[4 * n] + product[4 * n + 2], two.x);
      y[n][1] = fmaf(read[n][1], product[4 * n + 1] + product[4 * n + 3], two.y);
    }
    const float top = row_top(y);
    const Power power = power_for<kTopRest>(top);
    uint32_t parts[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) stack(parts[i], y[2 * i], y[2 * i + 1], power.down);
    float solved[4][16];
    begin_wgmma();
    multiply_rows<0>(solved, parts, now.head.solve);
    commit_wgmma();
    multiply_rows<2>(solved, parts, now.head.solve);
    commit_wgmma();

    write();
    const float state_up = next_up, up = power.up * scalars.write_up, decay = scalars.decay;
    irregular |= !scales(top) || irregular_chunk(scalars);
    least = top > 0.0f ? 8.0f * up : 0.0f;
    float write_by[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 two = *(const float2*)&scalars.write[n * 8 + c];
      write_by[n][0] = two.x, write_by[n][1] = two.y;
    }

    // u, half of the tokens and then the others, into the state
    const uint64_t columns = operand(now.keys, kEightTokens, kMatrix);
    float u[8][2], gain0[kHalf / 2], gain1[kHalf / 2];
    uint32_t writes[4][4], corrections[4][4];
    const auto correct = [&](int from) {
#pragma unroll
      for (int n = from; n < from + 4; ++n) u[n][0] = of_rows(solved, n, 0), u[n][1] = of_rows(solved, n, 1);
#pragma unroll
      for (int n = from; n < from + 4; n += 2) {
        const float x[2] = {u[n][0] * write_by[n][0], u[n][1] * write_by[n][1]};
        const float z[2] = {u[n + 1][0] * write_by[n + 1][0], u[n + 1][1] * write_by[n + 1][1]};
        stack(writes[n / 2], x, z, 1.0f);
      }
    };
    const auto update = [&](float (&gain)[kHalf / 2], int i, int half) {
      wgmma<true>(gain, writes[i], further(columns, i * 2 * kEightTokens + half * (kHalf / 8) * kMatrix), i > 0);
    };
    wait_wgmma<1>();
    pin_rows(solved, 0);
    correct(0);
    begin_wgmma();
    update(gain0, 0, 0), update(gain0, 1, 0), update(gain1, 0, 1), update(gain1, 1, 1);
    commit_wgmma();
    wait_wgmma<1>();
    pin_rows(solved, 2);
    correct(4);
    begin_wgmma();
    update(gain0, 2, 0), update(gain0, 3, 0);
    commit_wgmma();
    update(gain1, 2, 1), update(gain1, 3, 1);
    commit_wgmma();
#pragma unroll
    for (int i = 0; i < 4; ++i) stack(corrections[i], u[2 * i], u[2 * i + 1], 1.0f);
#pragma unroll
    for (int n = 0; n < K / 8; ++n) s[n][0] *= decay, s[n][1] *= decay;
    wait_wgmma<1>();
    pin(gain0);
    float answered[4][16];
    begin_wgmma();
    multiply_rows<0>(answered, corrections, now.head.mix);
    commit_wgmma();
    add(0, gain0, up);
    wait_wgmma<1>();
    pin(gain1);
    multiply_rows<2>(answered, corrections, now.head.mix);
    commit_wgmma();
    add(K / 16, gain1, up);

    begin(next, await);
    wait_wgmma<2>();
    pin(asked), pin_rows(answered, 0), pin_rows(answered, 2);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 ask = *(const float2*)&scalars.ask[n * 8 + c], own = *(const float2*)&scalars.own[n * 8 + c];
      const auto output = [&](float ask, float own, int i) {
        const float read = asked[4 * n + i] + asked[4 * n + 2 + i];
        return from_f32<T>(fmaf(ask, state_up * read, own * (power.up * of_rows(answered, n, i))));
      };
      Pack<T, 2> pair;
      pair.at[0] = output(ask.x, own.x, 0), pair.at[1] = output(ask.y, own.y, 1);
      outputs[n] = (const uint32_t&)pair;
    }
    load(next, next_values);
    leave();
    wait_wgmma<0>();
    pin(product);
  }

  __device__ __forceinline__ void add(int first, const float (&gain)[kHalf / 2], float up) {
#pragma unroll
    for (int n = 0; n < K / 16; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        s[first + n][i] = fmaf(gain[4 * n + i] + gain[4 * n + 2 + i], up, s[first + n][i]);
  }

  // To the chunk's first token and this slice's first row.
  __device__ __forceinline__ void write_outputs(T* to, int token_stride, int count) const {
    uint32_t turned[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) turned[n] = transpose(outputs[n]);
    to += lane / 4 * token_stride + warp * 8 + c;
#pragma unroll
    for (int n = 0; n < 8; ++n, to += 8 * token_stride)
      if (n * 8 < count - lane / 4) *(uint32_t*)to = turned[n];
  }
};

// By the copying warp, into places that are free.
template <class T, int K>
__device__ __forceinline__ void fetch_by_warp(WgmmaStage<K>& to, T* values, Barrier& full, const Source<T>& from) {
  constexpr int keys = 2 * kChunk * K * sizeof(f16);
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
    expect(full, keys + sizeof(HeadChunk));
    copy_bulk(to.keys, from.keys, keys, full);  // and the queries
    copy_bulk(&to.head, from.head, sizeof(HeadChunk), full);
  }
  fetch_values<kWarp>(values, lane, from);
  arrive_after_copies(full);
  arrive(full);
}
#endif

// by_chunk: see Walk.
template <class T, int K>
__global__ void __launch_bounds__(kWgmmaThreads, 1) scan_wgmma_kernel(
    Prefill p, Rows<const T> v, void* pool, bool pool_is_f32, T* o, Scratch scratch, Part part, bool by_chunk,
    bool packs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  WgmmaShared<T, K>& shared = *(WgmmaShared<T, K>*)memory;
  start_early();

  const Walk walk(p, part, by_chunk);
  if (!walk.works) return;
  const int count = walk.count;
  if (threadIdx.x == 0) {
    shared.walk = walk;
    for (int i = 0; i < kRing; ++i) init(shared.full[i], 2 * kWarp), init(shared.empty[i], kMultiplying / kWarp);
    publish_barriers();
  }
  __syncthreads();

  const int warp = __shfl_sync(kAllLanes, int(threadIdx.x) / kWarp, 0);  // the compiler is to see that it is a warp's
  const bool multiplies = warp < kMultiplying / kWarp;
  Multiplying<T, K> slicing(warp);
  int place = 0;  // of values
  const auto advance = [&] { place = place + 1 < kRing - 1 ? place + 1 : 0; };
  if (multiplies) {
    shared.walk.template load<T, K>(slicing, p, pool, pool_is_f32, scratch);
    const int token_stride = int(p.HV * p.V);
    T* out = o + (walk.first_token * p.HV + walk.sequence.head) * p.V + walk.slice * kSlice;  // of the chunk before
    const auto wait_for = [&](int chunk) { wait(shared.full[chunk % kRing], chunk / kRing % 2); };
    if (count > 0) {
      slicing.begin(shared.stages[0], [&] { wait_for(0); });
      slicing.load(shared.stages[0], shared.values[0]);
      arrive_warp(shared.empty[kRing - 1]);
      wait_wgmma<0>();
      pin(slicing.product);
    }
    for (int chunk = 0; chunk < count; ++chunk) {
      advance();
      slicing.step(
          shared.stages[chunk % kRing], shared.stages[(chunk + 1) % kRing], shared.values[place],
          [&] {
            if (chunk + 1 < count) wait_for(chunk + 1);  // else anything: it is not used
          },
          [&] { arrive_warp(shared.empty[chunk % kRing]); },
          [&] {
            slicing.write_outputs(out, token_stride, chunk ? kChunk : 0);
            if (chunk) out += kChunk * token_stride;
          });
    }
    if (count > 0) slicing.write_outputs(out, token_stride, walk.tokens_at(count - 1));
  } else {
    for (int chunk = 0; chunk < count; ++chunk, advance()) {
      const int stage = chunk % kRing, round = chunk / kRing;
      wait(shared.empty[stage], (round + (stage < kRing - 1 ? 1 : 0)) % 2);
      fetch_by_warp(shared.stages[stage], shared.values[place], shared.full[stage],
                    Source<T>::template of<K>(walk, chunk, p, part, scratch, v, packs));
    }
  }
  shared.walk.template finish<T, K>(slicing, multiplies, p, pool, pool_is_f32, o, scratch);
#endif
}

}  // namespace
