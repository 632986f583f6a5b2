// encode and encode_sums: floats (whole parameters or sums) → payload rows.
#include "codec/encode.cuh"
#include "codec/stage.cuh"
#include "layout/launch.cuh"

namespace zpp {

template <bool STOCHASTIC, bool ROTATED>
__global__ void __launch_bounds__(THREADS, STOCHASTIC || ROTATED ? 3 : 4)
    encode_kernel(__grid_constant__ Plan const plan) {
  extern __shared__ __align__(128) char memory[];
  __shared__ uint64_t barriers[STAGES];
  Stages stages(memory, barriers, plan.stage_bytes);
  uint32_t tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < plan.segments; ++i) {
    Place at;
    if (!enter(plan, i, tile, at)) continue;
    Segment const& s = plan.segment[i];
    Stride const stride(s);
    if (s.copy) {
#pragma unroll 1
      for (; at.row < plan.rows; at = stride.after(at)) copy_segment(s, at);
      continue;
    }
    Place ahead = at;
    for (int j = 0; j < STAGES; ++j, ahead = stride.after(ahead)) {
      stages.request(ahead, plan.rows, j);
    }
    int stage = 0;
#pragma unroll 1
    for (; at.row < plan.rows; at = stride.after(at), ahead = stride.after(ahead)) {
      Tile x;
      stages.take(at, stage, x);
      __syncthreads();
      stages.request(ahead, plan.rows, stage);
      if constexpr (ROTATED) change_domain(s, at, x);
      encode_tile<STOCHASTIC>(plan, at, x);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    __syncthreads();
  }
}

int launch_encode(Plan& plan, bool stochastic, bool rotated, void* stream) {
  int const bytes = STAGES * plan.stage_bytes;
  if (stochastic && rotated) return launch<encode_kernel<true, true>>(plan, stream, bytes);
  if (stochastic) return launch<encode_kernel<true, false>>(plan, stream, bytes);
  if (rotated) return launch<encode_kernel<false, true>>(plan, stream, bytes);
  return launch<encode_kernel<false, false>>(plan, stream, bytes);
}

}  // namespace zpp
