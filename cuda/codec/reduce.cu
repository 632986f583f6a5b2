// decode_sum and reduce: K payload rows → sums, in row order.
#include "codec/decode.cuh"
#include "layout/launch.cuh"

namespace zpp {

__global__ void __launch_bounds__(THREADS, 3) decode_sum_kernel(__grid_constant__ Plan const plan) {
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
      load_floats(s.to, s.to_dtype, at, s.to_len, 0, x);
      sum_tile<false>(plan, at, x);
      store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
    }
  }
}

template <bool ROTATED>
__global__ void __launch_bounds__(THREADS, 3) reduce_kernel(__grid_constant__ Plan const plan) {
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
      store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
    }
  }
}

int launch_decode_sum(Plan& plan, void* stream) { return launch<decode_sum_kernel>(plan, stream); }

int launch_reduce(Plan& plan, bool rotated, void* stream) {
  if (rotated) return launch<reduce_kernel<true>>(plan, stream);
  return launch<reduce_kernel<false>>(plan, stream);
}

}  // namespace zpp
