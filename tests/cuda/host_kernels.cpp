// The codec kernels, whole, on the CPU, for test_kernels_on_host.py: bindings/codec.cpp as it is,
// registered under another name for tensors that lie here. A block's threads are fibers that take
// turns at barriers and shuffles; what is shared is theirs together.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/array.h"
#include "cutlass/fast_math.h"
#include "cutlass/functional.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

#undef __shared__
#undef __grid_constant__
#undef __launch_bounds__
#define __shared__ thread_local
#define __grid_constant__
#define __launch_bounds__(...)

using std::max;
using std::min;

namespace {

constexpr int FIBERS = 256, WARP = 32, STACK = 1 << 18;
constexpr unsigned BLOCKS = 3;  // few, so that each walks

uint3 threadIdx, blockIdx;
dim3 gridDim;

struct Barrier {
  int size, count;
  unsigned phase;
};

struct Fiber {
  ucontext_t at;
  std::vector<char> stack;
  Barrier const* waits;  // until its phase is another
  unsigned phase;
  bool done;
};

Fiber fibers[FIBERS];
ucontext_t scheduler;
int now;
Barrier block, warps[FIBERS / WARP];
uint64_t shuffled[2][FIBERS];
std::function<void()> kernel;

void arrive(Barrier& barrier) {
  Fiber& fiber = fibers[now];
  fiber.phase = barrier.phase;
  if (++barrier.count == barrier.size) {
    barrier.count = 0, ++barrier.phase;
    return;
  }
  fiber.waits = &barrier;
  swapcontext(&fiber.at, &scheduler);
}

void __syncthreads() { arrive(block); }

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  Barrier& warp = warps[now / WARP];
  uint64_t* slots = shuffled[warp.phase & 1];  // of the shuffle before, some lanes may still read
  memcpy(slots + now, &value, sizeof(T));
  arrive(warp);
  T got;
  memcpy(&got, slots + now / WARP * WARP + lane, sizeof(T));
  return got;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, now % WARP ^ lanes);
}

void live() {
  kernel();
  fibers[now].done = true;
  swapcontext(&fibers[now].at, &scheduler);
}

void run_block() {
  block = {FIBERS, 0, 0};
  for (Barrier& warp : warps) warp = {WARP, 0, 0};
  for (Fiber& fiber : fibers) {
    fiber.stack.resize(STACK);
    fiber.waits = nullptr, fiber.done = false;
    getcontext(&fiber.at);
    fiber.at.uc_stack.ss_sp = fiber.stack.data();
    fiber.at.uc_stack.ss_size = STACK;
    makecontext(&fiber.at, live, 0);
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (now = 0; now < FIBERS; ++now) {
      Fiber& fiber = fibers[now];
      if (fiber.done || (fiber.waits && fiber.waits->phase == fiber.phase)) continue;
      fiber.waits = nullptr, moved = true;
      threadIdx = {unsigned(now), 0, 0};
      swapcontext(&scheduler, &fiber.at);
    }
  }
  for (Fiber const& fiber : fibers) {
    if (!fiber.done) abort();  // threads of a block wait for each other in different places
  }
}

}  // namespace

#include "layout/launch.cuh"

namespace zpp {

template <auto KERNEL, class P>
int start(P const& plan, void*, int) {
  kernel = [&] { KERNEL(plan); };
  gridDim = dim3(min(plan.tiles, BLOCKS));
  for (blockIdx = {0, 0, 0}; blockIdx.x < gridDim.x; ++blockIdx.x) run_block();
  return 0;
}

thread_local char memory[1];  // stages of tiles: for the bulk copy engine, which is not here

}  // namespace zpp

#include "codec/decode.cu"
#include "codec/encode.cu"
#include "codec/errors.cu"
#include "codec/memory.cu"
#include "codec/reduce.cu"
#include "codec/reencode.cu"

#include "on_host.h"
#include "bindings/codec.cpp"
