// decode_sum and reduce: K payload rows → sums, in row order.
#include "codec/decode.cuh"

namespace zpp {

struct DecodeSum : EachTile<DecodeSum> {
  static constexpr int BLOCKS = 3;

  __device__ __forceinline__ static void tile(Plan const& plan, Place const& at) {
    Segment const& s = at.segment();
    Tile x;
    load_floats(s.to, s.to_dtype, at, s.to_len, 0, x);
    sum_tile<false>(plan, at, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
  }
};

template <bool ROTATED>
struct Reduce : EachTile<Reduce<ROTATED>> {
  static constexpr int BLOCKS = 3;

  __device__ __forceinline__ static void tile(Plan const& plan, Place const& at) {
    Segment const& s = at.segment();
    Tile x;
    sum_tile<true>(plan, at, x);
    if constexpr (ROTATED) change_domain(s, at, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
  }
};

int launch_decode_sum(Plan& plan, void* stream) { return launch<DecodeSum>(plan, stream); }

int launch_reduce(Plan& plan, bool rotated, void* stream) {
  return rotated ? launch<Reduce<true>>(plan, stream) : launch<Reduce<false>>(plan, stream);
}

}  // namespace zpp
