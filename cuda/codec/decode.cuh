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
  for_each([&](int v, int i) { x[v][i] = 0.0f; });
}

// Eight codes from their place in each plane.
template <int BITS>
__device__ __forceinline__ Packed read_codes(uint8_t const* codes, uint8_t const* high) {
  if constexpr (BITS == 8) {
    uint2 const w = *reinterpret_cast<uint2 const*>(codes);
    return {w.x, w.y};
  } else if constexpr (BITS == 2) {
    return {*reinterpret_cast<uint16_t const*>(codes), 0};
  } else if constexpr (BITS == 6) {
    return {*reinterpret_cast<uint32_t const*>(codes), *reinterpret_cast<uint16_t const*>(high)};
  } else if constexpr (BITS == 3) {
    return {*reinterpret_cast<uint16_t const*>(codes), *high};
  } else {
    return {*reinterpret_cast<uint32_t const*>(codes), 0};
  }
}

// fp32 bits of a block's scale and zero.
template <int SYM, bool BF16>
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
template <int BITS, int SYM, bool BF16>
struct Lane {
  static constexpr int second = high_bits(BITS), width = BITS - second;  // of the planes
  static constexpr int each = (BF16 ? 2 : 4) * (SYM ? 1 : 2);

  uint8_t const *codes, *high, *scales;
  int log2_block;

  __device__ __forceinline__ Lane(Slots const& from, int within, int log2)
      : codes(from.codes + within * width / 8), high(from.high + within * second / 8),
        scales(from.scales + (within >> log2) * each), log2_block(log2) {}

  __device__ __forceinline__ void move(int64_t bytes) {
    codes += bytes, scales += bytes;
    if (second) high += bytes;
  }

