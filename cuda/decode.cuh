// Payload rows of a block codec → a tile of fp32 values in registers: one row, or a sum.
#pragma once

#include "encode.cuh"

namespace zpp {

enum class Sum {
  none,     // x = the only row (decode_run)
  fresh,    // x = 0 + row 0 + row 1 + ...
  onto,     // x = x + (0 + row 0) + (0 + row 1) + ..., as decode_sum of the reference does
};

struct Coded {  // one lane's share of a row
  Packed codes[CHUNKS];
  uint32_t scale[CHUNKS], zero[CHUNKS];
};

template <int BITS>
__device__ __forceinline__ Packed read_codes(Slots const& from, uint32_t first) {
  if constexpr (BITS == 8) {
    uint2 const w = *reinterpret_cast<uint2 const*>(from.codes + first);
    return {w.x, w.y};
  } else if constexpr (BITS == 2) {
    return {*reinterpret_cast<uint16_t const*>(from.codes + first / 4), 0};
  } else {
    uint32_t const low = *reinterpret_cast<uint32_t const*>(from.codes + first / 2);
    uint32_t high = 0;
    if constexpr (BITS == 6) high = *reinterpret_cast<uint16_t const*>(from.crumbs + first / 4);
    return {low, high};
  }
}

// fp32 bits of block's scale and zero.
template <bool SYM>
__device__ __forceinline__ void read_scale(
    Slots const& from, bool bf16, uint32_t block, uint32_t& scale, uint32_t& zero) {
  if (SYM && !bf16) scale = reinterpret_cast<uint32_t const*>(from.scales)[block];
  if (SYM && bf16) scale = uint32_t(reinterpret_cast<uint16_t const*>(from.scales)[block]) << 16;
  if (!SYM && !bf16) {
    uint2 const both = reinterpret_cast<uint2 const*>(from.scales)[block];
    scale = both.x, zero = both.y;
  }
  if (!SYM && bf16) {
    uint32_t const both = reinterpret_cast<uint32_t const*>(from.scales)[block];
    scale = both << 16, zero = both & 0xFFFF0000u;
  }
}

// Where this lane's shares lie in the tile, the same in every summed row.
struct Shares {
  int within, left;
  uint32_t block[CHUNKS];

  __device__ __forceinline__ Shares(Place const& at, int log2_block)
      : within(at.within), left(at.left(at.segment().from_len)) {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) block[v] = (within + v * CHUNK) >> log2_block;
  }
};

template <int BITS, bool SYM, bool WHOLE>
__device__ __forceinline__ void read_shares(
    Slots const& from, bool bf16, Shares const& shares, Coded& c) {
  auto const mine = [&](int v) { return WHOLE || shares.within + v * CHUNK < shares.left; };
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    if (mine(v)) c.codes[v] = read_codes<BITS>(from, shares.within + v * CHUNK);
  }
  if (bf16) {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
      if (mine(v)) read_scale<SYM>(from, true, shares.block[v], c.scale[v], c.zero[v]);
    }
  } else {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
      if (mine(v)) read_scale<SYM>(from, false, shares.block[v], c.scale[v], c.zero[v]);
    }
  }
}

// A lane's share that lies past the end keeps what `c` held.
template <int BITS, bool SYM>
__device__ __forceinline__ void read_row(
    Slots const& from, bool bf16, Shares const& shares, Coded& c) {
  if (shares.left == TILE) {
    read_shares<BITS, SYM, true>(from, bf16, shares, c);
  } else {
    read_shares<BITS, SYM, false>(from, bf16, shares, c);
  }
}

__device__ __forceinline__ void clear(Coded& c) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) c.codes[v] = {0, 0}, c.scale[v] = c.zero[v] = 0;
}

template <int BITS, bool SYM, Sum SUM>
__device__ __forceinline__ void add_row(Coded const& c, Tile& x) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    float q[8];
    levels<BITS, SYM>(c.codes[v], q);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (BITS == 2 && SYM && SUM != Sum::none) {
        // -1, 0 and 1 times the scale are exact: one rounding either way, and no -0
        x[v][i] = fma_exact(q[i], float_of(c.scale[v]), x[v][i]);
        continue;
      }
      float const value = dequantize<SYM>(q[i], float_of(c.scale[v]), float_of(c.zero[v]));
      if (SUM == Sum::none) x[v][i] = value;
      if (SUM == Sum::fresh) x[v][i] = add(x[v][i], value);
      if (SUM == Sum::onto) x[v][i] = add(x[v][i], add(value, 0.0f));
    }
  }
}

