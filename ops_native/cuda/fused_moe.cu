// fused_moe: the experts' SwiGLU networks, summed with the router's weights.
//
// Two products, SwiGLU in the epilogue of the first: slots are grouped by expert (group_kernel), the first product
// gathers the tokens' rows and leaves the hidden rows in groups, the second puts each slot's weighted result at the
// slot's own row, and sum_kernel adds a token's slots in their order. With a handful of slots there is nothing to
// group: each slot is a tile, and combine_kernel computes the second product and the sum in one go.
// Between the kernels, hidden rows are rounded to the activations' type. Float16 would overflow there: its hidden rows
// are float32 first, and narrow_kernel scales each by a power of two to float16's range, and the slot's weight by its
// inverse. Results wait in float32 for their sum as long as they stay in the L2 cache; beyond that, bfloat16 does not.
// Floor: the chosen experts' weights once, 3 I Hd elements each; from some 200 tokens per expert on, arithmetic.
#include "gemm_hopper.cuh"
#include "gemm_plain.cuh"
#include "gemm_stream.cuh"
#include "gemm_tile.cuh"
#include "moe_steps.cuh"

#include <type_traits>

namespace {

struct Moe {
  const void *x, *w1, *w2, *w3;
  const float* weights;
  const int32_t *ids, *map;
  void* out;
  int64_t tokens, top_k, experts, inner, hidden, map_size, on_input, x_stride, w1_stride, w2_stride, w3_stride;
  void* stream;
  int64_t slots() const { return tokens * top_k; }
};

bool float_results(const Moe& m) { return m.slots() * m.hidden <= 1 << 23; }  // as `_scratch_bytes` has it

// Scratch in pieces of 256 bytes.
class Scratch {
 public:
  Scratch(void* memory, int64_t size) : next_((char*)memory), left_(size) {}
  template <class T> T* take(int64_t count) {
    const int64_t size = ceil_div<int64_t>(count * sizeof(T), 256) * 256;
    T* const taken = (T*)next_;
    next_ += size;
    left_ -= size;
    return taken;
  }
  bool enough() const { return left_ >= 0; }

