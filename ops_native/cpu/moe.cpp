// Mixture of experts: moe_align_block_size, moe_sum, grouped_gemm, fused_moe.
//
// Idea: slots are grouped by expert, each expert's tokens packed into panels of 32 (gemm.h), and a task is a block of
// an expert's weight rows times all of that expert's panels, so that every weight is read from memory once per wave.
// fused_moe keeps what is between its two products in panels, wider than act, and each task of the second product owns
// some columns of the output and adds up all experts there: no buffer of T*k results, no order that depends on threads.
// Floor: the chosen experts' weights once, 3*I*Hd*2 bytes each in half precision; from about 64 tokens per expert on,
// arithmetic.
#include "gemm.h"

using namespace OPSHIM_ISA;

namespace OPSHIM_ISA {
namespace {

constexpr int64_t kWave = 8192;  // slots packed at a time: bounds the scratch, and covers 1,024 tokens of top 8

struct Run {  // consecutive slots of one expert
  int64_t expert, first, count;
};

struct Group {  // up to 32 slots of a run
  const int32_t* slots;
  Panel x, hidden;
};

struct Batch {  // the groups of a run within a wave
  int64_t expert;
  Group* begin;
  Group* end;
};

struct Wave {
  Batch* batches;
  Group* groups;
  int64_t batch_count, group_count;
};

// Cuts runs into waves and calls work(wave) for each; panels have memory for `inner` and for `hidden` values per slot.
template <class T, class F>
int for_each_wave(const Run* runs, int64_t count, const int32_t* slots, int64_t inner, int64_t hidden, bool exact,
                  F&& work) {
  int64_t run = 0, done = 0;  // slots of the run that earlier waves took
  Batch* batches = scratch<struct Batches, Batch>(count < kWave ? count : kWave);
  Group* groups = scratch<struct Groups, Group>((count < kWave ? count : kWave) + kWave / kColumns);
  if (!batches || !groups) return kNoMemory;
  while (run < count) {
    Wave wave{batches, groups, 0, 0};
    int64_t bytes = 0;
    for (int64_t room = kWave; room && run < count;) {
      const int64_t left = runs[run].count - done, taken = left < room ? left : room;
      Batch& batch = batches[wave.batch_count++] = {runs[run].expert, groups + wave.group_count, nullptr};
      for (int64_t i = 0; i < taken; i += kColumns) {
        const int columns = int(taken - i < kColumns ? taken - i : kColumns);
        Group& group = groups[wave.group_count++];
        group = {slots + runs[run].first + done + i, make_panel<T>(columns, inner, exact),
                 make_panel<T>(columns, hidden, false)};
        bytes += group.x.bytes() + group.hidden.bytes();
      }
      batch.end = groups + wave.group_count;
      room -= taken;
      done += taken;
      if (done == runs[run].count) {
        ++run;
        done = 0;
      }
    }
    char* memory = scratch<struct Panels, char>(bytes);
    if (!memory) return kNoMemory;
    for (Group* g = groups; g < groups + wave.group_count; ++g) {
      g->x.data = memory;
      g->hidden.data = memory + g->x.bytes();
      memory = g->hidden.data + g->hidden.bytes();
    }
    work(wave);
  }
  return kOk;
}

inline int64_t blocks_of(int64_t n) { return (n + kRows - 1) / kRows; }
inline int rows_of(int64_t n, int64_t first) { return int(n - first < kRows ? n - first : kRows); }

// Block of weight rows from `first` on, for all groups of a batch.
template <class T>
inline Weights<T> weights_for(const Batch& batch, const T* w, int64_t first, int rows, int64_t inner) {
  Weights<T> block{w + first * inner, inner, rows};
  if (batch.end - batch.begin > 1) block.prepare(inner);
  return block;
}

inline vf silu(vf v) { return v / (1.0f + vexp(-v)); }

// An expert's id in this process; negative: none, kUnknown: out of range.
constexpr int64_t kUnknown = INT64_MIN;
inline int64_t local_id(int32_t id, const int32_t* map, int64_t map_size, int64_t experts) {
  if (id < 0) return -1;
  if (map && id >= map_size) return kUnknown;
  const int64_t local = map ? map[id] : id;
  return local < experts ? local : kUnknown;
}

// Slots in the order of their experts, and the experts' runs; -1 for an id out of range, -2 for no memory.
int64_t sort_slots(const int32_t* ids, int64_t slots, const int32_t* map, int64_t map_size, int64_t experts,
                   int32_t** sorted, Run** runs) {
  int64_t* next = scratch<struct Next, int64_t>(experts + 1);
  *sorted = scratch<struct Sorted, int32_t>(slots);
  *runs = scratch<struct Runs, Run>(experts);
  if (!next || !*sorted || !*runs) return -2;
  std::memset(next, 0, (experts + 1) * sizeof(int64_t));
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t e = local_id(ids[s], map, map_size, experts);
    if (e == kUnknown) return -1;
    if (e >= 0) ++next[e + 1];
  }
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (next[e + 1]) (*runs)[count++] = {e, next[e], next[e + 1]};
    next[e + 1] += next[e];
  }
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t e = local_id(ids[s], map, map_size, experts);
    if (e >= 0) (*sorted)[next[e]++] = int32_t(s);
  }
  return count;
}

