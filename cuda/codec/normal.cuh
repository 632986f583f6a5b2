// Levels for normal numbers (zpp_lab/codecs/families/normal.py): tables, codes, lookups.
#pragma once

#include "codec/tile.cuh"

namespace zpp {

// The positive levels of blocks of 16 ... 8192: two of 2 bits, four of 3, eight of 4. A test holds
// them against levels_of.
#if defined(__CUDACC__)
static __constant__
#endif
    float const normal_levels[10][14] = {
        {0x1.8db0aa0000000p-3f, 0x1.4230820000000p-1f, 0x1.9a46a60000000p-4f, 0x1.3992220000000p-2f,
         0x1.1068c60000000p-1f, 0x1.9b52000000000p-1f, 0x1.9e1ebe0000000p-5f, 0x1.380e7c0000000p-3f,
         0x1.0690f20000000p-2f, 0x1.752a560000000p-2f, 0x1.ea1a3c0000000p-2f, 0x1.3448280000000p-1f,
         0x1.7abd7c0000000p-1f, 0x1.ccbd160000000p-1f},
        {0x1.732b0c0000000p-3f, 0x1.2fdf060000000p-1f, 0x1.82f11c0000000p-4f, 0x1.288f520000000p-2f,
         0x1.03685e0000000p-1f, 0x1.8df75e0000000p-1f, 0x1.883ac20000000p-5f, 0x1.27c66a0000000p-3f,
         0x1.f27dbc0000000p-3f, 0x1.631da60000000p-2f, 0x1.d428f80000000p-2f, 0x1.2827140000000p-1f,
         0x1.6f0c9e0000000p-1f, 0x1.c52d6c0000000p-1f},
        {0x1.5a8db00000000p-3f, 0x1.1dc6260000000p-1f, 0x1.6ce6100000000p-4f, 0x1.183f8a0000000p-2f,
         0x1.ece1760000000p-2f, 0x1.7f16c20000000p-1f, 0x1.73bbb00000000p-5f, 0x1.187a800000000p-3f,
         0x1.d947a80000000p-3f, 0x1.51d3ea0000000p-2f, 0x1.bebe060000000p-2f, 0x1.1bf4220000000p-1f,
         0x1.62ac460000000p-1f, 0x1.bc365c0000000p-1f},
        {0x1.44422e0000000p-3f, 0x1.0ca2b40000000p-1f, 0x1.585b3a0000000p-4f, 0x1.08dcf00000000p-2f,
         0x1.d39dc00000000p-2f, 0x1.6f29100000000p-1f, 0x1.60b5ee0000000p-5f, 0x1.0a3dc40000000p-3f,
         0x1.c1abb20000000p-3f, 0x1.4178760000000p-2f, 0x1.aa24400000000p-2f, 0x1.0fe6c00000000p-1f,
         0x1.55d7f80000000p-1f, 0x1.b1caee0000000p-1f},
        {0x1.3067da0000000p-3f, 0x1.f9d01c0000000p-2f, 0x1.456ec80000000p-4f, 0x1.f51dde0000000p-3f,
         0x1.bb87620000000p-2f, 0x1.5eca280000000p-1f, 0x1.4f213a0000000p-5f, 0x1.fa1a7c0000000p-4f,
         0x1.abafec0000000p-3f, 0x1.321b760000000p-2f, 0x1.96852e0000000p-2f, 0x1.0426dc0000000p-1f,
         0x1.48c8b00000000p-1f, 0x1.a5f6800000000p-1f},
        {0x1.1ee8720000000p-3f, 0x1.dd88fc0000000p-2f, 0x1.342fe20000000p-4f, 0x1.daddc80000000p-3f,
         0x1.a504020000000p-2f, 0x1.4e9c220000000p-1f, 0x1.3eec620000000p-5f, 0x1.e1bd540000000p-4f,
         0x1.974c620000000p-3f, 0x1.23c1bc0000000p-2f, 0x1.83fa8c0000000p-2f, 0x1.f1a8d00000000p-2f,
         0x1.3bb8fa0000000p-1f, 0x1.98ea860000000p-1f},
        {0x1.0f8ddc0000000p-3f, 0x1.c469100000000p-2f, 0x1.249d640000000p-4f, 0x1.c30cf00000000p-3f,
         0x1.90532e0000000p-2f, 0x1.3f255e0000000p-1f, 0x1.3006b40000000p-5f, 0x1.cb4f3c0000000p-4f,
         0x1.8477360000000p-3f, 0x1.166d1a0000000p-2f, 0x1.7298320000000p-2f, 0x1.dc17680000000p-2f,
         0x1.2ee5e60000000p-1f, 0x1.8b03340000000p-1f},
        {0x1.0214960000000p-3f, 0x1.ae30fe0000000p-2f, 0x1.16a50c0000000p-4f, 0x1.ad9dfe0000000p-3f,
         0x1.7d8ae80000000p-2f, 0x1.30bc8e0000000p-1f, 0x1.2262340000000p-5f, 0x1.b6be8c0000000p-4f,
         0x1.7327b00000000p-3f, 0x1.0a1eac0000000p-2f, 0x1.626e7c0000000p-2f, 0x1.c7cb640000000p-2f,
         0x1.228ae40000000p-1f, 0x1.7cbb7e0000000p-1f},
        {0x1.ec70400000000p-4f, 0x1.9a8a260000000p-2f, 0x1.0a26f60000000p-4f, 0x1.9a69520000000p-3f,
         0x1.6c9e5c0000000p-2f, 0x1.23886e0000000p-1f, 0x1.15f1280000000p-5f, 0x1.a3f93c0000000p-4f,
         0x1.6353620000000p-3f, 0x1.fda9720000000p-3f, 0x1.5387380000000p-2f, 0x1.b4e9da0000000p-2f,
         0x1.16d9c00000000p-1f, 0x1.6e92820000000p-1f},
        {0x1.d7735a0000000p-4f, 0x1.891ab20000000p-2f, 0x1.fdf7360000000p-5f, 0x1.8937c60000000p-3f,
         0x1.5d6a3c0000000p-2f, 0x1.178bf60000000p-1f, 0x1.0aa2c20000000p-5f, 0x1.92e7d40000000p-4f,
         0x1.54e9f80000000p-3f, 0x1.e90fa40000000p-3f, 0x1.45e1860000000p-2f, 0x1.a384a60000000p-2f,
         0x1.0bf3560000000p-1f, 0x1.60f0640000000p-1f},
};

template <int BITS>
struct Normal {
  static constexpr int half = 1 << (BITS - 1), codes = 1 << BITS;