 private:
  char* next_;
  int64_t left_;
};

// The first product: hidden rows. Up to top_k rows of a token lie apart, in the order of the groups or of the slots.
template <class T> Gemm first_product(const Moe& m, void* hidden) {
  Gemm g = {};
  g.x = m.x;
  g.w = m.w1;
  g.up = m.w3 ? m.w3 : (const T*)m.w1 + m.inner * m.hidden;
  g.out = hidden;
  g.scale = m.on_input ? m.weights : nullptr;
  g.x_stride = m.x_stride;
  g.out_stride = m.inner;
  g.w_stride = m.w1_stride;
  g.up_stride = m.w3 ? m.w3_stride : m.w1_stride;
  g.row_stride = m.hidden;
  g.slot_count = int32_t(m.slots());
  g.n = int32_t(m.inner);
  g.k = int32_t(m.hidden);
  g.top_k = int32_t(m.top_k);
  g.expert_count = int32_t(m.experts);
  g.map = m.map;
  g.map_size = int32_t(m.map_size);
  g.experts = m.ids;
  g.source = Source::kSlots;
  g.by_slot_in = true;
  return g;
}

Gemm second_product(const Moe& m, const Gemm& first, const void* hidden, void* y, const float* weights) {
  Gemm g = first;
  g.x = hidden;
  g.w = m.w2;
  g.up = nullptr;
  g.out = y;
  g.scale = weights;
  g.x_stride = m.inner;
  g.out_stride = m.hidden;
  g.w_stride = m.w2_stride;
  g.row_stride = m.inner;
  g.n = int32_t(m.hidden);
  g.k = int32_t(m.inner);
  g.by_slot_in = false;
  g.by_slot_out = true;
  return g;
}

int64_t most_tiles_of(const Moe& m, int width) {
  const int64_t most = min(m.slots(), m.experts) + m.slots() / width;
  return min(most, m.slots());
}

int64_t chunk_of(const Moe& m) {  // how many slots a block groups
  if (m.slots() <= 2 * kChunkSlots) return max(m.slots(), int64_t(1));
  return max(int64_t(kChunkSlots), ceil_div<int64_t>(m.slots(), kMostChunks));
}

int launch_groups(const Moe& m, int width, int32_t* of_chunks, int32_t* sorted, Tile* tiles, Totals* totals) {
  const int64_t most = (shared_memory_limit() - 2048) / int64_t(sizeof(int32_t)) / m.experts, chunk = chunk_of(m);
  const int64_t warps = min(min(most, ceil_div<int64_t>(chunk, kWarp)), int64_t(kGroupThreads / kWarp));
  if (warps < 1) return kBadArgument;  // tens of thousands of experts
  const int64_t threads = max(warps, min(ceil_div<int64_t>(m.experts, kWarp), int64_t(8))) * kWarp;
  const dim3 chunks(unsigned(ceil_div(m.slots(), chunk)));
  if (chunks.x > 1)
    if (const int status = launch_early(count_kernel, chunks, dim3(256), m.experts * sizeof(int32_t), m.stream,
                                        m.ids, m.map, m.slots(), m.experts, m.map_size, chunk, of_chunks))
      return status;
  return launch_early(group_kernel, chunks, dim3(unsigned(threads)), size_t(warps * m.experts * sizeof(int32_t)),
                      m.stream, m.ids, m.map, m.slots(), m.experts, m.map_size, width, warps, chunk, of_chunks, sorted,
                      tiles, totals);
}

int launch_narrow(const Moe& m, const float* from, f16* to, const float* weights, float* weights_to,
                  const int32_t* sorted, const Totals* totals) {
  const int64_t blocks = min(ceil_div<int64_t>(m.slots(), 8), 8 * int64_t(sm_count()));
  return launch_early(narrow_kernel, dim3(unsigned(blocks)), dim3(256), 0, m.stream, from, to, weights,
                      weights_to, sorted, totals, m.ids, m.map, m.slots(), m.experts, m.map_size, m.inner);
}

template <class T> int launch_combine(const Moe& m, const T* hidden, const float* weights) {
  Combine<T> g = {};
  g.hidden = hidden;
  g.w = (const T*)m.w2;
  g.weights = weights;
  g.ids = m.ids;
  g.map = m.map;
  g.out = (T*)m.out;
  g.w_stride = m.w2_stride;
  g.columns = m.hidden;
  g.k = int32_t(m.inner);
  g.top_k = int32_t(m.top_k);
  g.experts = int32_t(m.experts);
  g.map_size = int32_t(m.map_size);
  const dim3 grid(unsigned(ceil_div<int64_t>(m.hidden, 16)), unsigned(m.tokens));
  int warps = int64_t(grid.x) * grid.y <= sm_count() ? 16 : 8;  // two blocks of 8 overlap each other's starts
  while (warps > 1 && warps * Ring<T, 1, 1>::kBytes + 2048 > shared_memory_limit()) warps /= 2;
  return launch_early(combine_kernel<T>, grid, dim3(warps * kWarp), warps * Ring<T, 1, 1>::kBytes, m.stream, g);
}

template <class T, class Y> int launch_sum(const Moe& m, const Y* y) {
  constexpr int wide = 16 / sizeof(T);
  const bool packs = aligned(16, sizeof(T), m.out, m.hidden);
  const int n = packs ? wide : 1;
  const dim3 grid(unsigned(m.tokens), unsigned(ceil_div<int64_t>(ceil_div<int64_t>(m.hidden, n), 128)));
  return launch_early(packs ? sum_kernel<Y, T, wide> : sum_kernel<Y, T, 1>, grid, dim3(128), 0, m.stream, y,
                      m.ids, m.map, (T*)m.out, m.top_k, m.experts, m.map_size, m.hidden);
}

// Which kernels, and how many tokens a tile has, by the slots that an expert has on average.
enum class Way { kPlain, kFewSlots, kStream8, kStream16, kTile, kHopper };
struct Plan {
  Way way;
  int width;
  CUtensorMap w13, w2;  // of kHopper
};

template <class T> Plan plan_for(const Moe& m) {
  const bool wide = sizeof(T) == 2 && aligned(16, sizeof(T), m.x, m.x_stride, m.hidden, m.inner) &&
                    aligned(16, sizeof(T), m.w1, m.w1_stride) && aligned(16, sizeof(T), m.w2, m.w2_stride) &&
                    aligned(16, sizeof(T), m.w3, m.w3_stride);
  const int64_t average = m.slots() / m.experts;
  if (!wide) return {Way::kPlain, kPlainTokens};
  if (m.slots() <= min(m.experts, int64_t(32))) return {Way::kFewSlots, 1};
  if (average <= 4 && float_results(m)) return {Way::kStream8, 8};
  if (average <= 8 && float_results(m)) return {Way::kStream16, 16};
  Plan plan = {Way::kHopper, average <= 32 ? 64 : 128};
  const Gemm first = first_product<T>(m, nullptr), second = second_product(m, first, nullptr, nullptr, nullptr);
  if (hopper_takes<true>(first, plan.w13) && hopper_takes<false>(second, plan.w2)) return plan;
  return {Way::kTile, kTileTokens};
}

// One product in the plan's way, of rows of type X with weights of type T.
template <bool kPlain, class X, class T, class Out, bool kPairs>
int launch_product(const Plan& plan, const Gemm& g, int64_t tiles, void* stream) {
  if constexpr (kPlain) {
    return launch_plain<X, T, Out, kPairs>(g, tiles, stream);
  } else {
    if (plan.way == Way::kHopper)
      return launch_hopper<T, Out, kPairs>(g, kPairs ? plan.w13 : plan.w2, plan.width, tiles, stream);
    if (plan.way == Way::kTile) return launch_tile<T, Out, kPairs>(g, tiles, stream);
    if constexpr (kPairs)
      if (plan.way == Way::kFewSlots) return launch_stream<T, Out, 2, 1, kPairs, Source::kSlots>(g, tiles, stream);
    if constexpr (kPairs || sizeof(Out) == 4)
      return plan.way == Way::kStream16 ? launch_stream<T, Out, 2, 2, kPairs, Source::kTable>(g, tiles, stream)
                                        : launch_stream<T, Out, 2, 1, kPairs, Source::kTable>(g, tiles, stream);
    return kBadArgument;
  }
}

#define OPSHIM_TRY(call) \
  if (const int status = (call)) return status

// Hidden: the type of the hidden rows as they leave the first product, X as they enter the second; Y: of its results.
template <bool kPlain, class T, class Hidden, class X, class Y>
int fused(const Moe& m, const Plan& plan, Scratch scratch) {
  constexpr bool narrow = !std::is_same<Hidden, X>::value;
  const bool few = plan.way == Way::kFewSlots;
  const int64_t tiles = few ? m.slots() : most_tiles_of(m, plan.width);
  int32_t* const sorted = scratch.take<int32_t>(m.slots());
  int32_t* const of_chunks = scratch.take<int32_t>(ceil_div(m.slots(), chunk_of(m)) * m.experts);
  Totals* const totals = scratch.take<Totals>(1);
  Tile* const table = few ? nullptr : scratch.take<Tile>(tiles);
  Hidden* const hidden = scratch.take<Hidden>(m.slots() * m.inner);
  X* const narrowed = narrow ? scratch.take<X>(m.slots() * m.inner) : (X*)hidden;
  float* const narrowed_weights = narrow ? scratch.take<float>(m.slots()) : nullptr;
  Y* const y = few ? nullptr : scratch.take<Y>(m.slots() * m.hidden);
  if (!scratch.enough()) return kNoMemory;

  Gemm first = first_product<T>(m, hidden);
  if (!few) {
    OPSHIM_TRY(launch_groups(m, plan.width, of_chunks, sorted, table, totals));
    first.source = Source::kTable;
    first.tiles = table;
    first.tile_count = &totals->tiles;
    first.counter = &totals->counters[0];
    first.slots = sorted;
  }
  OPSHIM_TRY((launch_product<kPlain, T, T, Hidden, true>(plan, first, tiles, m.stream)));

  const float* weights = m.on_input ? nullptr : m.weights;
  if constexpr (narrow) {
    OPSHIM_TRY(launch_narrow(m, hidden, narrowed, weights, narrowed_weights, few ? nullptr : sorted, totals));
    weights = narrowed_weights;
  }
  if constexpr (!kPlain)
    if (few) return launch_combine<T>(m, narrowed, weights);
  Gemm second = second_product(m, first, narrowed, y, weights);
  second.counter = &totals->counters[1];
  second.early = true;
  OPSHIM_TRY((launch_product<kPlain, X, T, Y, false>(plan, second, tiles, m.stream)));
  return launch_sum<T, Y>(m, y);
}

template <class T> int fused(const Moe& m, Scratch scratch) {
  const Plan plan = plan_for<T>(m);
  if constexpr (std::is_same<T, bf16>::value) {
    if (plan.way == Way::kPlain)
      return float_results(m) ? fused<true, T, float, float, float>(m, plan, scratch)
                              : fused<true, T, float, float, T>(m, plan, scratch);
    return float_results(m) ? fused<false, T, T, T, float>(m, plan, scratch)
                            : fused<false, T, T, T, T>(m, plan, scratch);
  } else {
    if (plan.way == Way::kPlain) return fused<true, T, float, float, float>(m, plan, scratch);
    if constexpr (sizeof(T) == 2) return fused<false, T, float, T, float>(m, plan, scratch);
  }
  return kBadArgument;
}

}  // namespace

