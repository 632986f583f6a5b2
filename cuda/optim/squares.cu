// Sums of squares of many gradients in one pass over memory, in the order of numerics.py's tree.
#include <cuda_runtime.h>

#include "optim/squares.cuh"

namespace zpp {

// Row → `tops`: a thread adds up one tree, neighbours read neighbours.
template <class T>
__global__ void __launch_bounds__(FOLDERS) top_kernel(__grid_constant__ SquareSums const plan) {
  uint32_t tile = blockIdx.x;
#pragma unroll 1
  for (int r = 0; r < plan.rows; ++r) {
    SquaredRow const& row = plan.row[r];
    uint32_t const tiles = (row.left + FOLDERS - 1) / FOLDERS;
    if (tile < tiles) {
      uint32_t const i = tile * FOLDERS + threadIdx.x;
      if (i < row.left) plan.tops[row.top + i] = square_tree<T>(row, i);
      return;
    }
    tile -= tiles;
  }
}

// One block a row: `tops` → its sum.
__global__ void __launch_bounds__(FOLDERS) end_kernel(__grid_constant__ SquareSums const plan) {
  __shared__ double sums[FOLDERS];
  SquaredRow const& row = plan.row[blockIdx.x];
  uint32_t const own = threadIdx.x;
  uint32_t left = left_after(row.left, levels_to(row.left, FOLDERS));
  if (own < left) sums[own] = top_tree(row, plan.tops, own);
  __syncthreads();
  while (left > 1) {
    uint32_t const half = left_after(left, 1);
    if (own < left - half) sums[own] = sums[own] + sums[own + half];
    left = half;
    __syncthreads();
  }
  if (own == 0) plan.sums[blockIdx.x] = left ? sums[0] : 0.0;
}

__global__ void add_in_order_kernel(double const* sums, int64_t count, int64_t rows, double* total) {
  for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) {
    double found = 0.0;
    for (int64_t i = 0; i < count; ++i) found = found + sums[i * rows + r];
    total[r] = found;
  }
}

int launch_square_sums(SquareSums const& plan, void* stream) {
  auto const own = static_cast<cudaStream_t>(stream);
  if (plan.rows == 0) return cudaSuccess;
  if (plan.tiles && plan.half) top_kernel<uint16_t><<<plan.tiles, FOLDERS, 0, own>>>(plan);
  if (plan.tiles && !plan.half) top_kernel<float><<<plan.tiles, FOLDERS, 0, own>>>(plan);
  end_kernel<<<plan.rows, FOLDERS, 0, own>>>(plan);
  return cudaGetLastError();
}

int launch_add_in_order(
    double const* sums, int64_t count, int64_t rows, double* total, void* stream) {
  add_in_order_kernel<<<1, 64, 0, static_cast<cudaStream_t>(stream)>>>(sums, count, rows, total);
  return cudaGetLastError();
}

}  // namespace zpp
