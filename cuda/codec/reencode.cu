// decode_sum_encode: the middle of a two-hop reduction, K payload rows → re-encoded rows.
#include "codec/decode.cuh"
#include "layout/launch.cuh"

namespace zpp {

template <bool STOCHASTIC, bool ROTATED>
__global__ void __launch_bounds__(THREADS, 3)
    decode_sum_encode_kernel(__grid_constant__ Plan const plan) {
  uint32_t tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < plan.segments; ++i) {
    Place at;
    if (!enter(plan, i, tile, at)) continue;
    Segment const& s = plan.segment[i];
    Stride const stride(s);
#pragma unroll 1
    for (; at.row < plan.rows; at = stride.after(at)) {
      Tile x;
      sum_tile<true>(plan, at, x);
      if constexpr (ROTATED) change_domain(s, at, x);
      encode_tile<STOCHASTIC>(plan, at, x);
    }
  }
}

int launch_decode_sum_encode(Plan& plan, bool stochastic, bool rotated, void* stream) {
  if (stochastic && rotated) return launch<decode_sum_encode_kernel<true, true>>(plan, stream);
  if (stochastic) return launch<decode_sum_encode_kernel<true, false>>(plan, stream);
  if (rotated) return launch<decode_sum_encode_kernel<false, true>>(plan, stream);
  return launch<decode_sum_encode_kernel<false, false>>(plan, stream);
}

}  // namespace zpp
