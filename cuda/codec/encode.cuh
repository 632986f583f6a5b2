// A tile of fp32 values in registers → codes and scales of a block codec in a payload row.
#pragma once

#include "codec/normal.cuh"

namespace zpp {

struct Range {
  float least, most;
};

template <int SYM>
__device__ __forceinline__ Range join(Range a, Range b) {
  // the forms that return NaN when either side is one
  cutlass::maximum<float, true> most;
  cutlass::minimum<float, true> least;
  return {SYM ? 0.0f : least(a.least, b.least), most(a.most, b.most)};
}

template <int SYM>
__device__ __forceinline__ Range join_lanes(Range r, int lanes) {
#pragma unroll 1
  for (int d = 1; d < lanes; d *= 2) {
    Range const other = {SYM ? 0.0f : __shfl_xor_sync(ALL, r.least, d),
                         __shfl_xor_sync(ALL, r.most, d)};
    r = join<SYM>(r, other);
  }
  return r;
}

// The range of one lane's eight elements, of which `count` exist.
template <int SYM>
__device__ __forceinline__ Range range_of(float const (&x)[8], int count) {
  float const inf = float_of(0x7F800000u);
  Range r = {inf, SYM ? 0.0f : -inf};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) r = join<SYM>(r, {x[i], SYM ? fabsf(x[i]) : x[i]});
  }
  return r;
}

// Joins the lanes, chunks and warps that share a block; every lane gets its blocks' ranges.
template <int SYM>
__device__ __forceinline__ void join_blocks(Range (&r)[CHUNKS], int log2_block) {
  if (log2_block <= 8) {
    int const lanes = 1 << (log2_block - 3);
#pragma unroll 1
    for (int d = 1; d < lanes; d *= 2) {
#pragma unroll
      for (int v = 0; v < CHUNKS; ++v) {
        Range const other = {SYM ? 0.0f : __shfl_xor_sync(ALL, r[v].least, d),
                             __shfl_xor_sync(ALL, r[v].most, d)};
        r[v] = join<SYM>(r[v], other);
      }
    }
    return;
  }
  r[0] = join<SYM>(r[0], r[1]);
  r[2] = join<SYM>(r[2], r[3]);
  if (log2_block == 9) {
    r[0] = r[1] = join_lanes<SYM>(r[0], 32);
    r[2] = r[3] = join_lanes<SYM>(r[2], 32);
    return;
  }
  Range whole = join_lanes<SYM>(join<SYM>(r[0], r[2]), 32);
  if (log2_block > 10) {  // the same for every thread of the block
    __shared__ Range parts[THREADS / 32];
    int const warp = threadIdx.x / 32, warps = 1 << (log2_block - 10);
    __syncthreads();  // the last tile's parts have been read
    if (threadIdx.x % 32 == 0) parts[warp] = whole;
    __syncthreads();
    whole = parts[warp & ~(warps - 1)];
    for (int i = 1; i < warps; ++i) whole = join<SYM>(whole, parts[(warp & ~(warps - 1)) + i]);
  }
  r[0] = r[1] = r[2] = r[3] = whole;
}

struct Slots {
  uint8_t* codes;    // first plane
  uint8_t* high;     // second plane, 3 and 6 bits only
  uint8_t* scales;
};

// The parts of a payload row where tile number `part` has its codes and scales.
template <int BITS>
__device__ __forceinline__ Slots tile_slots(char* row, Planes const& at, int part) {
  uint8_t* base = reinterpret_cast<uint8_t*>(row);
  return {base + at.codes + int64_t(part) * at.codes_step,
          base + at.high + int64_t(part) * (TILE / 8 * high_bits(BITS)),
          base + at.scales + int64_t(part) * at.scales_step};
}

