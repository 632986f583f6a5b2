// Payload rows read where they lie, in this GPU's memory or in a peer's: the kernel's own loads are
// the transfer.
//
// A peer's memory is 1 to 2 µs away, so a few multiprocessors must have about a megabyte under way.
// Each warp keeps its shares of the next DEPTH tiles (or rows to sum) on their way into shared
// memory, by 16-byte asynchronous copies of whole lines that take no registers. Warps wait for
// nobody else. A thread block has as many teams of THREADS as fit and so a multiprocessor for
// itself: blocks that are fewer than multiprocessors leave the rest whole to the model's kernels,
// which small blocks, spread over all of them, would keep out.
#pragma once

#include "cute/arch/copy_sm80.hpp"

#include "decode.cuh"
#include "pull.h"

namespace zpp {

// Sums have half the warps on a multiprocessor, for want of registers, so each looks twice as far.
template <bool SUM>
constexpr int DEPTH = SUM ? 8 : 4;
template <bool SUM>
constexpr int TEAM_BYTES = THREADS / 32 * DEPTH<SUM> * STAGE;

__device__ __forceinline__ uint32_t workers() { return gridDim.x * (blockDim.x / THREADS); }
__device__ __forceinline__ uint32_t worker() {
  return blockIdx.x + threadIdx.x / THREADS * gridDim.x;
}
__device__ __forceinline__ int warp_start() { return threadIdx.x % THREADS / 32 * WARP_TILE; }

__device__ __forceinline__ uint8_t* stage_room(int stage) {
  extern __shared__ __align__(128) uint8_t stages[];
  return stages + (stage * (blockDim.x / 32) + threadIdx.x / 32) * STAGE;
}

// A team's way through the plan: its tiles, whatever their segments, and in a tile the rows to sum.
struct Cursor {
  uint32_t tile;
  int segment, k;

  __device__ __forceinline__ explicit Cursor(Plan const& plan)
      : tile(worker()), segment(0), k(0) { find(plan); }

  __device__ __forceinline__ void next(Plan const& plan) {
    if (++k < plan.k) return;
    k = 0, tile += workers();
    find(plan);
  }

 private:
  __device__ __forceinline__ void find(Plan const& plan) {
    while (segment + 1 < plan.segments && tile >= plan.segment[segment + 1].first_tile) ++segment;
  }
};

// The payload row that a cursor stands for, and its place in the segment.
template <bool SUM>
__device__ __forceinline__ char const* row_at(Pulled const& p, Cursor const& c, Place& at) {
  Segment const& s = p.plan.segment[c.segment];
  int const turn = int(c.tile - s.first_tile);
  char const* row;
  if constexpr (SUM) {
    s.tiles(at.row, at.part, turn);
    row = p.rows.base[c.k] + at.row * p.rows.pitch;
  } else {
    Turn const t = turn_of(turn, p.rows.count.divisor, p.rows.near, p.rows.count, s.tiles);
    at.row = p.rows.to[t.entry], at.part = t.part;
    row = p.rows.base[t.entry];
  }
  at.where = &s;
  at.start = int64_t(at.part) * TILE;
  at.within = warp_start() + threadIdx.x % 32 * 8;
  return row;
}

__device__ __forceinline__ void fetch(uint8_t* to, char const* from, int words) {
  for (int i = threadIdx.x % 32; i < words; i += 32) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(
        reinterpret_cast<uint4 const*>(from)[i], reinterpret_cast<uint4*>(to)[i]);
  }
}

// A warp's shares under way. Item i is asked for DEPTH items ahead, into stage i mod DEPTH, in a
// group of copies of its own: groups are counted, so raw segments and the end have empty ones.
template <bool SUM>
struct Flow {
  Cursor now, ahead;
  int stage;

  __device__ __forceinline__ explicit Flow(Pulled const& p) : now(p.plan), ahead(p.plan), stage(0) {
#pragma unroll 1
    for (int i = 0; i < DEPTH<SUM>; ++i) request(p, i);
  }

  // The item at work has come. Every lane of the warp calls it.
  __device__ __forceinline__ void arrive() const {
    cute::cp_async_wait<DEPTH<SUM> - 1>();
    __syncwarp();
  }

  // It lies in registers: its stage is free, and the next one is at work.
  __device__ __forceinline__ void advance(Pulled const& p) {
    __syncwarp();
    request(p, stage);
    now.next(p.plan);
    stage = stage + 1 == DEPTH<SUM> ? 0 : stage + 1;
  }

 private:
  __device__ __forceinline__ void request(Pulled const& p, int into) {
    if (ahead.tile < p.plan.tiles && !p.plan.segment[ahead.segment].from_codec.raw) {
      Place at;
      char const* row = row_at<SUM>(p, ahead, at);
      Segment const& s = at.segment();
      Slice const need =
          slice_of(s.from_planes, s.from_codec, at.start + warp_start(), s.from_len);
      uint8_t* room = stage_room(into);
      fetch(room, row + need.codes, need.code_words);
      fetch(room + CRUMBS_AT, row + need.crumbs, need.crumb_words);
      fetch(room + SCALES_AT, row + need.scales, need.scale_words);
    }
    cute::cp_async_fence();
    ahead.next(p.plan);
  }
};

