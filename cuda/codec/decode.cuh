// Payload rows of a block codec → a tile of fp32 values in registers: one row, or a sum.
#pragma once

#include "codec/encode.cuh"

namespace zpp {

struct Coded {  // one lane's share of a row
  Packed codes[CHUNKS];
  uint32_t scale[CHUNKS], zero[CHUNKS];
};

__device__ __forceinline__ void clear(Coded& c) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) c.codes[v] = {0, 0}, c.scale[v] = c.zero[v] = 0;
}

__device__ __forceinline__ void zero_tile(Tile& x) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[v][i] = 0.0f;
  }
}

// Eight codes from their place in each plane.
template <int BITS>
__device__ __forceinline__ Packed read_codes(uint8_t const* codes, uint8_t const* crumbs) {
  if constexpr (BITS == 8) {
    uint2 const w = *reinterpret_cast<uint2 const*>(codes);
    return {w.x, w.y};
  } else if constexpr (BITS == 2) {
    return {*reinterpret_cast<uint16_t const*>(codes), 0};
  } else if constexpr (BITS == 6) {
    return {*reinterpret_cast<uint32_t const*>(codes), *reinterpret_cast<uint16_t const*>(crumbs)};
  } else {
    return {*reinterpret_cast<uint32_t const*>(codes), 0};
  }
}

// fp32 bits of a block's scale and zero.
template <bool SYM, bool BF16>
__device__ __forceinline__ void read_scale(uint8_t const* at, uint32_t& scale, uint32_t& zero) {
  if constexpr (SYM && !BF16) scale = *reinterpret_cast<uint32_t const*>(at);
  if constexpr (SYM && BF16) scale = uint32_t(*reinterpret_cast<uint16_t const*>(at)) << 16;
  if constexpr (!SYM && !BF16) {
    uint2 const both = *reinterpret_cast<uint2 const*>(at);
    scale = both.x, zero = both.y;
  }
  if constexpr (!SYM && BF16) {
    uint32_t const both = *reinterpret_cast<uint32_t const*>(at);
    scale = both << 16, zero = both & 0xFFFF0000u;
  }
}

// One lane's places in a tile's planes, moved from one summed row to the next.
template <int BITS, bool SYM, bool BF16>
struct Lane {
  static constexpr int width = BITS == 6 ? 4 : BITS;  // of the first plane
  static constexpr int each = (BF16 ? 2 : 4) * (SYM ? 1 : 2);

  uint8_t const *codes, *crumbs, *scales;
  int log2_block;

  __device__ __forceinline__ Lane(Slots const& from, int within, int log2)
      : codes(from.codes + within * width / 8), crumbs(from.crumbs + within / 4),
        scales(from.scales + (within >> log2) * each), log2_block(log2) {}

  __device__ __forceinline__ void move(int64_t bytes) {
    codes += bytes, scales += bytes;
    if (BITS == 6) crumbs += bytes;
  }

  // Reads chunk v; its first block is (v CHUNK) >> log2_block behind chunk 0's, since a lane's
  // place in a chunk never carries into the next one.
  __device__ __forceinline__ void read(int v, Coded& c) const {
    c.codes[v] = read_codes<BITS>(codes + v * CHUNK * width / 8, crumbs + v * CHUNK / 4);
    int const block = (v * CHUNK) >> log2_block;
    read_scale<SYM, BF16>(scales + block * each, c.scale[v], c.zero[v]);
  }

  __device__ __forceinline__ void read(Coded& c) const {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) read(v, c);
  }

  // What lies past the end keeps what `c` held.
  __device__ __forceinline__ void read_part(int within, int left, Coded& c) const {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
      if (within + v * CHUNK < left) read(v, c);
    }
  }
};

template <int BITS, bool SYM, bool BF16>
__device__ __forceinline__ Lane<BITS, SYM, BF16> lane_at(Plan const& plan, Place const& at) {
  Segment const& s = at.segment();
  char* row = const_cast<char*>(plan.payload) + at.row * plan.payload_row;
  return {tile_slots(row, s.from_planes, at.part), at.within, s.from_codec.log2_block};
}

