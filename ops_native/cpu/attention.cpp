// paged_attention_v2 and paged_prefill: which rows and keys a task of attention_tile.h takes, and who adds them up.
//
// Decode: a sequence is split into partitions of 256 keys, so that one long sequence keeps all threads busy; each
// partition leaves its sums and a second pass joins them in order. Prefill: a task is one key head of up to
// 288 rows (tokens times heads of the group), over all the keys that they see; the last tokens, which see most, go
// first. More rows share the work of taking keys out of pages; fewer make more tasks. The results do not depend on it.
#include "attention_amx.h"
#include "attention_fma.h"

namespace OPSHIM_ISA {
namespace {

constexpr int64_t kPartition = 256;
constexpr int64_t kMinRows = 48, kMaxRows = 288, kTasksPerThread = 4;
constexpr int64_t kMaxPartials = int64_t(1) << 24;  // floats of partial sums held at once (64 MiB)

struct TileTag {};
struct PartialTag {};
struct UnitTag {};

// Numbers the units (partitions, row tiles) of all sequences; sequence n owns units first[n] to first[n + 1].
struct Units {
  int64_t* first;

  int64_t sequence_of(int64_t unit, int64_t sequences) const {
    int64_t low = 0, high = sequences;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first[middle] <= unit ? low : high) = middle;
    }
    return low;
  }
};

// Whether the table's entries that the tokens [begin, end) need exist and name blocks of the cache
bool valid_blocks(const int32_t* table, int64_t width, int64_t blocks, int64_t block_size, int64_t begin, int64_t end) {
  if (begin >= end) return true;
  if ((end - 1) / block_size >= width) return false;
  for (int64_t i = begin / block_size; i <= (end - 1) / block_size; ++i)
    if (table[i] < 0 || table[i] >= blocks) return false;
  return true;
}

template <class T>
void write_row(T* to, const float* from, int64_t size, float total) {
  for (int64_t d = 0; d < size; d += W) {
    const vf x = load(from + d) / total;
    if (size - d >= W)
      store(to + d, x);
    else
      store(to + d, x, int(size - d));
  }
}

// Joins a head's partitions into its output row. A partial is the weighted values, the largest score, the weights' sum.
template <class T>
void join(const float* partials, int64_t count, int64_t stride, int64_t size, float* out, T* to) {
  const int64_t width = stride - 2;
  float high = -HUGE_VALF, total = 0;
  for (int64_t i = 0; i < count; ++i) high = partials[i * stride + width] > high ? partials[i * stride + width] : high;
  const float shift = shift_of(high);
  std::memset(out, 0, width * sizeof(float));
  for (int64_t i = 0; i < count; ++i) {
    const float* part = partials + i * stride;
    const vf weight = vexp(splat(part[width] - shift));
    for (int64_t d = 0; d < width; d += W) store(out + d, load(out + d) + weight * load(part + d));
    total += weight[0] * part[width + 1];
  }
  write_row(to, out, size, total);
}