// x = the values of the item at work, or their sum with x; the next one is at work.
template <int BITS, bool SYM, bool BF16, bool SUM>
__device__ __forceinline__ void take_coded(
    Pulled const& p, Flow<SUM>& flow, Place const& at, Tile& x) {
  Segment const& s = at.segment();
  int64_t const first = at.start + warp_start();
  int const own = threadIdx.x % 32 * 8, left = share_of(first, s.from_len);
  flow.arrive();
  uint8_t* room = stage_room(flow.stage);
  Slots const slots = {room, room + CRUMBS_AT, room + SCALES_AT + scale_shift(s.from_codec, first)};
  Lane<BITS, SYM, BF16> const lane(slots, own, s.from_codec.log2_block);
  Coded c;
  if (left == WARP_TILE) {
    lane.read(c);
  } else {
    clear(c);
    lane.read_part(own, left, c);
  }
  flow.advance(p);
  add_row<BITS, SYM, BF16, SUM>(c, x);
}

template <bool SUM>
__device__ __forceinline__ void take_kind(
    Pulled const& p, Flow<SUM>& flow, Place const& at, Tile& x) {
  switch (kind_of(at.segment().from_codec)) {
    case 32: return take_coded<8, false, false, SUM>(p, flow, at, x);
    case 33: return take_coded<8, false, true, SUM>(p, flow, at, x);
    case 34: return take_coded<8, true, false, SUM>(p, flow, at, x);
    case 35: return take_coded<8, true, true, SUM>(p, flow, at, x);
    case 24: return take_coded<6, false, false, SUM>(p, flow, at, x);
    case 25: return take_coded<6, false, true, SUM>(p, flow, at, x);
    case 26: return take_coded<6, true, false, SUM>(p, flow, at, x);
    case 27: return take_coded<6, true, true, SUM>(p, flow, at, x);
    case 16: return take_coded<4, false, false, SUM>(p, flow, at, x);
    case 17: return take_coded<4, false, true, SUM>(p, flow, at, x);
    case 18: return take_coded<4, true, false, SUM>(p, flow, at, x);
    case 19: return take_coded<4, true, true, SUM>(p, flow, at, x);
    case 8: return take_coded<2, false, false, SUM>(p, flow, at, x);
    case 9: return take_coded<2, false, true, SUM>(p, flow, at, x);
    case 10: return take_coded<2, true, false, SUM>(p, flow, at, x);
    default: return take_coded<2, true, true, SUM>(p, flow, at, x);
  }
}

// A raw segment's floats in `row`, for load_floats with k = 0.
__device__ __forceinline__ FloatView raw_in(char const* row, Segment const& s) {
  return {const_cast<char*>(row) + s.from_planes.codes, 0, int64_t(1) << 62, 0};
}

// A raw segment's bytes → the parameter, 16 at a time where both sides allow it.
template <typename T>
__device__ __forceinline__ void copy_row(char const* row, Place const& at) {
  Segment const& s = at.segment();
  int64_t const end = at.row * s.to.row_stride;
  T const* from = reinterpret_cast<T const*>(row + s.from_planes.codes) + at.start;
  T* to = reinterpret_cast<T*>(s.to.base) + end + at.start;
  int const have = at.left(s.from_len), want = at.left(min(s.to.total - end, s.to_len));
  int const thread = threadIdx.x % THREADS;
  if (have == TILE && want == TILE && aligned16(from) && aligned16(to)) {
    constexpr int rounds = TILE * sizeof(T) / 16 / THREADS;
    uint4 words[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      words[i] = reinterpret_cast<uint4 const*>(from)[thread + i * THREADS];
    }
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      reinterpret_cast<uint4*>(to)[thread + i * THREADS] = words[i];
    }
    return;
  }
  for (int i = thread; i < want; i += THREADS) to[i] = i < have ? from[i] : T(0);
}

// The values at the cursor, which moves on: of one row, or the sum of the plan's rows in their
// order, 0 + row 0 + row 1 + ...
template <bool SUM>
__device__ __forceinline__ void take_tile(
    Pulled const& p, Flow<SUM>& flow, char const* row, Place const& at, Tile& x) {
  Segment const& s = at.segment();
  int const left = at.left(s.from_len);
  if constexpr (!SUM) {
    if (!s.from_codec.raw) return take_kind<false>(p, flow, at, x);
    load_floats(raw_in(row, s), s.from_dtype, at, s.from_len, 0, x);
    flow.advance(p);
  } else {
    zero_tile(x);
#pragma unroll 1
    for (int k = 0; k < p.plan.k; ++k) {
      if (!s.from_codec.raw) {
        take_kind<true>(p, flow, at, x);
        continue;
      }
      Tile one;
      Place same;
      row = row_at<true>(p, flow.now, same);
      load_floats(raw_in(row, s), s.from_dtype, at, s.from_len, 0, one);
      flow.advance(p);
#pragma unroll
      for (int v = 0; v < CHUNKS; ++v) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[v][i] = add(x[v][i], add(one[v][i], 0.0f));
      }
    }
    if (left < TILE) zero_from(x, at.within, left);  // zero bits are the lowest level
  }
}

}  // namespace zpp