// x = the decoded values, or their sum with x. A decoded value is never -0: adding 0 first, as the
// reference does, would change nothing.
template <int BITS, bool SYM, bool BF16, bool SUM>
__device__ __forceinline__ void add_row(Coded const& c, Tile& x) {
  // a level times a scale of 8 bits, or -1, 0 and 1 times any, is exact: one rounding either way
  constexpr bool EXACT = BF16 || (BITS == 2 && SYM);
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    float const scale = float_of(c.scale[v]), zero = float_of(c.zero[v]);
    float q[8];
    levels<BITS, SYM>(c.codes[v], q);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (SYM) {
        x[v][i] = !SUM ? mul(q[i], scale)
                       : EXACT ? fma_exact(q[i], scale, x[v][i]) : add(x[v][i], mul(q[i], scale));
      } else {
        float const y = EXACT ? fma_exact(q[i], scale, zero) : add(mul(q[i], scale), zero);
        x[v][i] = SUM ? add(x[v][i], y) : y;
      }
    }
  }
}

// x = the sum of the rows of a whole tile (FRESH), or x plus it; the next row is on its way while
// one is added. The first row alone stands for 0 + row 0: no decoded value is -0.
template <int BITS, bool SYM, bool BF16, bool FRESH>
__device__ __forceinline__ void sum_whole(Plan const& plan, Place const& at, Tile& x) {
  auto lane = lane_at<BITS, SYM, BF16>(plan, at);
  Coded a;
  lane.read(a);
  int k = plan.k - 1;  // rows still to be read
  if constexpr (!SYM && (BITS == 8 || (BITS == 6 && !FRESH))) {  // registers hold no second row
    if (FRESH) zero_tile(x);
#pragma unroll 1
    for (; k; --k) {
      add_row<BITS, SYM, BF16, true>(a, x);
      lane.move(plan.payload_k), lane.read(a);
    }
  } else {
    Coded b;
    if (k & 1) {
      lane.move(plan.payload_k), lane.read(b);
      add_row<BITS, SYM, BF16, !FRESH>(a, x);
      a = b, --k;
    } else if (FRESH) {
      zero_tile(x);
    }
#pragma unroll 1
    for (; k; k -= 2) {
      lane.move(plan.payload_k), lane.read(b);
      add_row<BITS, SYM, BF16, true>(a, x);
      lane.move(plan.payload_k), lane.read(a);
      add_row<BITS, SYM, BF16, true>(b, x);
    }
  }
  add_row<BITS, SYM, BF16, true>(a, x);
}

// Adds the rows of a row's last tile, zeros past its end.
template <int BITS, bool SYM, bool BF16>
__device__ __forceinline__ void sum_part(Plan const& plan, Place const& at, int left, Tile& x) {
  auto lane = lane_at<BITS, SYM, BF16>(plan, at);
#pragma unroll 1
  for (int k = 0; k < plan.k; ++k, lane.move(plan.payload_k)) {
    Coded c;
    clear(c);
    lane.read_part(at.within, left, c);
    add_row<BITS, SYM, BF16, true>(c, x);
  }
  zero_from(x, at.within, left);  // zero bits are the lowest level
}

// Decodes all of a block's tiles in a segment, each read while the one before is stored.
template <int BITS, bool SYM, bool BF16, bool ROTATED>
__device__ __forceinline__ void decode_run(Plan const& plan, Place at, Stride const& stride) {
  Segment const& s = at.segment();
  Coded now;
  clear(now);
  auto const read = [&](Place const& place) {
    auto const lane = lane_at<BITS, SYM, BF16>(plan, place);
    int const left = place.left(s.from_len);
    left == TILE ? lane.read(now) : lane.read_part(place.within, left, now);
  };
  read(at);
#pragma unroll 1
  while (at.row < plan.rows) {
    Tile x;
    add_row<BITS, SYM, BF16, false>(now, x);
    Place const next = stride.after(at);
    if (next.row < plan.rows) read(next);
    if constexpr (ROTATED) change_domain(s, at, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
    at = next;
  }
}

// x + (0 + row 0) + (0 + row 1) + ..., as the reference adds decoded rows
__device__ __forceinline__ void sum_raw(Plan const& plan, Place const& at, Tile& x) {
  Segment const& s = at.segment();
#pragma unroll 1
  for (int k = 0; k < plan.k; ++k) {
    Tile row;
    load_floats(s.from, s.from_dtype, at, s.from_len, k, row);
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[v][i] = add(x[v][i], add(row[v][i], 0.0f));
    }
  }
}

