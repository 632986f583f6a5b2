// How many blocks of a kernel stay on the chip at once: what a launch starts, at most.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "layout/plan.h"

namespace zpp {

// Blocks of `KERNEL` that the current device runs at once; asked for once per device and size.
template <auto KERNEL>
uint32_t resident_blocks(int shared_bytes) {
  static std::atomic<uint64_t> known[64];  // shared bytes and count
  int device = 0, count = 0, each = 0;
  cudaGetDevice(&device);
  std::atomic<uint64_t>& slot = known[device & 63];
  uint64_t const value = slot.load(std::memory_order_relaxed);
  if (value && int(value >> 32) == shared_bytes) return uint32_t(value);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (shared_bytes > 48 * 1024) {
    cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, KERNEL, THREADS, shared_bytes);
  uint32_t const blocks = uint32_t(std::max(1, count * each));
  slot.store(uint64_t(shared_bytes) << 32 | blocks, std::memory_order_relaxed);
  return blocks;
}

// Starts as many blocks of `KERNEL` as stay on the chip, no more than there are tiles. Returns a
// cudaError_t. Where the kernels are compiled for the host, tests/cuda runs them its own way.
template <auto KERNEL, class P>
int start(P const& plan, void* stream, int shared_bytes);

#if defined(__CUDACC__)
template <auto KERNEL, class P>
int start(P const& plan, void* stream, int shared_bytes) {
  uint32_t const blocks = std::min(plan.tiles, resident_blocks<KERNEL>(shared_bytes));
  KERNEL<<<blocks, THREADS, shared_bytes, static_cast<cudaStream_t>(stream)>>>(plan);
  return cudaGetLastError();
}
#endif

}  // namespace zpp
