// gdn_prefill: the gated delta rule over ragged sequences, four tokens at a time.
//
// A recurrence that takes one token per visit of the state is bound by loads and horizontal sums, not arithmetic. So:
//   - the state is kept transposed, [K][V], lanes over V: then S k and S q are sums of (scalar of k) * (row of S) and
//     no horizontal sum is left; and rows of V are independent, so a slab of V (a few vectors) goes through a whole
//     tile of tokens while it stays in the first-level cache (128 x 32 floats are 16 KiB);
//   - a block of four tokens shares each visit. With S the state before the block, D_ij the decay from token j to i,
//     d_i that from the block's start:
//         u_i = beta_i (v_i - d_i S k_i - sum_{j<i} D_ij (k_i . k_j) u_j)
//         o_i = scale (d_i S q_i + sum_{j<=i} D_ij (q_i . k_j) u_j)
//         S  <- d_4 S + sum_j D_4j u_j k_j^T
//     One pass takes the eight products S k_i, S q_i (8 x 2 vectors: a matrix kernel at its register limit), a second
//     one adds the four outer products. 12 multiply-adds and one multiplication per state value for four tokens, where
//     the recurrence has 12 and four.
// Decays are products of e^min(g, 0) <= 1, so no gate overflows, and what a token writes is never multiplied into an
// earlier one, so NaN stays where it belongs.
#include "gated_delta_net.h"

namespace OPSHIM_ISA {

constexpr int kBlock = 4;
constexpr int kTile = 32;                  // tokens that are prepared at a time
constexpr int kVectors = W == 16 ? 2 : 1;  // of a slab; AVX2 has half the registers
constexpr int kSlab = kVectors * W;

// What the four tokens of a block share among all rows of V.
struct Block {
  int tokens;                    // 1 to 4; the rest has zero keys and queries
  float start[kBlock];           // d_i
  float out[kBlock];             // scale * d_i
  float end[kBlock];             // D_4j
  float whole;                   // d_4
  float beta[kBlock];
  float keys[kBlock][kBlock];    // D_ij (k_i . k_j), j < i
  float reads[kBlock][kBlock];   // scale * D_ij (q_i . k_j), j <= i
};

struct Prefill {
  int64_t T, N, H, HV, K, V, S;
  const float *g, *beta;
  int64_t g_stride, beta_stride, state_stride;
  const int32_t* slots;
  int64_t slots_stride;
  const bool* continued;
  const int32_t* bounds;
  float scale;
  bool l2norm;
  int64_t threads;