template <class T>
int decode(const Problem<T>& p, T* out, const int32_t* tables, int64_t table_row, int64_t width, const int32_t* lengths,
           int64_t sequences, int64_t blocks, int64_t threads) {
  const int64_t group = p.group(), stride = round_up(p.size, kPanel) + 2, row = p.heads * p.size;
  int64_t* first = scratch<UnitTag, int64_t>(sequences + 1);
  if (!first) return kNoMemory;
  const Units units{first};
  first[0] = 0;
  for (int64_t b = 0; b < sequences; ++b) {
    const int64_t length = lengths[b], begin = p.first_seen(length - 1);
    if (!valid_blocks(tables + b * table_row, width, blocks, p.block_size, begin, length)) return kBadArgument;
    first[b + 1] = first[b] + (length > 0 ? (length - 1) / kPartition - begin / kPartition + 1 : 0);
  }
  for (int64_t from = 0, to; from < sequences; from = to) {  // as many sequences as the partial sums have room for
    to = from + 1;
    while (to < sequences && (first[to + 1] - first[from]) * p.heads * stride <= kMaxPartials) ++to;
    float* partials = scratch<PartialTag, float>((first[to] - first[from]) * p.heads * stride);
    if (!partials) return kNoMemory;
    bool failed = false;
    // partials are [sequence][head][partition]
    auto partials_of = [&](int64_t b, int64_t head) {
      return partials + ((first[b] - first[from]) * p.heads + head * (first[b + 1] - first[b])) * stride;
    };
    parallel_for((first[to] - first[from]) * p.kv_heads, threads, [&](int64_t task) {
      const int64_t unit = first[from] + task / p.kv_heads, kv_head = task % p.kv_heads;
      const int64_t b = units.sequence_of(unit, sequences), length = lengths[b], begin = p.first_seen(length - 1);
      const int64_t part = unit - first[b], key = (begin / kPartition + part) * kPartition;
      float* memory = scratch<TileTag, float>(Tile::floats(group, p.size));
      if (!memory) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
        return;
      }
      Tile tile(memory, group, p.size);
      attend_with_best(p, Queries<T>{p.q + b * p.q_token, length - 1, 1, kv_head}, tables + b * table_row,
                       most(begin, key), least(length, key + kPartition), tile);
      for (int64_t g = 0; g < group; ++g) {
        float* partial = partials_of(b, kv_head * group + g) + part * stride;
        std::memcpy(partial, tile.out + g * tile.width, tile.width * sizeof(float));
        partial[tile.width] = tile.high[g];
        partial[tile.width + 1] = sum(load(tile.total + g * W));
      }
    });
    if (failed) return kNoMemory;
    parallel_for(to - from, threads, [&](int64_t task) {
      const int64_t b = from + task, count = first[b + 1] - first[b];
      float total[kMaxSize];
      for (int64_t h = 0; h < p.heads && count; ++h)
        join(partials_of(b, h), count, stride, p.size, total, out + b * row + h * p.size);
      if (!count) std::memset(out + b * row, 0, row * sizeof(T));
    });
  }
  return kOk;
}

template <class T>
int prefill(const Problem<T>& p, T* out, const int32_t* tables, int64_t table_row, int64_t width, const int32_t* bounds,
            const int32_t* lengths, int64_t sequences, int64_t tokens, int64_t blocks, int64_t threads) {
  const int64_t group = p.group(), row = p.heads * p.size;
  const int64_t target = most(kMinRows, least(kMaxRows, tokens * p.heads / (kTasksPerThread * most(1, threads))));
  const int64_t per_tile = most(1, target / group);
  int64_t* first = scratch<UnitTag, int64_t>(sequences + 1);
  if (!first) return kNoMemory;
  const Units units{first};
  first[0] = 0;
  for (int64_t n = 0; n < sequences; ++n) {
    const int64_t begin = bounds[n], end = bounds[n + 1], length = lengths[n], count = least(end - begin, length);
    if (begin < 0 || end < begin || end > tokens || length < 0) return kBadArgument;
    const int32_t* table = tables + n * table_row;
    if (count > 0 && !valid_blocks(table, width, blocks, p.block_size, p.first_seen(length - count), length))
      return kBadArgument;
    first[n + 1] = first[n] + (count + per_tile - 1) / per_tile;
    std::memset(out + begin * row, 0, (end - begin - count) * row * sizeof(T));
  }
  const int64_t head_rows = sequences ? bounds[0] : tokens, tail = sequences ? bounds[sequences] : tokens;
  std::memset(out, 0, head_rows * row * sizeof(T));
  std::memset(out + tail * row, 0, (tokens - tail) * row * sizeof(T));

  bool failed = false;
  parallel_for(first[sequences] * p.kv_heads, threads, [&](int64_t task) {
    const int64_t unit = first[sequences] - 1 - task / p.kv_heads, kv_head = task % p.kv_heads;
    const int64_t n = units.sequence_of(unit, sequences), length = lengths[n], end = bounds[n + 1];
    const int64_t count = least(end - bounds[n], length), offset = (unit - first[n]) * per_tile;
    const int64_t here = least(per_tile, count - offset), position = length - count + offset;
    const int64_t token = end - count + offset;
    float* memory = scratch<TileTag, float>(Tile::floats(per_tile * group, p.size));
    if (!memory) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      return;
    }
    Tile tile(memory, per_tile * group, p.size);
    attend_with_best(p, Queries<T>{p.q + token * p.q_token, position, here, kv_head}, tables + n * table_row,
                     p.first_seen(position), position + here, tile);
    for (int64_t r = 0; r < here * group; ++r)
      write_row(out + (token + r / group) * row + (kv_head * group + r % group) * p.size, tile.out + r * tile.width,
                p.size, sum(load(tile.total + r * W)));
  });
  return failed ? kNoMemory : kOk;
}

