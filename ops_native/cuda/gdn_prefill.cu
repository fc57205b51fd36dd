// gdn_prefill: which of its two forms runs, and the launches.
//
//   steps    token by token in float32 (gdn_prefill_steps.cuh): any sizes and dtypes. Some 0.12 us per token, as long
//            as all blocks, of 32 rows of a state each, fit the GPU at once.
//   chunks   64 tokens at a time on tensor cores (gdn_prefill_chunks.cuh): half types, K of 64 or 128, V in slices of
//            32, sequences of 64 tokens and more on average, and a GPU with room for two chunks in shared memory. Some
//            0.04 us per token of 16/32 heads of 128 on an H200; the floor, q, k, v and o once, is 0.006 us.
//
// The chunks of all sequences are numbered; scratch holds up to kMostScratch bytes of them at a time, and the two phases
// take turns. The state of a sequence that spans two turns is carried in float32. A turn costs some 17 us in starts and
// ends, which is more than an H200 gains where what is held stays in its L2 cache.
#include "gdn_prefill_local.cuh"
#include "gdn_prefill_scan.cuh"
#include "gdn_prefill_steps.cuh"
#include "gdn_prefill_wgmma.cuh"

namespace {

constexpr int64_t kMostScratch = 192 << 20;

struct Plan {
  int64_t parts = 0, held = 0;  // none: token by token
  int stages = 0;               // chunks in shared memory, where they are not kRing
  int64_t redo = 0, carry = 0, heads = 0, size = 0;  // bytes of scratch up to which each part reaches

  Plan(int64_t T, int64_t N, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t dtype) {
    if (dtype == kF32 || (K != 64 && K != 128) || V % kSlice || V == 0 || N == 0 || T < kChunk * N) return;
    const int64_t stage = K == 64 ? sizeof(Stage<f16, 64>) : sizeof(Stage<f16, 128>);
    const int64_t exchange = K == 64 ? sizeof(Exchange<64>) : sizeof(Exchange<128>);
    stages = int((shared_memory_limit() - exchange) / stage);
    if (stages < 2) return;
    if (stages > kStages) stages = kStages;
    const int64_t bytes = HV * sizeof(HeadChunk) + H * 2 * kChunk * K * sizeof(f16);  // of one chunk
    const int64_t chunks = T / kChunk + N, most = kMostScratch / bytes;
    parts = ceil_div(chunks, most > 16 ? most : 16);
    held = ceil_div(chunks, parts);
    redo = ceil_div<int64_t>(N * HV * (V / kSlice) * sizeof(int32_t), 256) * 256;
    carry = redo + 2 * HV * V * K * sizeof(float);  // what came and what goes on, in turns
    heads = carry + held * HV * sizeof(HeadChunk);
    size = carry + held * bytes;
  }
};

template <int K, class T>
int launch_chunks(const Plan& plan, const Prefill& p, const Tokens<T>& in, void* pool, bool pool_is_f32, T* o,
                  char* memory, void* stream) {
  Scratch scratch = {(int32_t*)memory, nullptr, nullptr, (HeadChunk*)(memory + plan.carry), (f16*)(memory + plan.heads)};
  float* const carries[] = {(float*)(memory + plan.redo), (float*)(memory + plan.redo) + p.HV * p.V * K};
  const bool packs = aligned(16, in.q) && aligned(16, in.k), packs_values = aligned(16, in.v);
  const int64_t chunks = p.T / kChunk + p.N;
  for (int64_t first = 0; first < chunks; first += plan.held) {
    const Part part = {first, first + plan.held < chunks ? first + plan.held : chunks};
    const int64_t count = part.end - part.first, turn = first / plan.held;
    scratch.came = carries[(turn + 1) % 2], scratch.goes = carries[turn % 2];
    int status = launch_early(local_kernel<T, K>, dim3(count * p.H * ceil_div<int64_t>(p.HV / p.H, kHeads)),
                              dim3(kLocalThreads), sizeof(LocalShared<K>), stream, p, in.q, in.k, scratch, part, packs);
    if (status != kOk) return status;
    const bool by_chunk = count < p.N;
    const dim3 grid((by_chunk ? count : p.N) * p.HV * (p.V / kSlice));
    if (capability() == 90)
      status = launch_early(scan_wgmma_kernel<T, K>, grid, dim3(kWgmmaThreads), sizeof(WgmmaShared<T, K>), stream, p,
                            in.v, pool, pool_is_f32, o, scratch, part, by_chunk, packs_values);
    else
      status = launch_early(scan_kernel<T, K>, grid, dim3(kScanThreads),
                            sizeof(Exchange<K>) + plan.stages * sizeof(Stage<T, K>), stream, p, in.v, pool, pool_is_f32,
                            o, scratch, part, by_chunk, packs_values, plan.stages);
    if (status != kOk) return status;
  }
  return kOk;
}

}  // namespace

// How many bytes of scratch gdn_prefill needs for these sizes -> size.
extern "C" int OPSHIM(gdn_prefill_scratch)(int64_t* size, int64_t T, int64_t N, int64_t H, int64_t HV, int64_t K,
                                           int64_t V, int64_t dtype, int64_t device, void*) {
  OnDevice on(device);
  *size = Plan(T, N, H, HV, K, V, dtype).size;
  return kOk;
}

// q, k [T,H,K], v [T,HV,V] with token and head strides; g, beta [T,HV] with row strides; state [S,HV,V,K] with a
// stride of its slots; state_indices [N] with a stride; has_initial_state [N], cu_seqlens [N+1] -> o [T,HV,V].
extern "C" int OPSHIM(gdn_prefill)(
    const void* q, const void* k, const void* v, const float* g, const float* beta, void* state,
    const int32_t* state_indices, const bool* has_initial_state, const int32_t* cu_seqlens, void* o, void* scratch,
    int64_t scratch_size, int64_t T, int64_t N, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t q_token,
    int64_t q_head, int64_t k_token, int64_t k_head, int64_t v_token, int64_t v_head, int64_t g_stride,
    int64_t beta_stride, int64_t state_stride, int64_t indices_stride, double scale, int64_t l2norm, int64_t dtype,
    int64_t state_dtype, int64_t device, void* stream) {
  OnDevice on(device);
  const Prefill p = {T, N, H, HV, K, V, g, beta, g_stride, beta_stride, state_stride, state_indices, indices_stride,
                     has_initial_state, cu_seqlens, float(scale), l2norm != 0};
  const Plan plan(T, N, H, HV, K, V, dtype);
  if (scratch_size < plan.size) return kBadArgument;
  return by_dtypes(dtype, state_dtype, [&](auto t, auto s) -> int {
    using A = decltype(t);
    using S = decltype(s);
    if (N == 0) return status_of(cudaMemsetAsync(o, 0, T * HV * V * sizeof(A), cudaStream_t(stream)));
    const Tokens<A> in = {rows<const A>(q, q_token, q_head), rows<const A>(k, k_token, k_head),
                          rows<const A>(v, v_token, v_head)};
    if constexpr (sizeof(A) == 2)
      if (plan.parts) {
        const auto chunks = K == 64 ? launch_chunks<64, A> : launch_chunks<128, A>;
        const int status = chunks(plan, p, in, state, sizeof(S) == 4, (A*)o, (char*)scratch, stream);
        if (status != kOk) return status;
      }
    return launch_steps(p, in, (S*)state, (A*)o, plan.parts ? (const int32_t*)scratch : nullptr, stream);
  });
}
