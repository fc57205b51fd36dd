// gdn_prefill in chunks of 64 tokens, on tensor cores: what its two phases share.
//
// Within a chunk that starts from state S (ops_reference/gated_delta_net_chunked.py derives it; k and q of length 1):
//
//     D_ij, d_i = the decays from token j to token i, and from the chunk's start to token i
//     (I + A) T = I        A_ij = beta_i (k_i . k_j) D_ij  for j < i
//     u_i = sum_j T_ij beta_j (v_j - d_j S k_j)
//     o_i = scale (d_i S q_i + sum_{j <= i} D_ij (q_i . k_j) u_j)
//     S  <- d_64 S + sum_j D_64,j u_j k_j^T
//
// Phase 1 (gdn_prefill_local.cuh) makes T, the factors of u_j in o_i, and all factors per token, of all chunks at once;
// phase 2 (gdn_prefill_wgmma.cuh for sm_90a, else gdn_prefill_scan.cuh) walks over the chunks: five products each.
//
// Precision. Products take halves and sum in float32, and must be as good as float32 arithmetic. So every operand is
// scaled by powers of two (per row, so that nothing depends on the inputs' magnitude) and then either exact in a half,
// as k and q in their own scale are (8 or 11 bits; what is left of their norm is applied to the product), or the sum of
// two halves: 22 bits. Of the product of two such sums the low parts' product is dropped. Decays are products of
// e^min(g, 0), never quotients.
//
// What does not fit into halves (NaN, infinities; chunks where what counts at the end is less than some 2^-16 of what
// was there on the way) is found out by both phases. Such a slice of a state is left as it was, and taken through the
// whole sequence token by token afterwards.
//
// Keys, queries and triangles are kept as matrices of 8 x 8, 128 bytes each: the unit of ldmatrix, without bank
// conflicts, and of wgmma without swizzle. Triangles are kept in tiles of 16 x 16, four matrices row by row, and each
// tile's high part is followed by its low one: together they are one operand B of wgmma, of 32 columns.
#pragma once
#include "gdn_mma.cuh"
#include "gdn_prefill.cuh"

namespace {

constexpr int kChunk = 64;
// Halves: the lower triangle of 64 x 64 in tiles of 16 x 16, of each the high parts, then the low ones.
constexpr int kTriangle = 10 * 2 * 256;
// Exponents that rows are scaled to: the largest magnitude of k and q, the magnitudes' sum of the triangles, the
// largest of the state and of what remains of v. u, below 2^(9 + 1 + 4 + 1), is a half as it is.
constexpr int kTopInputs = 7, kTopRows = 4, kTopState = 13, kTopRest = 9;

__device__ __forceinline__ int tile_offset(int i, int j) { return (i * (i + 1) / 2 + j) * 2 * 256; }

struct Scalars {  // of one chunk and value head; per token:
  float read[kChunk];   // what S k is multiplied by in the correction
  float ask[kChunk];    // S q in the output
  float own[kChunk];    // the corrections' part of the output
  float write[kChunk];  // a correction on its way into the state, below 1 ...
  float write_up;       // ... but for this factor; 0 where nothing is written
  float decay;          // of the whole chunk
  int32_t unused[2];
  int32_t irregular[4];  // by row of tiles: not finite, or beyond the range of halves
};

struct HeadChunk {  // what phase 1 hands to phase 2 per chunk and value head
  f16 solve[kTriangle];  // T_ij beta_j, each row scaled
  f16 mix[kTriangle];    // D_ij (q_i . k_j), likewise
  Scalars scalars;
};
static_assert(sizeof(HeadChunk) % 16 == 0, "copied by 16 bytes");

// Chunk c of sequence n has number bounds[n] / 64 + n + c: so no two share one, and none has to be counted.
__device__ __forceinline__ int64_t first_chunk(const Prefill& p, int64_t n) { return p.bounds[n] / kChunk + n; }

// The last sequence whose first chunk is not beyond this one; negative if there is none.
__device__ __forceinline__ int64_t sequence_of(const Prefill& p, int64_t chunk) {
  int64_t low = 0, high = p.N;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (first_chunk(p, middle) <= chunk) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

struct Scratch {
  int32_t* redo;     // [N,HV,V/32]: slices that are to be taken token by token
  const float* came; // [HV,V,K]: the state of the one sequence that has come from the part before
  float* goes;       // likewise, of the one that goes on in the next part
  HeadChunk* heads;  // [held,HV]
  f16* keys;         // [held,H,2,64 K]: keys, then queries, in matrices of 8 x 8
};
struct Part {  // chunks [first, end): as many as scratch holds
  int64_t first, end;
};

// A power of two and its inverse: `down` brings a magnitude to [2^top, 2^(top + 1)).
struct Power {
  float down, up;
};
template <int kTop> __device__ __forceinline__ Power power_for(float magnitude) {
  const int exponent = max(__float_as_int(magnitude) >> 23, 27);  // below 2^-100 all are scaled alike
  return {__int_as_float((254 + kTop - exponent) << 23), __int_as_float((exponent - kTop) << 23)};
}
// Whether that is so; 0 may stay. Not so of NaN and infinity, which scale to themselves.
__device__ __forceinline__ bool scales(float magnitude) {
  return magnitude == 0.0f || (magnitude >= 0x1p-100f && magnitude <= 0x1p100f);
}

// Two neighbours, the first in the lower half.
template <class T> __device__ __forceinline__ float2 unpack(uint32_t two);
template <> __device__ __forceinline__ float2 unpack<bf16>(uint32_t two) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000)};
}
template <> __device__ __forceinline__ float2 unpack<f16>(uint32_t two) { return __half22float2((const __half2&)two); }

// x as the sum of two halves.
__device__ __forceinline__ void split(float x, float y, uint32_t& high, uint32_t& low) {
  const __half2 above = __floats2half2_rn(x, y);
  const float2 back = __half22float2(above);
  const __half2 below = __floats2half2_rn(x - back.x, y - back.y);
  high = (const uint32_t&)above, low = (const uint32_t&)below;
}

struct alignas(16) Fragment {  // A, of two parts
  uint32_t high[4], low[4];
};
// Of two neighbours of fragments C; the first rows times down0, the others times down1.
__device__ __forceinline__ Fragment split(const float (&x)[4], const float (&y)[4], float down0, float down1) {
  Fragment f;
  split(x[0] * down0, x[1] * down0, f.high[0], f.low[0]);
  split(x[2] * down1, x[3] * down1, f.high[1], f.low[1]);
  split(y[0] * down0, y[1] * down0, f.high[2], f.low[2]);
  split(y[2] * down1, y[3] * down1, f.high[3], f.low[3]);
  return f;
}

// Of this lane's two rows of fragments C: the largest magnitudes over the whole row; NaN if there is one.
template <int N> __device__ __forceinline__ void row_tops(const float (&x)[N][4], float& top0, float& top1) {
  top0 = top1 = 0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    top0 = larger(top0, larger(fabsf(x[n][0]), fabsf(x[n][1])));
    top1 = larger(top1, larger(fabsf(x[n][2]), fabsf(x[n][3])));
  }
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    top0 = larger(top0, __shfl_xor_sync(kAllLanes, top0, offset));
    top1 = larger(top1, __shfl_xor_sync(kAllLanes, top1, offset));
  }
}

}  // namespace