template <int SYM>
__device__ __forceinline__ void write_scale(Slots const& to, bool bf16, int block, Scale s) {
  // a NaN scale is 0x7FC0 in bf16: the upper half of its fp32 bits, like every stored scale
  uint32_t const scale = bits_of(s.scale), zero = bits_of(s.zero);
  if (SYM && !bf16) reinterpret_cast<uint32_t*>(to.scales)[block] = scale;
  if (SYM && bf16) reinterpret_cast<uint16_t*>(to.scales)[block] = uint16_t(scale >> 16);
  if (!SYM && !bf16) reinterpret_cast<uint2*>(to.scales)[block] = make_uint2(scale, zero);
  if (!SYM && bf16) {
    reinterpret_cast<uint32_t*>(to.scales)[block] = scale >> 16 | (zero & 0xFFFF0000u);
  }
}

struct Affine {
  float inverse, zero, scale;
};

// Ranges → what quantizes each chunk; one lane of each block writes its scale. The lanes of a
// block share the divisions: lane l works on chunk l % 4 and the others fetch its result; that
// with the scale itself where BACK.
template <int BITS, int SYM, bool BACK>
__device__ __forceinline__ void scale_blocks(
    Codec const& codec, Slots const& to, Place const& at, int left, Range const (&r)[CHUNKS],
    Affine (&affine)[CHUNKS]) {
  int const lane = threadIdx.x % 32, lb = codec.log2_block;
  int const lanes = lb >= 8 ? 32 : 1 << (lb - 3), within = lane & (lanes - 1);
  float const levels = Grid<BITS, SYM>::levels, reach = float(1 << codec.log2_group);
  bool const bf16 = codec.bf16_scale;
  int const mask = (1 << lb) - 1;
  if (lanes >= 4) {
    int const pick = lane & 3;
    Range const mine = pick == 0 ? r[0] : pick == 1 ? r[1] : pick == 2 ? r[2] : r[3];
    Scale const s = make_scale(mine.least, mine.most, levels, SYM, bf16, reach);
    int const begin = at.within - within * 8 + pick * CHUNK;
    if (within == pick && (begin & mask) == 0 && begin < left) {
      write_scale<SYM>(to, bf16, begin >> lb, s);
    }
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
      affine[v].inverse = __shfl_sync(ALL, s.inverse, (lane & ~3) | v);
      affine[v].zero = SYM ? 0.0f : __shfl_sync(ALL, s.zero, (lane & ~3) | v);
      if (BACK) affine[v].scale = __shfl_sync(ALL, s.scale, (lane & ~3) | v);
    }
    return;
  }
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {  // block 16: two lanes
    Scale const s = make_scale(r[v].least, r[v].most, levels, SYM, bf16, reach);
    int const begin = at.within + v * CHUNK;
    if (within == 0 && begin < left) write_scale<SYM>(to, bf16, begin >> lb, s);
    affine[v] = {s.inverse, s.zero, s.scale};
  }
}

// The second plane's part of eight codes.
template <int BITS>
__device__ __forceinline__ void write_high(Slots const& to, int first, Packed p) {
  if (BITS == 6) *reinterpret_cast<uint16_t*>(to.high + first / 4) = uint16_t(p.b);
  if (BITS == 3) to.high[first / 8] = uint8_t(p.b);
}

template <int BITS>
__device__ __forceinline__ void write_codes(Slots const& to, int first, Packed p) {
  if (BITS == 8) *reinterpret_cast<uint2*>(to.codes + first) = make_uint2(p.a, p.b);
  if (BITS == 6 || BITS == 4) *reinterpret_cast<uint32_t*>(to.codes + first / 2) = p.a;
  if (BITS == 3 || BITS == 2) *reinterpret_cast<uint16_t*>(to.codes + first / 4) = uint16_t(p.a);
  write_high<BITS>(to, first, p);
}

// Elements that `left` codes take with their plane's filling to 16 bytes.
__device__ __forceinline__ int filled(int left, int width) {
  int const each = 128 / width;
  return (left + each - 1) & ~(each - 1);
}