// out[n] = T(values[n])
template <class T>
inline void store_row(T* out, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; i += W) {
    const int here = n - i < W ? int(n - i) : W;
    here == W ? store(out + i, load(values + i)) : store(out + i, load(values + i, here), here);
  }
}

struct Fused {
  const void *x, *w1, *w2, *w3;
  const float* weights;
  const int32_t *ids, *map;
  void* out;
  int64_t tokens, top_k, experts, inner, hidden, map_size, on_input, x_stride, w1_stride, w2_stride, w3_stride, threads;
};

template <class T>
int fused(const Fused& f) {
  const T *x = (const T*)f.x, *gate = (const T*)f.w1, *up = (const T*)f.w3, *down = (const T*)f.w2;
  int64_t up_stride = f.w3_stride;
  if (!up) {
    up = gate + f.inner * f.hidden;
    up_stride = f.w1_stride;
  }
  int32_t* slots;
  Run* runs;
  const int64_t count = sort_slots(f.ids, f.tokens * f.top_k, f.map, f.map_size, f.experts, &slots, &runs);
  if (count < 0) return count == -1 ? kBadArgument : kNoMemory;
  float* out = scratch<struct Out, float>(f.tokens * f.hidden);
  if (!out) return kNoMemory;
  std::memset(out, 0, f.tokens * f.hidden * sizeof(float));

  const int status = for_each_wave<T>(runs, count, slots, f.hidden, f.inner, !f.on_input, [&](const Wave& wave) {
    parallel_for(wave.group_count, f.threads, [&](int64_t g) {
      const Group& group = wave.groups[g];
      clear(group.x);
      for (int j = 0; j < group.x.columns; ++j) {
        const int32_t slot = group.slots[j];
        put_column(group.x, j, x + slot / f.top_k * f.x_stride, f.on_input ? f.weights[slot] : 1.0f);
      }
    });
    parallel_for(wave.batch_count * blocks_of(f.inner), f.threads, [&](int64_t task) {
      const TileScope tiles;
      const Batch& batch = wave.batches[task / blocks_of(f.inner)];
      const int64_t first = task % blocks_of(f.inner) * kRows;
      const int rows = rows_of(f.inner, first);
      alignas(64) float g[kRows * kColumns], u[kRows * kColumns];
      for (const Group* group = batch.begin; group < batch.end; ++group) {
        multiply(Weights<T>{gate + batch.expert * f.w1_stride + first * f.hidden, f.hidden, rows}, group->x, g);
        multiply(Weights<T>{up + batch.expert * up_stride + first * f.hidden, f.hidden, rows}, group->x, u);
        for (int i = 0; i < rows * kColumns; i += kColumns)
          for (int j = i; j < i + group->x.columns; j += W) store(g + j, silu(load(g + j)) * load(u + j));
        put_block<T>(group->hidden, first, rows, g);
      }
    });
    parallel_for(blocks_of(f.hidden), f.threads, [&](int64_t block) {
      const TileScope tiles;
      const int64_t first = block * kRows;
      const int rows = rows_of(f.hidden, first);
      alignas(64) float c[kRows * kColumns], row[kRows];
      for (const Batch* batch = wave.batches; batch < wave.batches + wave.batch_count; ++batch) {
        const auto w = weights_for(*batch, down + batch->expert * f.w2_stride, first, rows, f.inner);
        for (const Group* group = batch->begin; group < batch->end; ++group) {
          multiply(w, group->hidden, c);
          for (int j = 0; j < group->x.columns; ++j) {
            const int32_t slot = group->slots[j];
            take_column(c, rows, j, f.on_input ? 1.0f : f.weights[slot], row);
            float* to = out + slot / f.top_k * f.hidden + first;
            for (int i = 0; i < rows; ++i) to[i] += row[i];
          }
        }
      }
    });
  });
  if (status != kOk) return status;
  parallel_for(f.tokens, f.threads, [&](int64_t t) {
    store_row((T*)f.out + t * f.hidden, out + t * f.hidden, f.hidden);
  });
  return kOk;
}