  // Reads chunk v; its first block is (v CHUNK) >> log2_block behind chunk 0's, since a lane's
  // place in a chunk never carries into the next one.
  __device__ __forceinline__ void read(int v, Coded& c) const {
    c.codes[v] = read_codes<BITS>(codes + v * CHUNK * width / 8, high + v * CHUNK * second / 8);
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

template <int BITS, int SYM, bool BF16>
__device__ __forceinline__ Lane<BITS, SYM, BF16> lane_at(Plan const& plan, Place const& at) {
  Segment const& s = at.segment();
  char* row = const_cast<char*>(plan.payload) + at.row * plan.payload_row;
  return {tile_slots<BITS>(row, s.from_planes, at.part), at.within, s.from_codec.log2_block};
}

// x = the decoded values, or their sum with x. A decoded value is never -0: adding 0 first, as the
// reference does, would change nothing.
template <int BITS, int SYM, bool BF16, bool SUM>
__device__ __forceinline__ void add_row(Coded const& c, float book, Tile& x) {
  // a level times a scale of 8 bits, or -1, 0 and 1 times any, is exact: one rounding either way
  constexpr bool EXACT = SYM != NORMAL && (BF16 || (BITS == 2 && SYM));
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    float const scale = float_of(c.scale[v]), zero = float_of(c.zero[v]);
    float q[8];
    decode_levels<BITS, SYM>(c.codes[v], book, q);
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
template <int BITS, int SYM, bool BF16, bool FRESH>
__device__ __forceinline__ void sum_whole(Plan const& plan, Place const& at, Tile& x) {
  auto lane = lane_at<BITS, SYM, BF16>(plan, at);
  float const book = book_of<BITS, SYM>(lane.log2_block);
  Coded a;
  lane.read(a);
  int k = plan.k - 1;  // rows still to be read
  // where registers hold no second row
  if constexpr (!SYM && (BITS == 8 || BITS == 3 || (BITS == 6 && !FRESH))) {
    if (FRESH) zero_tile(x);
#pragma unroll 1
    for (; k; --k) {
      add_row<BITS, SYM, BF16, true>(a, book, x);
      lane.move(plan.payload_k), lane.read(a);
    }
  } else {
    Coded b;
    if (k & 1) {
      lane.move(plan.payload_k), lane.read(b);
      add_row<BITS, SYM, BF16, !FRESH>(a, book, x);
      a = b, --k;
    } else if (FRESH) {
      zero_tile(x);
    }
#pragma unroll 1
    for (; k; k -= 2) {
      lane.move(plan.payload_k), lane.read(b);
      add_row<BITS, SYM, BF16, true>(a, book, x);
      lane.move(plan.payload_k), lane.read(a);
      add_row<BITS, SYM, BF16, true>(b, book, x);
    }
  }
  add_row<BITS, SYM, BF16, true>(a, book, x);
}

// Adds the rows of a row's last tile, zeros past its end.
template <int BITS, int SYM, bool BF16>
__device__ __forceinline__ void sum_part(Plan const& plan, Place const& at, int left, Tile& x) {
  auto lane = lane_at<BITS, SYM, BF16>(plan, at);
  float const book = book_of<BITS, SYM>(lane.log2_block);
#pragma unroll 1
  for (int k = 0; k < plan.k; ++k, lane.move(plan.payload_k)) {
    Coded c;
    clear(c);
    lane.read_part(at.within, left, c);
    add_row<BITS, SYM, BF16, true>(c, book, x);
  }
  zero_from(x, at.within, left);  // zero bits are the lowest level
}

// x + (0 + row 0) + (0 + row 1) + ..., as the reference adds decoded rows
__device__ __forceinline__ void sum_raw(Plan const& plan, Place const& at, Tile& x) {
  Segment const& s = at.segment();
#pragma unroll 1
  for (int k = 0; k < plan.k; ++k) {
    Tile row;
    load_floats(s.from, s.from_dtype, at, s.from_len, k, row);
    for_each([&](int v, int i) { x[v][i] = add(x[v][i], add(row[v][i], 0.0f)); });
  }
}

// Do::run<BITS, SYM, BF16>(args ...) for the codec's kind.
template <class Do, class... Args>
__device__ __forceinline__ void by_kind(Codec const& c, Args&... args) {
  switch (c.bits * 8 + c.symmetric * 2 + c.bf16_scale) {
    case 64: return Do::template run<8, false, false>(args...);
    case 65: return Do::template run<8, false, true>(args...);
    case 66: return Do::template run<8, true, false>(args...);
    case 67: return Do::template run<8, true, true>(args...);
    case 48: return Do::template run<6, false, false>(args...);
    case 49: return Do::template run<6, false, true>(args...);
    case 50: return Do::template run<6, true, false>(args...);
    case 51: return Do::template run<6, true, true>(args...);
    case 32: return Do::template run<4, false, false>(args...);
    case 33: return Do::template run<4, false, true>(args...);
    case 34: return Do::template run<4, true, false>(args...);
    case 35: return Do::template run<4, true, true>(args...);
    case 36: return Do::template run<4, NORMAL, false>(args...);
    case 37: return Do::template run<4, NORMAL, true>(args...);
    case 24: return Do::template run<3, false, false>(args...);
    case 25: return Do::template run<3, false, true>(args...);
    case 26: return Do::template run<3, true, false>(args...);
    case 27: return Do::template run<3, true, true>(args...);
    case 28: return Do::template run<3, NORMAL, false>(args...);
    case 29: return Do::template run<3, NORMAL, true>(args...);
    case 16: return Do::template run<2, false, false>(args...);
    case 17: return Do::template run<2, false, true>(args...);
    case 18: return Do::template run<2, true, false>(args...);
    case 19: return Do::template run<2, true, true>(args...);
    case 20: return Do::template run<2, NORMAL, false>(args...);
    default: return Do::template run<2, NORMAL, true>(args...);
  }
}

template <bool FRESH>
struct SumCoded {
  template <int BITS, int SYM, bool BF16>
  __device__ __forceinline__ static void run(Plan const& plan, Place const& at, Tile& x) {
    int const left = at.left(at.segment().from_len);
    if (left == TILE) {
      sum_whole<BITS, SYM, BF16, FRESH>(plan, at, x);
    } else {
      if (FRESH) zero_tile(x);
      sum_part<BITS, SYM, BF16>(plan, at, left, x);
    }
  }
};

// x = the sum of the incoming payload rows in row order (FRESH), or x plus each, by whatever codec
// the segment has.
template <bool FRESH>
__device__ __forceinline__ void sum_tile(Plan const& plan, Place const& at, Tile& x) {
  Codec const& codec = at.segment().from_codec;
  if (codec.raw) {
    if (FRESH) zero_tile(x);
    return sum_raw(plan, at, x);
  }
  by_kind<SumCoded<FRESH>>(codec, plan, at, x);
}

}  // namespace zpp