template <int BITS, bool SYM, bool BF16, bool FRESH>
__device__ __forceinline__ void sum_coded(Plan const& plan, Place const& at, Tile& x) {
  int const left = at.left(at.segment().from_len);
  if (left == TILE) {
    sum_whole<BITS, SYM, BF16, FRESH>(plan, at, x);
  } else {
    if (FRESH) zero_tile(x);
    sum_part<BITS, SYM, BF16>(plan, at, left, x);
  }
}

__device__ __forceinline__ int kind_of(Codec const& c) {
  return c.bits * 4 + c.symmetric * 2 + c.bf16_scale;
}

// x = the sum of the incoming payload rows in row order (FRESH), or x plus each, by whatever codec
// the segment has.
template <bool FRESH>
__device__ __forceinline__ void sum_tile(Plan const& plan, Place const& at, Tile& x) {
  Codec const& codec = at.segment().from_codec;
  if (codec.raw) {
    if (FRESH) zero_tile(x);
    return sum_raw(plan, at, x);
  }
  switch (kind_of(codec)) {
    case 32: return sum_coded<8, false, false, FRESH>(plan, at, x);
    case 33: return sum_coded<8, false, true, FRESH>(plan, at, x);
    case 34: return sum_coded<8, true, false, FRESH>(plan, at, x);
    case 35: return sum_coded<8, true, true, FRESH>(plan, at, x);
    case 24: return sum_coded<6, false, false, FRESH>(plan, at, x);
    case 25: return sum_coded<6, false, true, FRESH>(plan, at, x);
    case 26: return sum_coded<6, true, false, FRESH>(plan, at, x);
    case 27: return sum_coded<6, true, true, FRESH>(plan, at, x);
    case 16: return sum_coded<4, false, false, FRESH>(plan, at, x);
    case 17: return sum_coded<4, false, true, FRESH>(plan, at, x);
    case 18: return sum_coded<4, true, false, FRESH>(plan, at, x);
    case 19: return sum_coded<4, true, true, FRESH>(plan, at, x);
    case 8: return sum_coded<2, false, false, FRESH>(plan, at, x);
    case 9: return sum_coded<2, false, true, FRESH>(plan, at, x);
    case 10: return sum_coded<2, true, false, FRESH>(plan, at, x);
    default: return sum_coded<2, true, true, FRESH>(plan, at, x);
  }
}

template <bool ROTATED>
__device__ __forceinline__ void decode_segment(Plan const& plan, Place at, Stride const& stride) {
  Segment const& s = at.segment();
  if (s.from_codec.raw) {
#pragma unroll 1
    for (; at.row < plan.rows; at = stride.after(at)) {
      if (s.copy) {
        copy_segment(s, at);
        continue;
      }
      Tile x;
      load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
      store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
    }
    return;
  }
  switch (kind_of(s.from_codec)) {
    case 32: return decode_run<8, false, false, ROTATED>(plan, at, stride);
    case 33: return decode_run<8, false, true, ROTATED>(plan, at, stride);
    case 34: return decode_run<8, true, false, ROTATED>(plan, at, stride);
    case 35: return decode_run<8, true, true, ROTATED>(plan, at, stride);
    case 24: return decode_run<6, false, false, ROTATED>(plan, at, stride);
    case 25: return decode_run<6, false, true, ROTATED>(plan, at, stride);
    case 26: return decode_run<6, true, false, ROTATED>(plan, at, stride);
    case 27: return decode_run<6, true, true, ROTATED>(plan, at, stride);
    case 16: return decode_run<4, false, false, ROTATED>(plan, at, stride);
    case 17: return decode_run<4, false, true, ROTATED>(plan, at, stride);
    case 18: return decode_run<4, true, false, ROTATED>(plan, at, stride);
    case 19: return decode_run<4, true, true, ROTATED>(plan, at, stride);
    case 8: return decode_run<2, false, false, ROTATED>(plan, at, stride);
    case 9: return decode_run<2, false, true, ROTATED>(plan, at, stride);
    case 10: return decode_run<2, true, false, ROTATED>(plan, at, stride);
    default: return decode_run<2, true, true, ROTATED>(plan, at, stride);
  }
}

}  // namespace zpp
