// AdamW in one pass over memory for many parameters at once: what a warp does with its blocks.
#include "optim/adamw.cuh"
#include "layout/launch.cuh"

namespace zpp {

constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2) x = larger(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

template <class S, bool PLANES, bool WHOLE>
__device__ __forceinline__ void update_block(
    AdamW const& plan, Part const& p, Rates const& r, uint32_t block, int lane) {
  Lane const l = lane_of(p, block, lane);
  Moments m[8];
  Moments most = advance<S, PLANES, WHOLE>(plan, p, r, block, l, m);
  if constexpr (S::SCALED) {
    most = {largest_of_warp(most.first), largest_of_warp(most.second)};
    if (lane == 0) p.first_scale[block] = most.first, p.second_scale[block] = most.second;
  }
  keep<S, WHOLE>(plan, p, l, most, m);
}

// Warps stay on the chip: each takes every `stride`th block of all parts' blocks in a row.
template <class S, bool PLANES>
__global__ void __launch_bounds__(THREADS, S::SCALED ? 3 : 4)
    adamw_kernel(__grid_constant__ AdamW const plan) {
  if (plan.ok && !*plan.ok) return;
  float const factor = plan.factor ? *plan.factor : 1.0f;
  int const lane = threadIdx.x % 32;
  uint32_t const stride = gridDim.x * WARPS;
  uint32_t block = blockIdx.x * WARPS + threadIdx.x / 32;
#pragma unroll 1
  for (int i = 0; i < plan.parts; ++i) {
    Part const& p = plan.part[i];
    if (block < p.blocks) {
      Rates const r = {plan.rates[i], plan.roots[i], factor};
#pragma unroll 1
      for (; block < p.blocks; block += stride) {
        if (p.whole) {
          update_block<S, PLANES, true>(plan, p, r, block, lane);
        } else {
          update_block<S, PLANES, false>(plan, p, r, block, lane);
        }
      }
    }
    block -= p.blocks;
  }
}

template <class S, bool PLANES>
int launch_kept(AdamW const& plan, void* stream) {
  uint32_t const wanted = (plan.blocks + WARPS - 1) / WARPS;
  uint32_t const grid = std::min(wanted, resident_blocks<adamw_kernel<S, PLANES>>(0));
  adamw_kernel<S, PLANES><<<grid, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(plan);
  return cudaGetLastError();
}

template <class S>
int launch_state(AdamW const& plan, void* stream) {
  return plan.planes ? launch_kept<S, true>(plan, stream) : launch_kept<S, false>(plan, stream);
}

int launch_adamw(AdamW const& plan, State state, void* stream) {
  if (plan.blocks == 0) return cudaSuccess;
  switch (state) {
    case State::fp32: return launch_state<Fp32>(plan, stream);
    case State::bf16: return launch_state<Bf16>(plan, stream);
    default: return launch_state<Byte>(plan, stream);
  }
}

}  // namespace zpp