__device__ __forceinline__ Slots slots_at(Plan const& plan, Place const& at) {
  char* row = const_cast<char*>(plan.payload) + at.row * plan.payload_row;
  return tile_slots(row, at.segment().from_planes, at.part);
}

// Sums the rows of a tile; the next row is on its way while one is added.
template <int BITS, bool SYM, Sum SUM>
__device__ __forceinline__ void decode_block_tile(Plan const& plan, Place const& at, Tile& x) {
  Segment const& s = at.segment();
  bool const bf16 = s.from_codec.bf16_scale;
  Slots from = slots_at(plan, at);
  Shares const shares(at, s.from_codec.log2_block);
  Coded a;
  clear(a);
  read_row<BITS, SYM>(from, bf16, shares, a);
  auto const next = [&](Coded& c) {
    from.codes += plan.payload_k, from.scales += plan.payload_k;
    if (BITS == 6) from.crumbs += plan.payload_k;
    read_row<BITS, SYM>(from, bf16, shares, c);
  };
  int k = plan.k - 1;  // rows still to be read
  if constexpr (BITS == 8 && !SYM) {  // two rows do not fit in the registers
#pragma unroll 1
    for (; k; --k) {
      add_row<BITS, SYM, SUM>(a, x);
      next(a);
    }
  }
  Coded b;
  clear(b);
#pragma unroll 1
  for (; k >= 2; k -= 2) {
    next(b);
    add_row<BITS, SYM, SUM>(a, x);
    next(a);
    add_row<BITS, SYM, SUM>(b, x);
  }
  if (k) next(b);
  add_row<BITS, SYM, SUM>(a, x);
  if (k) add_row<BITS, SYM, SUM>(b, x);
  if (shares.left < TILE) zero_from(x, at.within, shares.left);  // zero bits are the lowest level
}

// Decodes all of a block's tiles in a segment, each read while the one before is stored.
template <int BITS, bool SYM, bool ROTATED>
__device__ __forceinline__ void decode_run(Plan const& plan, Place at, Stride const& stride) {
  Segment const& s = at.segment();
  bool const bf16 = s.from_codec.bf16_scale;
  int const lb = s.from_codec.log2_block;
  Coded now;
  clear(now);
  read_row<BITS, SYM>(slots_at(plan, at), bf16, Shares(at, lb), now);
#pragma unroll 1
  while (at.row < plan.rows) {
    Tile x;
    add_row<BITS, SYM, Sum::none>(now, x);
    Place const next = stride.after(at);
    if (next.row < plan.rows) {
      read_row<BITS, SYM>(slots_at(plan, next), bf16, Shares(next, lb), now);
    }
    if constexpr (ROTATED) change_domain(s, at, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
    at = next;
  }
}

template <Sum SUM>
__device__ __forceinline__ void decode_raw_tile(Plan const& plan, Place const& at, Tile& x) {
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

// The incoming payload rows → x, by whatever codec the segment has.
template <Sum SUM>
__device__ __forceinline__ void decode_tile(Plan const& plan, Place const& at, Tile& x) {
  Codec const& codec = at.segment().from_codec;
  if (codec.raw) return decode_raw_tile<SUM>(plan, at, x);
  switch (codec.bits * 2 + codec.symmetric) {
    case 16: return decode_block_tile<8, false, SUM>(plan, at, x);
    case 17: return decode_block_tile<8, true, SUM>(plan, at, x);
    case 12: return decode_block_tile<6, false, SUM>(plan, at, x);
    case 13: return decode_block_tile<6, true, SUM>(plan, at, x);
    case 8: return decode_block_tile<4, false, SUM>(plan, at, x);
    case 9: return decode_block_tile<4, true, SUM>(plan, at, x);
    case 4: return decode_block_tile<2, false, SUM>(plan, at, x);
    default: return decode_block_tile<2, true, SUM>(plan, at, x);
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
  switch (s.from_codec.bits * 2 + s.from_codec.symmetric) {
    case 16: return decode_run<8, false, ROTATED>(plan, at, stride);
    case 17: return decode_run<8, true, ROTATED>(plan, at, stride);
    case 12: return decode_run<6, false, ROTATED>(plan, at, stride);
    case 13: return decode_run<6, true, ROTATED>(plan, at, stride);
    case 8: return decode_run<4, false, ROTATED>(plan, at, stride);
    case 9: return decode_run<4, true, ROTATED>(plan, at, stride);
    case 4: return decode_run<2, false, ROTATED>(plan, at, stride);
    default: return decode_run<2, true, ROTATED>(plan, at, stride);
  }
}

__device__ __forceinline__ void zero_tile(Tile& x) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[v][i] = 0.0f;
  }
}

}  // namespace zpp
