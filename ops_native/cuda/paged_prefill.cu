// paged_prefill: causal attention of many new tokens over a paged cache, by mma.sync (any GPU from sm_80 on).
//
// Bound by arithmetic: 4 size flops per query row and key. A block takes a tile of query rows over all keys that they
// see, in the manner of FlashAttention-2 (arXiv:2307.08691): scores and weights stay in registers, whose layout as a
// result is the one that the second product wants as an operand. Keys and values come in tiles of 64 by asynchronous
// copies: values while the scores are computed, the next keys while the values are used. Tiles that no row sees are
// skipped, and only those on the diagonal or at a window's edge are masked. The tiles that see most go first.
//
// sm_90a has paged_prefill_wgmma.cu.
#include <type_traits>

#include "paged_prefill.cuh"

namespace {

constexpr int kKeys = 64, kWarps = 4, kThreads = kWarps * kWarp;

template <int D> struct Shape {
  static constexpr int kRowTiles = D == 256 ? 1 : 2;  // of 16 rows, per warp: what the registers hold
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kKeyBytes = kKeys * D * 2, kBytes = kRows * D * 2 + 2 * kKeyBytes;
};

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 2) prefill_kernel(const __grid_constant__ Attention p) {
  constexpr int kRowTiles = Shape<D>::kRowTiles, kRows = Shape<D>::kRows;
  extern __shared__ __align__(128) uint8_t memory[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warp_row = warp * kRowTiles * 16;
  const unsigned task = gridDim.x - 1 - blockIdx.x;
  const QueryTile tile = query_tile(p, task / p.kv_heads, task % p.kv_heads, kRows);
  if (tile.rows == 0) return;
  const uint32_t queries = shared_address(memory), keys = queries + kRows * D * 2, values = keys + Shape<D>::kKeyBytes;
  const KeyRange range(p, tile);
  if (range.high <= 0) return write_zeros<T>(p, tile, threadIdx.x, kThreads);

  const int32_t* table = p.tables + tile.sequence * p.table_row;
  const TokenCopies<T, D, kKeys> copies(p, tile.kv_head);
  auto slot = [&](int start) { return copies.slot(table, start + warp * 16, range.high); };
  auto place = copies.place(slot(range.low));
  copy_queries<T, D, kRows>(p, tile, queries, 0, kRows, threadIdx.x, kThreads);
  copies.keys(place, keys, warp * 16);
  commit_copies();

  Rows rows[2] = {Rows(p, tile, warp_row), Rows(p, tile, warp_row + 16)};
  float out[kRowTiles][D / 2] = {};
  for (int start = range.low; start < range.high; start += kKeys) {
    const Slot next = slot(start + kKeys);
    wait_copies<0>();
    __syncthreads();  // keys are there; the last tile's values are used up
    copies.values(place, values, warp * 16);
    commit_copies();
    place = copies.place(next);

    float s[kRowTiles][kKeys / 2] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
        load_matrices(a[m], queries + chunk_at<kRows>(warp_row + m * 16 + lane % 16, lane / 16, k * 2));
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, keys + chunk_at<kKeys>(n * 16 + lane % 8 + lane / 16 * 8, lane / 8 % 2, k * 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma<T>(s[m] + n * 8, a[m], b[0], b[1]);
          mma<T>(s[m] + n * 8 + 4, a[m], b[2], b[3]);
        }
      }
    }
    uint32_t weights[kRowTiles][kKeys / 16][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      if (rows[m].template weigh<T, kKeys>(p, tile, range, start, s[m])) rows[m].fade_out(out[m]);
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) weights[m][i / 4][i % 4] = pack<T>(s[m][i * 2], s[m][i * 2 + 1]);
    }

    wait_copies<0>();
    __syncthreads();  // values are there; the keys are used up
    if (start + kKeys < range.high) copies.keys(place, keys, warp * 16);
    commit_copies();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t b[4];
        load_transposed(b, values + chunk_at<kKeys>(k * 16 + lane % 16, lane / 16, n * 2));
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma<T>(out[m] + n * 8, weights[m][k], b[0], b[1]);
          mma<T>(out[m] + n * 8 + 4, weights[m][k], b[2], b[3]);
        }
      }
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) rows[m].template write<T, D, kRows>(p, tile, out[m], memory);
}

template <class T, int D> int prefill(const Attention& p, void* stream) {
  return launch(prefill_kernel<T, D>, dim3(query_tiles(p, Shape<D>::kRows) * p.kv_heads), dim3(kThreads),
                Shape<D>::kBytes, stream, p);
}

}  // namespace

// q [tokens,heads,size] ragged: sequence n has the rows bounds[n] to bounds[n + 1]; caches [blocks,block_size,kv_heads,
// size] at the strides given, dimension by dimension (innermost 1); tables [sequences,...] with rows at table_row; out
// contiguous.
extern "C" int OPSHIM(paged_prefill)(
    const void* q, const void* keys, const void* values, const int32_t* tables, const int32_t* bounds,
    const int32_t* lengths, const float* slopes, void* out, int64_t dtype, int64_t tokens, int64_t sequences,
    int64_t heads, int64_t kv_heads, int64_t size, int64_t blocks, int64_t block_size, int64_t table_width,
    int64_t table_row, int64_t q_token, int64_t q_head, int64_t k_block, int64_t k_token, int64_t k_head,
    int64_t v_block, int64_t v_token, int64_t v_head, double scale, double softcap, int64_t window, int64_t device,
    void* stream) {
  OnDevice on(device);
  if (size > kMaxSize) return kBadArgument;
  if (tokens == 0 || heads == 0) return kOk;
  if (table_width == 0) tables = bounds, table_row = 0;  // nothing is read from it, but it is fetched towards the L2 cache
  const Attention p = attention(q, keys, values, tables, bounds, lengths, slopes, out, tokens, sequences, heads,
                                kv_heads, size, block_size, table_row, q_token, q_head, k_block, k_token, k_head,
                                v_block, v_token, v_head, scale, softcap, window);
  if (dtype == kF32 || !copies_in_chunks(p)) return attend_rows(p, dtype, stream);
  if (capability() == 90) return prefill_by_wgmma(p, dtype, stream);
  auto with = [&](auto t) {
    using T = decltype(t);
    if (size <= 64) return prefill<T, 64>(p, stream);
    if (size <= 128) return prefill<T, 128>(p, stream);
    return prefill<T, 256>(p, stream);
  };
  return dtype == kF16 ? with(f16{}) : with(bf16{});
}