// The last tile: codes past the end are zero bits, up to each plane's 16-byte boundary.
template <int BITS>
__device__ __forceinline__ void write_last_codes(Slots const& to, int first, int left, Packed p) {
  p = keep<BITS>(p, left - first);
  constexpr int second = high_bits(BITS);
  if constexpr (!second) {
    if (first < filled(left, BITS)) write_codes<BITS>(to, first, p);
  } else {  // its filling may be longer than the first plane's
    if (first < filled(left, BITS - second)) write_codes<BITS - second>(to, first, p);
    if (first < filled(left, second)) write_high<BITS>(to, first, p);
  }
}

struct NoiseAt {
  uint32_t row, rank, parameter, key0, key1;
};

template <int BITS, int SYM, bool STOCHASTIC, bool CLAMP>
__device__ __forceinline__ Packed quantize(
    float const (&x)[8], Affine a, NoiseAt const& noise, uint32_t octet, int log2_block) {
  uint32_t bits[8];
  if constexpr (SYM == NORMAL) {
    typename Normal<BITS>::Cuts const cuts(log2_block);
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = cuts.code(mul(x[i], a.inverse));
  } else if constexpr (STOCHASTIC) {
    Words const words = philox(
        octet, noise.row, noise.rank, noise.parameter, noise.key0, noise.key1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bits[i] = code_stochastic<BITS, SYM, CLAMP>(x[i], a.inverse, a.zero, uniform(words, i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = code_nearest<BITS, SYM, CLAMP>(x[i], a.inverse, a.zero);
  }
  Packed const p = pack<BITS>(bits);
  bool const ok = a.inverse == a.inverse;
  return {ok ? p.a : 0, ok ? p.b : 0};
}

// What codes decode to, maybe in the place of what they were made of, and how many of them are at
// either end of the range. A kernel that asks for no count has none.
struct Back {
  Tile& y;
  int saturated = 0;
};

template <int BITS, int SYM, bool STOCHASTIC, bool CLAMP>
__device__ __forceinline__ void write_tile(
    Slots const& to, Place const& at, int left, Tile const& x, Affine const (&affine)[CHUNKS],
    NoiseAt const& noise, Back* back) {
  uint32_t const octet = uint32_t(at.start >> 3) + uint32_t(at.within >> 3);
  int const log2_block = at.segment().to_codec.log2_block;
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    int const first = at.within + v * CHUNK;
    Packed const p = quantize<BITS, SYM, STOCHASTIC, CLAMP>(
        x[v], affine[v], noise, octet + v * (CHUNK / 8), log2_block);
    left == TILE ? write_codes<BITS>(to, first, p) : write_last_codes<BITS>(to, first, left, p);
    if (back) {
      float q[8];
      decode_levels<BITS, SYM>(p, book_of<BITS, SYM>(log2_block), q);
      float top = Grid<BITS, SYM>::levels;
      if constexpr (SYM == NORMAL) top = Normal<BITS>::levels(log2_block)[Normal<BITS>::half - 1];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bool const end = q[i] == (SYM ? -top : 0.0f) || q[i] == top;
        if (end && first + i < left) ++back->saturated;
        back->y[v][i] = dequantize<SYM>(q[i], affine[v].scale, affine[v].zero);
      }
    }
  }
}

// The scales' own filling up to 16 bytes.
__device__ __forceinline__ void write_scale_padding(
    Slots const& to, Codec const& codec, int64_t start, int64_t numel) {
  int const each = (codec.bf16_scale ? 2 : 4) * (codec.symmetric ? 1 : 2);
  int64_t const all = ((numel - 1) >> codec.log2_block) + 1;
  int const used = int(all - (start >> codec.log2_block)) * each;
  int const end = used + int(-(all * each) & 15);
  if (used + threadIdx.x < end) to.scales[used + threadIdx.x] = 0;
}

template <int BITS, int SYM, bool STOCHASTIC, bool BACK = false>
__device__ __forceinline__ void encode_block_tile(
    char* row, Place const& at, Tile const& x, NoiseAt const& noise, Back* back = nullptr) {
  Codec const codec = at.segment().to_codec;
  int64_t const numel = at.segment().to_len;
  Slots const to = tile_slots<BITS>(row, at.segment().to_planes, at.part);
  Range ranges[CHUNKS];
  int const left = at.left(numel);
  if (left == TILE) {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) ranges[v] = range_of<SYM>(x[v], 8);
  } else {
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
      ranges[v] = range_of<SYM>(x[v], left - at.within - v * CHUNK);
    }
  }
  if (at.start + TILE >= numel) write_scale_padding(to, codec, at.start, numel);
  join_blocks<SYM>(ranges, codec.log2_block);
  Affine affine[CHUNKS];
  scale_blocks<BITS, SYM, BACK>(codec, to, at, left, ranges, affine);
  if constexpr (SYM == NORMAL) {
    write_tile<BITS, SYM, false, false>(to, at, left, x, affine, noise, back);
  } else {
    if constexpr (STOCHASTIC) {
      // with 4 bits and an fp32 scale the noise, 2^-17 or more away from 0 and 1, keeps the range
      if (codec.stochastic && (BITS > 4 || codec.bf16_scale)) {
        return write_tile<BITS, SYM, true, true>(to, at, left, x, affine, noise, back);
      }
      if (codec.stochastic) {
        return write_tile<BITS, SYM, true, false>(to, at, left, x, affine, noise, back);
      }
    }
    if (codec.bf16_scale) {
      write_tile<BITS, SYM, false, true>(to, at, left, x, affine, noise, back);
    } else {
      write_tile<BITS, SYM, false, false>(to, at, left, x, affine, noise, back);
    }
  }
}

