// reshape_and_cache: copies tokens' keys and values into their slots of the paged caches.
//
// A row of threads per token, each with 16 bytes of the key and of the value; smaller units where sizes or addresses
// allow no more. Neighbouring heads that are contiguous on both sides are one long head.
// Bound by memory: key and value once in, once out.
#include "opshim.cuh"

namespace {

constexpr int kThreads = 256;

struct Strides {  // in units of the copy; `first` of blocks
  int64_t first, token, head;
};

struct Problem {
  const void *key, *value;
  void *key_cache, *value_cache;
  const int64_t* slots;
  int64_t tokens, capacity, block_size;
  uint64_t reciprocal;  // 2^64 / block_size, rounded up: a division by multiplication, exact below 2^64 / block_size
  int heads, size;  // units per head
  Strides from_key, from_value, to_key, to_value;
};

template <class Unit> __global__ void __launch_bounds__(kThreads) copy_kernel(const Problem p) {
  start_early();
  const int64_t token = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (token >= p.tokens || i >= p.heads * p.size) return;
  const int64_t slot = p.slots[token];
  const int head = p.heads == 1 ? 0 : i / p.size, at = i - head * p.size;
  const Unit k = ((const Unit*)p.key)[token * p.from_key.token + head * p.from_key.head + at];
  const Unit v = ((const Unit*)p.value)[token * p.from_value.token + head * p.from_value.head + at];
  __syncwarp(__activemask());  // or else the compiler has the loads wait for the slot
  if (slot < 0 || slot >= p.capacity) return;  // no place; of one beyond the cache the host cannot be told
  const int64_t block = p.reciprocal ? __umul64hi(slot, p.reciprocal) : slot, offset = slot - block * p.block_size;
  ((Unit*)p.key_cache)[block * p.to_key.first + offset * p.to_key.token + head * p.to_key.head + at] = k;
  ((Unit*)p.value_cache)[block * p.to_value.first + offset * p.to_value.token + head * p.to_value.head + at] = v;
}

template <class Unit> int copy(Problem p, int64_t element, void* stream) {
  const int64_t per_unit = sizeof(Unit) / element;
  for (Strides* s : {&p.from_key, &p.from_value, &p.to_key, &p.to_value}) {
    s->first /= per_unit;
    s->token /= per_unit;
    s->head /= per_unit;
  }
  p.size /= per_unit;
  const int units = p.heads * p.size;
  int across = 1;
  while (across < units && across < kThreads) across *= 2;
  const dim3 block(across, kThreads / across);
  return launch_early(copy_kernel<Unit>, dim3(ceil_div<int64_t>(p.tokens, block.y), ceil_div(units, across)), block, 0,
                stream, p);
}

}  // namespace

// key, value [tokens,heads,size] into caches [blocks,block_size,heads,size], each at its strides (innermost 1);
// element: bytes per element, 2 or 4
extern "C" int OPSHIM(reshape_and_cache)(
    const void* key, const void* value, void* key_cache, void* value_cache, const int64_t* slots, int64_t element,
    int64_t tokens, int64_t heads, int64_t size, int64_t blocks, int64_t block_size, int64_t key_token,
    int64_t key_head, int64_t value_token, int64_t value_head, int64_t kc_block, int64_t kc_token, int64_t kc_head,
    int64_t vc_block, int64_t vc_token, int64_t vc_head, int64_t device, void* stream) {
  if (heads == 0 || size == 0) return kOk;
  if (heads * size > INT32_MAX) return kBadArgument;
  OnDevice on(device);
  Problem p{key, value, key_cache, value_cache, slots, tokens, blocks * block_size, block_size};
  p.reciprocal = block_size > 1 ? UINT64_MAX / uint64_t(block_size) + 1 : 0;
  p.heads = int(heads);
  p.size = int(size);
  p.from_key = {0, key_token, key_head};
  p.from_value = {0, value_token, value_head};
  p.to_key = {kc_block, kc_token, kc_head};
  p.to_value = {vc_block, vc_token, vc_head};
  if (heads == 1 || (key_head == size && value_head == size && kc_head == size && vc_head == size)) {
    p.size *= p.heads;
    p.heads = 1;
    p.from_key.head = p.from_value.head = p.to_key.head = p.to_value.head = 0;
  }
  const auto whole = [&](const void* pointer, const Strides& s) {
    return aligned(16, int(element), pointer, s.first, s.token, s.head);
  };
  if (p.size * element % 16 == 0 && whole(key, p.from_key) && whole(value, p.from_value) &&
      whole(key_cache, p.to_key) && whole(value_cache, p.to_value))
    return copy<uint4>(p, element, stream);
  if (element == 4) return copy<uint32_t>(p, element, stream);
  if (element == 2) return copy<uint16_t>(p, element, stream);
  return kBadArgument;
}
