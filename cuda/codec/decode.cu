// decode: payload rows → whole parameters. finish_sums: rotated sums → plain sums.
#include "codec/decode.cuh"
#include "layout/launch.cuh"

namespace zpp {

template <bool ROTATED>
__global__ void __launch_bounds__(THREADS, 4) decode_kernel(__grid_constant__ Plan const plan) {
  uint32_t tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < plan.segments; ++i) {
    Place at;
    if (!enter(plan, i, tile, at)) continue;
    decode_segment<ROTATED>(plan, at, Stride(plan.segment[i]));
  }
}

__global__ void __launch_bounds__(THREADS, 4) finish_kernel(__grid_constant__ Plan const plan) {
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
      load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
      change_domain(s, at, x);
      store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
    }
  }
}

int launch_decode(Plan& plan, bool rotated, void* stream) {
  if (rotated) return launch<decode_kernel<true>>(plan, stream);
  return launch<decode_kernel<false>>(plan, stream);
}

int launch_finish_sums(Plan& plan, void* stream) { return launch<finish_kernel>(plan, stream); }

}  // namespace zpp