template <bool STOCHASTIC>
__device__ __forceinline__ NoiseAt noise_at(Plan const& plan, Place const& at) {
  if (!STOCHASTIC || !at.segment().to_codec.stochastic) return {};
  bool const there = plan.key_at != nullptr;
  return {uint32_t(plan.noise_rows[2 * at.row + 1]), uint32_t(plan.noise_rows[2 * at.row]),
          at.segment().parameter, there ? uint32_t(plan.key_at[0]) : uint32_t(plan.key),
          there ? uint32_t(plan.key_at[1]) : uint32_t(plan.key >> 32)};
}

// x → the outgoing payload row, by whatever codec the segment has. BACK: with `back` of block codecs,
// which past their end is anything.
template <bool STOCHASTIC, bool BACK = false>
__device__ __forceinline__ void encode_tile(
    Plan const& plan, Place const& at, Tile const& x, Back* back = nullptr) {
  Segment const& s = at.segment();
  if (s.to_codec.raw) return store_floats(s.to, s.to_dtype, at, s.to_len, true, x);
  NoiseAt const noise = noise_at<STOCHASTIC>(plan, at);
  char* row = plan.out + at.row * plan.out_row;
  switch (s.to_codec.bits * 4 + s.to_codec.symmetric) {
    case 32: return encode_block_tile<8, false, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 33: return encode_block_tile<8, true, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 24: return encode_block_tile<6, false, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 25: return encode_block_tile<6, true, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 16: return encode_block_tile<4, false, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 17: return encode_block_tile<4, true, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 18: return encode_block_tile<4, NORMAL, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 12: return encode_block_tile<3, false, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 13: return encode_block_tile<3, true, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 14: return encode_block_tile<3, NORMAL, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 8: return encode_block_tile<2, false, STOCHASTIC, BACK>(row, at, x, noise, back);
    case 9: return encode_block_tile<2, true, STOCHASTIC, BACK>(row, at, x, noise, back);
    default: return encode_block_tile<2, NORMAL, STOCHASTIC, BACK>(row, at, x, noise, back);
  }
}

}  // namespace zpp
