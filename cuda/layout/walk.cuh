// The loop of all codec kernels: thread blocks stay on the chip and walk through a plan's segments,
// each over every gridDim-th tile. What a kernel does with its tiles is a struct, its `Body`.
#pragma once

#include "layout/launch.cuh"
#include "layout/plan.h"

namespace zpp {

// Where a thread block is in a segment. Blocks stay on the chip and take every gridDim-th tile.
struct Place {
  Segment const* where;
  int row, part;  // the tile is number `part` of row `row`
  int64_t start;  // first element of the tile
  int within;     // this lane's first element of chunk 0, counted from there

  __device__ __forceinline__ Segment const& segment() const { return *where; }

  // Elements of the tile below `len`: 0 ... TILE.
  __device__ __forceinline__ int left(int64_t len) const {
    return int(max(min(len - start, int64_t(TILE)), int64_t(0)));
  }
};

__device__ __forceinline__ int lane_start() {
  return threadIdx.x / 32 * WARP_TILE + threadIdx.x % 32 * 8;
}

// One step of a block through a segment, precomputed: so many rows and so many parts.
struct Stride {
  int rows, parts, tiles;

  __device__ __forceinline__ explicit Stride(Segment const& s) : tiles(s.tiles.divisor) {
    s.tiles(rows, parts, int(gridDim.x));
  }

  __device__ __forceinline__ Place after(Place at) const {
    at.row += rows, at.part += parts;
    if (at.part >= tiles) at.part -= tiles, ++at.row;
    at.start = int64_t(at.part) * TILE;
    return at;
  }
};

// This block's first place in segment i, given its next tile; false where it has none there.
// Moves `tile` past the segment.
__device__ __forceinline__ bool enter(Plan const& plan, int i, uint32_t& tile, Place& at) {
  Segment const& s = plan.segment[i];
  uint32_t const end = i + 1 < plan.segments ? plan.segment[i + 1].first_tile : plan.tiles;
  if (tile >= end) return false;
  s.tiles(at.row, at.part, int(tile - s.first_tile));
  at.where = &s;
  at.start = int64_t(at.part) * TILE;
  at.within = lane_start();
  tile += ((end - 1 - tile) / gridDim.x + 1) * gridDim.x;
  return true;
}

// A body has `BLOCKS`, how many are to fit on a multiprocessor; `begin`, once a block; and
// `segment`, for a block's tiles of one segment.
template <class Body, class P>
__global__ void __launch_bounds__(THREADS, Body::BLOCKS)
    tile_kernel(__grid_constant__ P const plan) {
  Body body;
  body.begin(plan);
  uint32_t tile = blockIdx.x;
#pragma unroll 1
  for (int i = 0; i < plan.segments; ++i) {
    Place at;
    if (enter(plan, i, tile, at)) body.segment(plan, at, Stride(plan.segment[i]));
  }
}

// The base of bodies that need no more than `tile`: one tile has nothing to do with the next.
template <class Body>
struct EachTile {
  __device__ __forceinline__ void begin(Plan const&) {}

  template <class P>
  __device__ __forceinline__ static void segment(P const& plan, Place at, Stride const& stride) {
#pragma unroll 1
    for (; at.row < plan.rows; at = stride.after(at)) Body::tile(plan, at);
  }
};

template <class Body, class P>
int launch(P const& plan, void* stream, int shared_bytes = 0) {
  return plan.tiles ? start<tile_kernel<Body, P>>(plan, stream, shared_bytes) : cudaSuccess;
}

}  // namespace zpp
