// reshape_and_cache: copies; its floor is the memory traffic. Slots are checked before the first one is written.
#include "opshim.h"

namespace OPSHIM_ISA {
namespace {

constexpr int64_t kTokensPerTask = 64;

struct Strides {
  int64_t first, token, head;  // in bytes; `first` of blocks (caches only)
};

inline void copy_token(char* to, Strides to_strides, const char* from, Strides from_strides, int64_t heads,
                       int64_t bytes) {
  if (to_strides.head == bytes && from_strides.head == bytes) {
    std::memcpy(to, from, heads * bytes);
    return;
  }
  for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * to_strides.head, from + h * from_strides.head, bytes);
}

}  // namespace
}  // namespace OPSHIM_ISA

// key, value [tokens,heads,size] into caches [blocks,block_size,heads,size], each at its strides (innermost 1);
// element: bytes per element
extern "C" int OPSHIM(reshape_and_cache)(const void* key, const void* value, void* key_cache, void* value_cache,
                                         const int64_t* slots, int64_t element, int64_t tokens, int64_t heads,
                                         int64_t size, int64_t blocks, int64_t block_size, int64_t key_token,
                                         int64_t key_head, int64_t value_token, int64_t value_head, int64_t kc_block,
                                         int64_t kc_token, int64_t kc_head, int64_t vc_block, int64_t vc_token,
                                         int64_t vc_head, int64_t threads) {
  using namespace OPSHIM_ISA;
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] >= blocks * block_size) return kBadArgument;
  const Strides from_key{0, key_token * element, key_head * element};
  const Strides from_value{0, value_token * element, value_head * element};
  const Strides to_key{kc_block * element, kc_token * element, kc_head * element};
  const Strides to_value{vc_block * element, vc_token * element, vc_head * element};
  parallel_for((tokens + kTokensPerTask - 1) / kTokensPerTask, threads, [&](int64_t task) {
    const int64_t end = task * kTokensPerTask + kTokensPerTask;
    for (int64_t t = task * kTokensPerTask; t < (end < tokens ? end : tokens); ++t) {
      if (slots[t] < 0) continue;
      const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
      copy_token(static_cast<char*>(key_cache) + block * to_key.first + offset * to_key.token, to_key,
                 static_cast<const char*>(key) + t * from_key.token, from_key, heads, size * element);
      copy_token(static_cast<char*>(value_cache) + block * to_value.first + offset * to_value.token, to_value,
                 static_cast<const char*>(value) + t * from_value.token, from_value, heads, size * element);
    }
  });
  return kOk;
}