  __device__ __forceinline__ static float const* levels(int log2_block) {
    return normal_levels[log2_block - 4] + half - 2;
  }

  // A warp's table: lane l has the level of code l mod 2^BITS.
  __device__ __forceinline__ static float book(int log2_block) {
    int const code = threadIdx.x & (codes - 1);
    float const* const positive = levels(log2_block);
    return code < half ? -positive[half - 1 - code] : positive[code - half];
  }

  // The levels of eight codes; all lanes of the warp come here together.
  __device__ __forceinline__ static void look_up(Packed p, float book, float (&q)[8]) {
    constexpr int each = BITS == 3 ? 4 : BITS;
    uint32_t const w = BITS == 3 ? widen_three(p) : p.a;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[i] = __shfl_sync(ALL, book, int(w >> (each * i)) & (codes - 1));
    }
  }

  // Bits of the positive thresholds, which grow as the numbers do.
  struct Cuts {
    uint32_t at[half - 1];

    __device__ __forceinline__ explicit Cuts(int log2_block) {
      float const* const positive = levels(log2_block);
#pragma unroll
      for (int i = 0; i + 1 < half; ++i) {
        at[i] = bits_of(mul(add(positive[i], positive[i + 1]), 0.5f));
      }
    }

    // How many of all thresholds lie below y, above it the bits of BASE. Of a y that is not positive
    // those that lie at -y or nearer to 0 do not.
    __device__ __forceinline__ uint32_t code(float y) const {
      bool const positive = y > 0.0f;
      uint32_t const size = (bits_of(y) & 0x7FFFFFFFu) + (positive ? 0u : 1u);
      uint32_t code = half - 1;
#pragma unroll
      for (int i = 0; i + 1 < half; ++i) code -= at[i] < size;
      return BASE | (positive ? code ^ (codes - 1u) : code);
    }
  };
};

// What `decode_levels` takes beside codes: of even levels nothing.
template <int BITS, int SYM>
__device__ __forceinline__ float book_of(int log2_block) {
  if constexpr (SYM == NORMAL) return Normal<BITS>::book(log2_block);
  return 0.0f;
}

template <int BITS, int SYM>
__device__ __forceinline__ void decode_levels(Packed p, float book, float (&q)[8]) {
  if constexpr (SYM == NORMAL) {
    Normal<BITS>::look_up(p, book, q);
  } else {
    levels<BITS, SYM>(p, q);
  }
}

}  // namespace zpp
