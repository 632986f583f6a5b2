// AdamW on moments of 8 bits in one pass. A warp has a block of 256 neighbours in a row: each lane
// takes every 32nd, so that loads of any row length are whole sectors.
#include <cuda_runtime.h>

#include <algorithm>

#include "adamw.cuh"
#include "adamw.h"

namespace zpp {

constexpr int WARPS = 8;
constexpr int EACH = MOMENT_BLOCK / 32;

__device__ float most_of_warp(float x) {
#pragma unroll
  for (int lane = 16; lane; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

__global__ void __launch_bounds__(32 * WARPS) adamw8_kernel(__grid_constant__ AdamW8 const a) {
  if (a.ok && !*a.ok) return;
  Hyper const h = {a.beta1, a.rest1, a.beta2, a.rest2, a.eps, a.decay, *a.rate, *a.root};
  int const lane = threadIdx.x % 32;
  int64_t const across = (a.columns + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
  int64_t const stride = int64_t(gridDim.x) * WARPS;
  for (int64_t b = int64_t(blockIdx.x) * WARPS + threadIdx.x / 32; b < a.rows * across;
       b += stride) {
    int64_t const row = b / across, begin = (b - row * across) * MOMENT_BLOCK;
    float const first_scale = a.first_scale[b], second_scale = a.second_scale[b];
    Moments m[EACH];
    float first_most = 0.0f, second_most = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int64_t const column = begin + 32 * i + lane, at = row * a.columns + column;
      m[i] = {0.0f, 0.0f};
      if (column < a.columns) {
        float weight = a.weight[at];
        m[i] = decoded(a.first[at], a.second[at], first_scale, second_scale);
        m[i] = updated(m[i], a.grad[at], h, weight);
        a.weight[at] = weight;
      }
      first_most = fmaxf(first_most, fabsf(m[i].first));
      second_most = fmaxf(second_most, m[i].second);
    }
    first_most = most_of_warp(first_most), second_most = most_of_warp(second_most);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int64_t const column = begin + 32 * i + lane, at = row * a.columns + column;
      if (column < a.columns) {
        a.first[at] = first_code(m[i].first, first_most);
        a.second[at] = second_code(m[i].second, second_most, a.noise[column]);
      }
    }
    if (lane == 0) a.first_scale[b] = first_most, a.second_scale[b] = second_most;
  }
}

int launch_adamw8(AdamW8 const& a, void* stream) {
  int64_t const blocks = a.rows * ((a.columns + MOMENT_BLOCK - 1) / MOMENT_BLOCK);
  if (blocks == 0) return cudaSuccess;
  uint32_t const grid = uint32_t(std::min<int64_t>((blocks + WARPS - 1) / WARPS, 1 << 20));
  adamw8_kernel<<<grid, 32 * WARPS, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}

}  // namespace zpp
