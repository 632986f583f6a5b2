// encode and encode_sums: floats (whole parameters or sums) → payload rows.
#include "codec/encode.cuh"
#include "codec/stage.cuh"

namespace zpp {

template <bool STOCHASTIC, bool ROTATED>
struct Encode {
  static constexpr int BLOCKS = STOCHASTIC || ROTATED ? 3 : 4;

  Stages stages;

  __device__ __forceinline__ void begin(Plan const& plan) { stages.begin(plan.stage_bytes); }

  // Tiles are asked for STAGES ahead of the one at work.
  __device__ __forceinline__ void segment(Plan const& plan, Place at, Stride const& stride) {
    Segment const& s = at.segment();
    if (s.copy) return Copy::segment(plan, at, stride);
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
};

int launch_encode(Plan& plan, bool stochastic, bool rotated, void* stream) {
  int const bytes = STAGES * plan.stage_bytes;
  if (stochastic && rotated) return launch<Encode<true, true>>(plan, stream, bytes);
  if (stochastic) return launch<Encode<true, false>>(plan, stream, bytes);
  if (rotated) return launch<Encode<false, true>>(plan, stream, bytes);
  return launch<Encode<false, false>>(plan, stream, bytes);
}

}  // namespace zpp
