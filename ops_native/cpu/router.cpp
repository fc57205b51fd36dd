// topk_softmax: one row of logits at a time, in registers and L1; reads each logit once.
//
// The k best are taken one by one from a two-level tournament over integer keys that order like the scores: the best
// of each chunk of 64 is kept, so a step looks at the chunks' bests and at one chunk (E = 512: 8 + 64 numbers), where
// a sort would order all E. Equal keys go to the lower index at both levels; a NaN score has the key of -inf.
#include "opshim.h"

namespace OPSHIM_ISA {
namespace {

constexpr int kMaxExperts = 1024, kChunk = 64, kMaxChunks = kMaxExperts / kChunk, kRowsPerTask = 16;
constexpr int32_t kTaken = INT32_MIN;  // below the key of every score

struct Row {  // of experts, padded to whole chunks
  float p[kMaxExperts];
  int32_t key[kMaxExperts];
  int32_t best[kMaxChunks];
};

// p[0..experts) holds logits, and probabilities afterwards. A NaN or +inf logit makes the sum NaN, and with it all p.
void softmax(float* p, int experts) {
  vf most = splat(-HUGE_VALF), total{};
  for (int e = 0; e < experts; e += W) most = vmax(load(p + e), most);
  const float shift = max_of(most);
  for (int e = 0; e < experts; e += W) {
    const vf x = vexp(load(p + e) - shift);
    store(p + e, x);
    total += x;
  }
  const float all = sum(total);
  for (int e = 0; e < experts; e += W) store(p + e, load(p + e) / all);
}

vi key_of(vf score) {
  const vi raw = bits<vi>(select(vi(score != score), splat(-HUGE_VALF), score));
  return raw ^ ((raw >> 31) & 0x7fffffff);
}

int32_t best_of(const int32_t* key) {
  vi most = vi{} + kTaken;
  for (int i = 0; i < kChunk; i += W) {
    const vi x = *(const vi*)(key + i);
    const vi more = vi(x > most);
    most = (x & more) | (most & ~more);
  }
  int32_t best = most[0];
  for (int i = 1; i < W; ++i) best = most[i] > best ? most[i] : best;
  return best;
}

int first_equal(const int32_t* key, int count, int32_t wanted) {
  int i = 0;
  while (i + 1 < count && key[i] != wanted) ++i;
  return i;
}

template <class T>
void route(Row& row, const T* logits, int64_t stride, const float* bias, int64_t bias_stride, int experts, int topk,
           bool renormalize, float* weights, int32_t* ids) {
  const int chunks = (experts + kChunk - 1) / kChunk, padded = chunks * kChunk;
  if (stride == 1)
    for (int e = 0; e < experts; e += W)
      store(row.p + e, e + W <= experts ? load(logits + e) : load(logits + e, experts - e));
  else
    for (int e = 0; e < experts; ++e) row.p[e] = to_f32(logits[e * stride]);
  for (int e = experts; e < padded; ++e) row.p[e] = -HUGE_VALF;
  softmax(row.p, padded);

  for (int e = 0; e < padded; e += W) {
    vf score = load(row.p + e);
    if (bias)
      for (int i = 0; i < W && e + i < experts; ++i) score[i] += bias[(e + i) * bias_stride];
    *(vi*)(row.key + e) = key_of(score);
  }
  for (int e = experts; e < padded; ++e) row.key[e] = kTaken;
  for (int c = 0; c < chunks; ++c) row.best[c] = best_of(row.key + c * kChunk);

  double total = 0;
  for (int j = 0; j < topk; ++j) {
    int32_t most = row.best[0];
    for (int c = 1; c < chunks; ++c) most = row.best[c] > most ? row.best[c] : most;
    const int c = first_equal(row.best, chunks, most);
    int32_t* chunk = row.key + c * kChunk;
    const int i = first_equal(chunk, kChunk, most);
    chunk[i] = kTaken;
    row.best[c] = best_of(chunk);
    ids[j] = c * kChunk + i;
    weights[j] = row.p[ids[j]];
    total += weights[j];
  }
  if (renormalize)
    for (int j = 0; j < topk; ++j) weights[j] = float(weights[j] / total);
}

}  // namespace
}  // namespace OPSHIM_ISA

// logits [rows,experts] and bias [experts] (or null) at any strides -> weights, ids [rows,topk], contiguous
extern "C" int OPSHIM(topk_softmax)(const void* logits, const float* bias, float* weights, int32_t* ids, int64_t dtype,
                                    int64_t rows, int64_t experts, int64_t row_stride, int64_t stride,
                                    int64_t bias_stride, int64_t topk, int64_t renormalize, int64_t threads) {
  using namespace OPSHIM_ISA;
  if (experts > kMaxExperts || topk > experts) return kBadArgument;
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, threads, [&](int64_t task) {
      Row row;
      const int64_t end = task * kRowsPerTask + kRowsPerTask;
      for (int64_t r = task * kRowsPerTask; r < (end < rows ? end : rows); ++r)
        route(row, static_cast<const T*>(logits) + r * row_stride, stride, bias, bias_stride, int(experts), int(topk),
              renormalize != 0, weights + r * topk, ids + r * topk);
    });
    return int(kOk);
  });
}