  int64_t slot(int64_t n) const { return slots[n * slots_stride]; }
  bool valid() const {
    for (int64_t n = 0; n < N; ++n)
      if (bounds[n] < 0 || bounds[n] > bounds[n + 1] || bounds[n + 1] > T || slot(n) >= S) return false;
    return true;
  }
};

// Keys and queries of a block lie as [K/W][8][W]: four keys, four queries, W values of each.
template <class A>
void prepare(const Prefill& p, Rows<A> q, Rows<A> k, int64_t head, int64_t t, int tokens, float* x, Block& c) {
  const int64_t shared = head / (p.HV / p.H), panels = (p.K + W - 1) / W, step = 2 * kBlock * W;
  vf g = {};
  c.tokens = tokens;
  for (int i = 0; i < kBlock; ++i) {
    if (i < tokens) {
      unit_row(k.at(t + i, shared), p.K, p.l2norm, x + i * W, step);
      unit_row(q.at(t + i, shared), p.K, p.l2norm, x + (kBlock + i) * W, step);
      g[i] = p.g[(t + i) * p.g_stride + head];
    } else {
      for (int64_t n = 0; n < panels; ++n) {
        store(x + n * step + i * W, vf{});
        store(x + n * step + (kBlock + i) * W, vf{});
      }
    }
    c.beta[i] = i < tokens ? p.beta[(t + i) * p.beta_stride + head] : 0.0f;
  }
  const vf e = decay_of(g);  // 1 where there is no token

  vf kk[kBlock][kBlock] = {}, qk[kBlock][kBlock] = {};
  for (int64_t n = 0; n < panels; ++n) {
    vf row[2 * kBlock];
    for (int i = 0; i < 2 * kBlock; ++i) row[i] = load(x + n * step + i * W);
    for (int i = 0; i < kBlock; ++i)
      for (int j = 0; j <= i; ++j) {
        if (j < i) kk[i][j] += row[i] * row[j];
        qk[i][j] += row[kBlock + i] * row[j];
      }
  }
  for (int i = 0; i < kBlock; ++i) {
    float decay = 1;  // from token j to token i
    for (int j = i; j >= 0; --j) {
      if (j < i) c.keys[i][j] = decay * sum(kk[i][j]);
      c.reads[i][j] = p.scale * decay * sum(qk[i][j]);
      if (i == kBlock - 1) c.end[j] = decay;
      decay *= e[j];
    }
    c.start[i] = decay;
    c.out[i] = p.scale * decay;
  }
  c.whole = c.start[kBlock - 1];
}

// One block of tokens through one slab s [K][kSlab]. v: the slab's part of the tokens' values, rows `stride` apart; the
// outputs take their place.
inline void pass(float* s, int64_t K, const float* x, const Block& c, float* v, int64_t stride) {
  constexpr int step = 2 * kBlock * W;
  vf sk[kBlock][kVectors] = {}, sq[kBlock][kVectors] = {}, u[kBlock][kVectors] = {};
  const float* panel = x;
  for (int64_t first = 0; first < K; first += W, panel += step) {
    const int count = K - first < W ? int(K - first) : W;
    for (int n = 0; n < count; ++n)
      for (int j = 0; j < kVectors; ++j) {
        const vf row = load(s + (first + n) * kSlab + j * W);
        for (int i = 0; i < kBlock; ++i) {
          sk[i][j] += row * panel[i * W + n];
          sq[i][j] += row * panel[(kBlock + i) * W + n];
        }
      }
  }
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kVectors; ++j) {
      vf rest = load(v + i * stride + j * W) - sk[i][j] * c.start[i], out = sq[i][j] * c.out[i];
      for (int l = 0; l < i; ++l) {
        rest -= u[l][j] * c.keys[i][l];
        out += u[l][j] * c.reads[i][l];
      }
      u[i][j] = i < c.tokens ? rest * c.beta[i] : vf{};
      store(v + i * stride + j * W, out + u[i][j] * c.reads[i][i]);
    }
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j < kVectors; ++j) u[i][j] *= c.end[i];
  const vf whole = splat(c.whole);
  panel = x;
  for (int64_t first = 0; first < K; first += W, panel += step) {
    const int count = K - first < W ? int(K - first) : W;
    for (int n = 0; n < count; ++n) {
      float* at = s + (first + n) * kSlab;
      vf row[kVectors];
      for (int j = 0; j < kVectors; ++j) row[j] = load(at + j * W) * whole;
      for (int i = 0; i < kBlock; ++i)
        for (int j = 0; j < kVectors; ++j) row[j] += u[i][j] * panel[i * W + n];
      for (int j = 0; j < kVectors; ++j) store(at + j * W, row[j]);
    }
  }
}