template <class T>
Problem<T> problem(const void* q, const void* keys, const void* values, const float* slopes, int64_t heads,
                   int64_t kv_heads, int64_t size, int64_t block_size, int64_t q_token, int64_t q_head, int64_t k_block,
                   int64_t k_token, int64_t k_head, int64_t v_block, int64_t v_token, int64_t v_head, double scale,
                   double softcap, int64_t window) {
  return {static_cast<const T*>(q), q_token, q_head,
          {static_cast<const T*>(keys), k_block, k_token, k_head},
          {static_cast<const T*>(values), v_block, v_token, v_head},
          heads, kv_heads, size, block_size, float(scale), float(softcap), window, slopes};
}

}  // namespace
}  // namespace OPSHIM_ISA

// q [sequences,heads,size], caches [blocks,block_size,kv_heads,size] at the strides given, dimension by dimension
// (innermost 1); tables [sequences,table_width] with rows at table_row; out contiguous.
extern "C" int OPSHIM(paged_attention_v2)(
    const void* q, const void* keys, const void* values, const int32_t* tables, const int32_t* lengths,
    const float* slopes, void* out, int64_t dtype, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t size,
    int64_t blocks, int64_t block_size, int64_t table_width, int64_t table_row, int64_t q_token, int64_t q_head,
    int64_t k_block, int64_t k_token, int64_t k_head, int64_t v_block, int64_t v_token, int64_t v_head, double scale,
    double softcap, int64_t window, int64_t threads) {
  using namespace OPSHIM_ISA;
  if (size > kMaxSize) return kBadArgument;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto p = problem<T>(q, keys, values, slopes, heads, kv_heads, size, block_size, q_token, q_head, k_block,
                              k_token, k_head, v_block, v_token, v_head, scale, softcap, window);
    return decode(p, static_cast<T*>(out), tables, table_row, table_width, lengths, sequences, blocks, threads);
  });
}

// As above, with q [tokens,heads,size] ragged: sequence n has the rows bounds[n] to bounds[n + 1].
extern "C" int OPSHIM(paged_prefill)(
    const void* q, const void* keys, const void* values, const int32_t* tables, const int32_t* bounds,
    const int32_t* lengths, const float* slopes, void* out, int64_t dtype, int64_t tokens, int64_t sequences,
    int64_t heads, int64_t kv_heads, int64_t size, int64_t blocks, int64_t block_size, int64_t table_width,
    int64_t table_row, int64_t q_token, int64_t q_head, int64_t k_block, int64_t k_token, int64_t k_head,
    int64_t v_block, int64_t v_token, int64_t v_head, double scale, double softcap, int64_t window, int64_t threads) {
  using namespace OPSHIM_ISA;
  if (size > kMaxSize) return kBadArgument;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const auto p = problem<T>(q, keys, values, slopes, heads, kv_heads, size, block_size, q_token, q_head, k_block,
                              k_token, k_head, v_block, v_token, v_head, scale, softcap, window);
    return prefill(p, static_cast<T*>(out), tables, table_row, table_width, bounds, lengths, sequences, tokens, blocks,
                   threads);
  });
}