// inner: I. hidden: Hd. w3 null: w1 holds gate and up. Strides: of a token in x, of an expert in the weights. scratch:
// for what lies between the kernels, as `fused_moe_cuda` of ops_native/moe.py computes its size.
extern "C" int OPSHIM(fused_moe)(
    const void* x, const void* w1, const void* w2, const void* w3, const float* weights, const int32_t* ids,
    const int32_t* map, void* out, void* scratch, int64_t dtype, int64_t tokens, int64_t top_k, int64_t experts,
    int64_t inner, int64_t hidden, int64_t map_size, int64_t on_input, int64_t x_stride, int64_t w1_stride,
    int64_t w2_stride, int64_t w3_stride, int64_t scratch_size, int64_t device, void* stream) {
  OnDevice on(device);
  if (tokens == 0 || hidden == 0) return kOk;
  if (tokens * top_k > INT32_MAX || max(inner, hidden) > INT32_MAX / 2) return kBadArgument;
  return by_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    if (top_k == 0 || experts == 0 || inner == 0)
      return status_of(cudaMemsetAsync(out, 0, tokens * hidden * sizeof(T), cudaStream_t(stream)));
    const Moe m = {x,     w1,     w2,       w3,       weights,  ids,       map,       out,       tokens, top_k,
                   experts, inner, hidden, map_size, on_input, x_stride, w1_stride, w2_stride, w3_stride, stream};
    return fused<T>(m, Scratch(scratch, scratch_size));
  });
}