struct Grouped {
  const void *x, *w;
  const int32_t *sorted, *experts;
  const float* weights;
  void* y;
  int64_t slots, entries, block_size, top_k, expert_count, rows, inner, x_stride, w_stride, threads;
};

template <class T>
int grouped(const Grouped& g) {
  const T *x = (const T*)g.x, *w = (const T*)g.w;
  T* y = (T*)g.y;
  const int64_t blocks = (g.entries + g.block_size - 1) / g.block_size;
  int32_t* slots = scratch<struct Compact, int32_t>(g.entries);
  Run* runs = scratch<struct BlockRuns, Run>(blocks);
  uint8_t* written = scratch<struct Written, uint8_t>(g.slots);
  if (!slots || !runs || !written) return kNoMemory;
  std::memset(written, 0, g.slots);
  int64_t count = 0, used = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t e = g.experts[b], end = (b + 1) * g.block_size;
    if (e < 0) continue;
    if (e >= g.expert_count) return kBadArgument;
    if (!count || runs[count - 1].expert != e) runs[count++] = {e, used, 0};
    for (int64_t i = b * g.block_size; i < end && i < g.entries; ++i) {
      const int64_t s = g.sorted[i];
      if (s < 0 || s >= g.slots) continue;
      slots[used++] = int32_t(s);
      written[s] = 1;
    }
    runs[count - 1].count = used - runs[count - 1].first;
    if (!runs[count - 1].count) --count;
  }
  parallel_for(g.slots, g.threads, [&](int64_t s) {
    if (!written[s]) std::memset((void*)(y + s * g.rows), 0, g.rows * sizeof(T));
  });
  return for_each_wave<T>(runs, count, slots, g.inner, 0, true, [&](const Wave& wave) {
    parallel_for(wave.group_count, g.threads, [&](int64_t i) {
      const Group& group = wave.groups[i];
      clear(group.x);
      for (int j = 0; j < group.x.columns; ++j) put_column(group.x, j, x + group.slots[j] / g.top_k * g.x_stride);
    });
    parallel_for(wave.batch_count * blocks_of(g.rows), g.threads, [&](int64_t task) {
      const TileScope tiles;
      const Batch& batch = wave.batches[task / blocks_of(g.rows)];
      const int64_t first = task % blocks_of(g.rows) * kRows;
      const int rows = rows_of(g.rows, first);
      const auto block = weights_for(batch, w + batch.expert * g.w_stride, first, rows, g.inner);
      alignas(64) float c[kRows * kColumns], row[kRows];
      for (const Group* group = batch.begin; group < batch.end; ++group) {
        multiply(block, group->x, c);
        for (int j = 0; j < group->x.columns; ++j) {
          const int64_t slot = group->slots[j];
          take_column(c, rows, j, g.weights ? g.weights[slot] : 1.0f, row);
          store_row(y + slot * g.rows + first, row, rows);
        }
      }
    });
  });
}

// out[n] = the sum of a token's slots, `Vectors` vectors at a time: independent sums hide an addition's latency.
template <int Vectors, class T>
inline void sum_columns(const T* y, const int32_t* ids, T* out, int64_t top_k, int64_t slot_stride, int n) {
  vf total[Vectors] = {};
  for (int64_t j = 0; j < top_k; ++j) {
    if (ids && ids[j] < 0) continue;
    const T* from = y + j * slot_stride;
    for (int v = 0; v < Vectors; ++v) total[v] += n < W ? load(from, n) : load(from + v * W);
  }
  for (int v = 0; v < Vectors; ++v) n < W ? store(out, total[v], n) : store(out + v * W, total[v]);
}

