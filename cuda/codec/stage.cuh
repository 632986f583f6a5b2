// Tiles of floats on their way through shared memory, two ahead of the one at work.
//
// On Hopper one thread hands whole aligned tiles to the bulk copy engine, which needs no registers
// and no other thread's time. Other tiles, and older GPUs, load straight into registers.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"

#include "codec/tile.cuh"

namespace zpp {

constexpr int STAGES = 2;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool BULK = true;
#else
constexpr bool BULK = false;
#endif

class Stages {
 public:
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  // The launch gives shared memory for STAGES tiles of `bytes`, the plan's widest.
  __device__ __forceinline__ void begin(int bytes) {
    extern __shared__ __align__(128) char memory[];
    __shared__ uint64_t barriers[STAGES];
    memory_ = memory, barriers_ = barriers, bytes_ = bytes;
    if (BULK && threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) Barrier::init(barriers_ + i, 1);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
  }

  // Asks for a tile, if it can come this way. Every thread calls it; one acts.
  __device__ __forceinline__ void request(Place const& at, int rows, int stage) const {
    if (!BULK || threadIdx.x != 0 || at.row >= rows || !eligible(at)) return;
    uint32_t const bytes = TILE * itemsize(Dtype(at.segment().from_dtype));
    Barrier::arrive_and_expect_tx(barriers_ + stage, bytes);
    cute::SM90_BULK_COPY_G2S::copy(address(at), barriers_ + stage, memory_ + stage * bytes_, bytes);
  }

  // The tile in registers. Every thread calls it, and all before the stage is asked for again.
  __device__ __forceinline__ void take(Place const& at, int stage, Tile& x) {
    Segment const& s = at.segment();
    if (!BULK || !eligible(at)) return load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
    Barrier::wait(barriers_ + stage, phases_ >> stage & 1);
    phases_ ^= 1u << stage;
    char* from = memory_ + stage * bytes_;
    by_dtype(s.from_dtype, [&](auto* t) {
      load_whole(reinterpret_cast<decltype(t)>(from) + at.within, x);
    });
    // without it the engine's next copy may overtake the last of these loads
    cutlass::arch::fence_view_async_shared();
  }

 private:
  __device__ __forceinline__ static char const* address(Place const& at) {
    FloatView const& view = at.segment().from;
    int const each = itemsize(Dtype(at.segment().from_dtype));
    return view.base + (at.row * view.row_stride + at.start) * each;
  }

  __device__ __forceinline__ static bool eligible(Place const& at) {
    return at.row < at.segment().bulk_rows && at.part < at.segment().bulk_parts;
  }

  char* memory_;
  uint64_t* barriers_;
  int bytes_;
  uint32_t phases_ = 0;
};

}  // namespace zpp