// Rows first to last of one head's state, over one sequence.
template <class A, class S>
int sequence(const Prefill& p, Rows<A> q, Rows<A> k, Rows<A> v, S* state, Rows<A> o, int64_t n, int64_t head,
             int64_t first, int64_t last) {
  const int64_t height = rounded_up(last - first, kSlab), size = p.K * kSlab;
  const int64_t block = rounded_up(p.K, W) * 2 * kBlock;
  float* s = scratch<Prefill, float>(height * p.K + kTile / kBlock * block + kTile * height);
  if (!s) return kNoMemory;
  float *x = s + height * p.K, *values = x + kTile / kBlock * block;
  S* kept = p.slot(n) < 0 ? nullptr : state + p.slot(n) * p.state_stride + head * p.V * p.K;
  std::memset(s, 0, height * p.K * sizeof(float));
  if (kept && p.continued[n])
    for (int64_t i = first; i < last; ++i)
      for (int64_t j = 0; j < p.K; ++j)
        s[(i - first) / kSlab * size + j * kSlab + (i - first) % kSlab] = to_f32(kept[i * p.K + j]);

  Block blocks[kTile / kBlock];
  const int64_t end = p.bounds[n + 1];
  for (int64_t tile = p.bounds[n]; tile < end; tile += kTile) {
    const int64_t stop = end - tile < kTile ? end : tile + kTile;
    for (int64_t t = tile; t < stop; ++t)
      unit_row(v.at(t, head) + first, last - first, false, values + (t - tile) * height, W);
    for (int64_t t = tile, b = 0; t < stop; t += kBlock, ++b)
      prepare(p, q, k, head, t, stop - t < kBlock ? int(stop - t) : kBlock, x + b * block, blocks[b]);
    for (int64_t i = first; i < last; i += kSlab)
      for (int64_t t = tile, b = 0; t < stop; t += kBlock, ++b)
        pass(s + (i - first) / kSlab * size, p.K, x + b * block, blocks[b], values + (t - tile) * height + i - first,
             height);
    for (int64_t t = tile; t < stop; ++t)
      each_vector(last - first, [&](int64_t i, int n) {
        store_up_to(o.at(t, head) + first + i, load(values + (t - tile) * height + i), n);
      });
  }

  if (kept)
    for (int64_t i = first; i < last; ++i)
      for (int64_t j = 0; j < p.K; ++j)
        kept[i * p.K + j] = from_f32<S>(s[(i - first) / kSlab * size + j * kSlab + (i - first) % kSlab]);
  return kOk;
}

template <class A, class S>
int prefill(const Prefill& p, Rows<A> q, Rows<A> k, Rows<A> v, S* state, Rows<A> o) {
  if (!p.valid()) return kBadArgument;
  const int64_t begin = p.N ? p.bounds[0] : p.T, end = p.N ? p.bounds[p.N] : p.T;
  std::memset(o.at(0, 0), 0, begin * o.token_stride * sizeof(A));
  std::memset(o.at(end, 0), 0, (p.T - end) * o.token_stride * sizeof(A));

  const int64_t slabs = (p.V + kSlab - 1) / kSlab, parts = parts_for(p.N * p.HV, p.threads, slabs);
  int status = kOk;
  parallel_for(p.N * p.HV * parts, p.threads, [&](int64_t task) {
    const int64_t n = task / parts / p.HV, head = task / parts % p.HV, part = task % parts;
    const int64_t first = slabs * part / parts * kSlab, last = slabs * (part + 1) / parts * kSlab;
    const int result = sequence(p, q, k, v, state, o, n, head, first, last < p.V ? last : p.V);
    if (result != kOk) __atomic_store_n(&status, result, __ATOMIC_RELAXED);
  });
  return status;
}

}  // namespace OPSHIM_ISA

using namespace OPSHIM_ISA;

// q, k [T,H,K], v [T,HV,V] with token and head strides; g, beta [T,HV] with row strides; state [S,HV,V,K] with a
// stride of its slots; state_indices [N] with a stride; has_initial_state [N], cu_seqlens [N+1] -> o [T,HV,V].
extern "C" int OPSHIM(gdn_prefill)(const void* q, const void* k, const void* v, const float* g, const float* beta,
                                   void* state, const int32_t* state_indices, const bool* has_initial_state,
                                   const int32_t* cu_seqlens, void* o, int64_t T, int64_t N, int64_t H, int64_t HV,
                                   int64_t K, int64_t V, int64_t S, int64_t q_token, int64_t q_head, int64_t k_token,
                                   int64_t k_head, int64_t v_token, int64_t v_head, int64_t g_stride,
                                   int64_t beta_stride, int64_t state_stride, int64_t indices_stride, double scale,
                                   int64_t l2norm, int64_t dtype, int64_t state_dtype, int64_t threads) {
  const Prefill p = {T, N, H, HV, K, V, S, g, beta, g_stride, beta_stride, state_stride, state_indices,
                     indices_stride, has_initial_state, cu_seqlens, float(scale), l2norm != 0, threads};
  return with_dtype(dtype, [&](auto act) {
    using A = decltype(act);
    return with_dtype(state_dtype, [&](auto kept) {
      using S_ = decltype(kept);
      return prefill<A, S_>(p, rows<A>(q, q_token, q_head), rows<A>(k, k_token, k_head), rows<A>(v, v_token, v_head),
                            static_cast<S_*>(state), rows<A>(o, HV * V, V));
    });
  });
}