template <class T>
int sum_slots(const T* y, const int32_t* ids, T* out, int64_t tokens, int64_t top_k, int64_t n, int64_t token_stride,
              int64_t slot_stride, int64_t threads) {
  parallel_for(tokens, threads, [&](int64_t t) {
    const int32_t* chosen = ids ? ids + t * top_k : nullptr;
    const T* from = y + t * token_stride;
    T* to = out + t * n;
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) sum_columns<4>(from + i, chosen, to + i, top_k, slot_stride, 4 * W);
    for (; i < n; i += W) sum_columns<1>(from + i, chosen, to + i, top_k, slot_stride, n - i < W ? int(n - i) : W);
  });
  return kOk;
}

}  // namespace
}  // namespace OPSHIM_ISA

extern "C" int OPSHIM(moe_align_block_size)(const int32_t* ids, const int32_t* map, int32_t* sorted_ids,
                                            int32_t* expert_ids, int32_t* padded, int64_t slots, int64_t block_size,
                                            int64_t experts, int64_t capacity, int64_t) {
  int32_t* sorted;
  Run* runs;
  const int64_t count = sort_slots(ids, slots, map, experts, experts, &sorted, &runs);
  if (count < 0) return count == -1 ? kBadArgument : kNoMemory;
  int64_t end = 0;
  for (const Run* run = runs; run < runs + count; ++run) {
    std::memcpy(sorted_ids + end, sorted + run->first, run->count * sizeof(int32_t));
    const int64_t blocks = (run->count + block_size - 1) / block_size;
    for (int64_t b = 0; b < blocks; ++b) expert_ids[end / block_size + b] = int32_t(run->expert);
    for (int64_t i = end + run->count; i < end + blocks * block_size; ++i) sorted_ids[i] = int32_t(slots);
    end += blocks * block_size;
  }
  *padded = int32_t(end);
  for (int64_t i = end; i < capacity; ++i) sorted_ids[i] = int32_t(slots);
  for (int64_t b = end / block_size; b < capacity / block_size; ++b) expert_ids[b] = -1;
  return kOk;
}

extern "C" int OPSHIM(moe_sum)(const void* y, const int32_t* ids, void* out, int64_t dtype, int64_t tokens,
                               int64_t top_k, int64_t n, int64_t token_stride, int64_t slot_stride, int64_t threads) {
  return with_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    return sum_slots((const T*)y, ids, (T*)out, tokens, top_k, n, token_stride, slot_stride, threads);
  });
}

// rows: N. padded: the count of entries that are blocks, at most `capacity`.
extern "C" int OPSHIM(grouped_gemm)(const void* x, const void* w, const int32_t* sorted, const int32_t* experts,
                                    const int32_t* padded, const float* weights, void* y, int64_t dtype, int64_t slots,
                                    int64_t capacity, int64_t block_size, int64_t top_k, int64_t expert_count,
                                    int64_t rows, int64_t inner, int64_t x_stride, int64_t w_stride, int64_t threads) {
  const int64_t entries = *padded < 0 ? 0 : *padded < capacity ? *padded : capacity;
  const Grouped g{x,     w,          sorted, experts,      weights, y,     slots,    entries,
                  block_size, top_k, expert_count, rows, inner, x_stride, w_stride, threads};
  return with_dtype(dtype, [&](auto t) { return grouped<decltype(t)>(g); });
}

// inner: I. hidden: Hd. w3 null: w1 holds gate and up. Strides: of a token in x, of an expert in the weights.
extern "C" int OPSHIM(fused_moe)(const void* x, const void* w1, const void* w2, const void* w3, const float* weights,
                                 const int32_t* ids, const int32_t* map, void* out, int64_t dtype, int64_t tokens,
                                 int64_t top_k, int64_t experts, int64_t inner, int64_t hidden, int64_t map_size,
                                 int64_t on_input, int64_t x_stride, int64_t w1_stride, int64_t w2_stride,
                                 int64_t w3_stride, int64_t threads) {
  const Fused f{x,     w1,    w2,      w3,       weights,  ids,       map,       out,       tokens, top_k,
                experts, inner, hidden, map_size, on_input, x_stride, w1_stride, w2_stride, w3_stride, threads};
  return with_dtype(dtype, [&](auto t) { return fused<decltype(t)>(f); });
}
