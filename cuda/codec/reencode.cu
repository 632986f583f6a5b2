// decode_sum_encode: the middle of a two-hop reduction, K payload rows → re-encoded rows.
#include "codec/decode.cuh"

namespace zpp {

template <bool STOCHASTIC, bool ROTATED>
struct DecodeSumEncode : EachTile<DecodeSumEncode<STOCHASTIC, ROTATED>> {
  static constexpr int BLOCKS = 3;

  __device__ __forceinline__ static void tile(Plan const& plan, Place const& at) {
    Tile x;
    sum_tile<true>(plan, at, x);
    if constexpr (ROTATED) change_domain(at.segment(), at, x);
    encode_tile<STOCHASTIC>(plan, at, x);
  }
};

int launch_decode_sum_encode(Plan& plan, bool stochastic, bool rotated, void* stream) {
  if (stochastic && rotated) return launch<DecodeSumEncode<true, true>>(plan, stream);
  if (stochastic) return launch<DecodeSumEncode<true, false>>(plan, stream);
  if (rotated) return launch<DecodeSumEncode<false, true>>(plan, stream);
  return launch<DecodeSumEncode<false, false>>(plan, stream);
}

}  // namespace zpp
