// The arithmetic of the block codecs on 8 neighbouring elements, for device and host.
//
// The host compiles this file too (tests/cuda checks it against the plain-torch reference), so
// nothing here may depend on CUDA headers beyond the wrappers at the top. Every operation is
// rounded on its own; a fused multiply-add stands only where its result is exact.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ZPP_HD __host__ __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
#define ZPP_HD inline
#endif

namespace zpp {

#if defined(__CUDA_ARCH__)
ZPP_HD float mul(float a, float b) { return __fmul_rn(a, b); }
ZPP_HD float add(float a, float b) { return __fadd_rn(a, b); }
// a / n for an odd integer n below 256: the product in fp64 is so near the quotient, and the
// quotient so far from any midpoint of two fp32 numbers, that one rounding gives a / n exactly.
ZPP_HD float divide(float a, float n) {
  return __double2float_rn(__dmul_rn(double(a), 1.0 / double(n)));
}
// 1 / s: two Newton steps in fp64 leave an error below 2^-52, while 1 / s is 2^-49 or more away
// from any midpoint, so one rounding is exact; fp64's range needs no special cases.
ZPP_HD float reciprocal(float s) {
  double const d = double(s);
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(d));
  r = __fma_rn(__fma_rn(-d, r, 1.0), r, r);
  r = __fma_rn(__fma_rn(-d, r, 1.0), r, r);
  return __double2float_rn(r);
}
// (w & mask) | base in one instruction
ZPP_HD uint32_t and_or(uint32_t w, uint32_t mask, uint32_t base) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "r"(mask), "r"(base));
  return r;
}
ZPP_HD float fma_exact(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ZPP_HD uint32_t bits_of(float x) { return __float_as_uint(x); }
ZPP_HD float float_of(uint32_t b) { return __uint_as_float(b); }
// floor(t) + magic, for magic in [2^23, 2^24): one spacing is 1 there
ZPP_HD float floor_onto(float t, float magic) { return __fadd_rd(t, magic); }
ZPP_HD float lower(float a, float b) { return fminf(a, b); }
ZPP_HD float upper(float a, float b) { return fmaxf(a, b); }
#else
ZPP_HD float mul(float a, float b) { volatile float r = a * b; return r; }
ZPP_HD float add(float a, float b) { volatile float r = a + b; return r; }
ZPP_HD float divide(float a, float n) { volatile float r = a / n; return r; }
ZPP_HD float reciprocal(float s) { volatile float r = 1.0f / s; return r; }
ZPP_HD uint32_t and_or(uint32_t w, uint32_t mask, uint32_t base) { return (w & mask) | base; }
ZPP_HD float fma_exact(float a, float b, float c) { return float(double(a) * double(b) + double(c)); }
ZPP_HD uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
ZPP_HD float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
ZPP_HD float floor_onto(float t, float magic) { return float(floor(double(t)) + double(magic)); }
ZPP_HD float lower(float a, float b) { return a < b ? a : b; }
ZPP_HD float upper(float a, float b) { return a > b ? a : b; }
#endif

constexpr uint32_t BASE = 0x4B000000u;  // bits of 2^23: low mantissa bits count in ones
constexpr float TWO23 = 8388608.0f;
constexpr float TINY = 1.17549435e-38f;  // 2^-126

ZPP_HD bool is_finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }

// Powers of two as constants: 2^n for n in [-126, 127].
template <int N>
ZPP_HD constexpr float pow2() {
  float x = 1.0f;
  for (int i = 0; i < (N < 0 ? -N : N); ++i) x = N < 0 ? x * 0.5f : x * 2.0f;
  return x;
}

// Codec::symmetric, in templates SYM: 0 has a zero point, 1 has none, and NORMAL (codec/normal.cuh) has
// none and levels of its own.
constexpr int NORMAL = 2;

template <int BITS, int SYM>
struct Grid {
  static_assert(SYM != NORMAL || BITS <= 4, "levels of more bits are not in the table");
  static constexpr int offset = SYM ? 1 << (BITS - 1) : 0;
  static constexpr float levels = SYM == NORMAL ? 1.0f : float(SYM ? (1 << (BITS - 1)) - 1 : (1 << BITS) - 1);
  static constexpr float lowest = SYM ? -levels : 0.0f;
  static constexpr float magic = TWO23 + float(offset);  // even offset: ties stay to even
};

// ---- scales ------------------------------------------------------------------------------

ZPP_HD uint32_t bf16_nearest(float x) {  // finite or infinite x; the bits of the bf16
  uint32_t const b = bits_of(x);
  return (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
}

ZPP_HD float bf16_down(float x) {  // towards minus infinity; NaN and Inf stay
  uint32_t const b = bits_of(x), cut = b & 0xFFFF0000u;
  uint32_t const down = (x < 0.0f && cut != b) ? cut + 0x10000u : cut;
  return is_finite(x) ? float_of(down) : x;
}

struct Scale {
  float scale, zero, inverse;  // as stored; inverse is NaN for a block that is not finite
};

// From a block's range: `least` is unused for symmetric codes, `most` is max|x| or max x. `reach`:
// what decoded values must stay finite times, 2^log2_group of the rotation.
ZPP_HD Scale make_scale(
    float least, float most, float levels, bool symmetric, bool bf16, float reach) {
  float zero = symmetric ? 0.0f : add(least, 0.0f);
  if (bf16) zero = bf16_down(zero);
  float const span = symmetric ? most : add(most, -zero);
  float scale = divide(span, levels);
  bool const nan = scale != scale;
  scale = scale < TINY ? TINY : scale;
  if (bf16 && !nan) scale = float_of(bf16_nearest(scale) << 16);
  float const top = add(mul(levels, scale), zero);
  bool const ok = is_finite(mul(top, reach)) && is_finite(mul(zero, reach));
  float const none = float_of(0x7FC00000u);
  return {ok ? scale : none, ok ? zero : 0.0f, ok ? reciprocal(scale) : none};
}

// ---- codes -------------------------------------------------------------------------------

// The code of x in the low bits of the result, above them those of BASE.
// CLAMP may be false where rounding cannot leave the range: with an fp32 scale, to nearest, or
// stochastically with at most 4 bits (y + u stays 2^-18 inside the next level).
template <int BITS, int SYM, bool CLAMP>
ZPP_HD uint32_t code_nearest(float x, float inverse, float zero) {
  using G = Grid<BITS, SYM>;
  float y = mul(SYM ? x : add(x, -zero), inverse);
  if (CLAMP) y = lower(y, G::levels);
  if (CLAMP && SYM) y = upper(y, G::lowest);
  return bits_of(add(y, G::magic));
}

template <int BITS, int SYM, bool CLAMP>
ZPP_HD uint32_t code_stochastic(float x, float inverse, float zero, float u) {
  using G = Grid<BITS, SYM>;
  float t = add(mul(SYM ? x : add(x, -zero), inverse), u);
  if (CLAMP) t = lower(t, G::levels);
  if (CLAMP && SYM) t = upper(t, G::lowest);
  return bits_of(floor_onto(t, G::magic));
}

// Eight codes as they are stored: 8 bits fill both words, 6 bits have their low nibbles in `a`
// and their high crumbs in the low half of `b`, 4 bits fill `a`, 3 bits have their low crumbs in
// the low half of `a` and their high bits in the low byte of `b`, 2 bits fill the low half of `a`.
struct Packed {
  uint32_t a, b;
};

// Sum of bits[i] << (width * i) less what the BASE bits of each add.
template <int WIDTH, int COUNT, int STEP = 1>
ZPP_HD uint32_t gather(uint32_t const* bits) {
  uint32_t sum = 0, excess = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    sum += bits[i * STEP] << (WIDTH * i);
    excess += BASE << (WIDTH * i);
  }
  return sum - excess;
}

template <int BITS>
ZPP_HD Packed pack(uint32_t const (&bits)[8]) {
  if constexpr (BITS == 8) return {gather<8, 4>(bits), gather<8, 4>(bits + 4)};
  if constexpr (BITS == 4) return {gather<4, 8>(bits), 0};
  if constexpr (BITS == 2) return {gather<2, 8>(bits), 0};
  if constexpr (BITS == 3) {
    uint32_t const nibbles = gather<4, 8>(bits);
    uint32_t low = nibbles & 0x33333333u, high = nibbles >> 2 & 0x11111111u;
    low = (low | low >> 2) & 0x0F0F0F0Fu, high = (high | high >> 3) & 0x03030303u;
    low = (low | low >> 4) & 0x00FF00FFu, high = (high | high >> 6) & 0x000F000Fu;
    return {(low | low >> 8) & 0xFFFFu, (high | high >> 12) & 0xFFu};
  }
  if constexpr (BITS == 6) {
    uint32_t const even = gather<8, 4, 2>(bits), odd = gather<8, 4, 2>(bits + 1);
    uint32_t const low = (even & 0x0F0F0F0Fu) | ((odd << 4) & 0xF0F0F0F0u);
    uint32_t const pairs = ((even >> 4) & 0x03030303u) | ((odd >> 2) & 0x0C0C0C0Cu);
    uint32_t const both = pairs | (pairs >> 4);  // bytes 0 and 2 hold four crumbs each
    return {low, (both & 0xFFu) | ((both >> 8) & 0xFF00u)};
  }
}

// Keeps the first `count` codes, zero bits for the rest.
template <int BITS>
ZPP_HD Packed keep(Packed p, int count) {
  auto const low = [](int n) { return n >= 32 ? ~0u : (1u << n) - 1u; };
  int const n = count < 0 ? 0 : (count > 8 ? 8 : count);
  if (BITS == 8) return {p.a & low(8 * n), p.b & low(n > 4 ? 8 * (n - 4) : 0)};
  if (BITS == 6) return {p.a & low(4 * n), p.b & low(2 * n)};
  if (BITS == 3) return {p.a & low(2 * n), p.b & low(n)};
  return {p.a & low(BITS * n), 0};
}

// Byte I of a word as a float, less `offset`.
template <int I>
ZPP_HD float byte_level(uint32_t w, float offset) {
#if defined(__CUDA_ARCH__)
  uint32_t const f = __byte_perm(w, BASE, 0x7650 | I);
#else
  uint32_t const f = BASE | ((w >> (8 * I)) & 0xFFu);
#endif
  return add(float_of(f), -(TWO23 + offset));
}

// Six bits to a byte each: codes 0, 2, 4, 6 in `a`, the others in `b`.
ZPP_HD Packed widen_six(Packed p) {
#if defined(__CUDA_ARCH__)
  uint32_t const apart = __byte_perm(p.b, 0, 0x4140);
#else
  uint32_t const apart = (p.b & 0xFFu) | (p.b & 0xFF00u) << 8;
#endif
  uint32_t const crumbs = (apart | apart << 4) & 0x0F0F0F0Fu;  // two codes' in each byte
  return {(p.a & 0x0F0F0F0Fu) | (crumbs << 4 & 0x30303030u),
          (p.a >> 4 & 0x0F0F0F0Fu) | (crumbs << 2 & 0x30303030u)};
}

// Three bits to a nibble each.
ZPP_HD uint32_t widen_three(Packed p) {
  uint32_t low = (p.a | p.a << 8) & 0x00FF00FFu, high = (p.b | p.b << 12) & 0x000F000Fu;
  low = (low | low << 4) & 0x0F0F0F0Fu, high = (high | high << 6) & 0x03030303u;
  low = (low | low << 2) & 0x33333333u, high = (high | high << 3) & 0x11111111u;
  return low | high << 2;
}

// Code I of 2 or 4 bits as a float, less `offset`: exact, its place in the word is scaled away.
template <int BITS, int I>
ZPP_HD float nibble_level(uint32_t word, float offset) {
  constexpr int at = BITS == 4 ? 4 * (I & 3) : 2 * I;
  uint32_t const w = BITS == 4 && I >= 4 ? word >> 16 : word;
  float const f = float_of(and_or(w, ((1u << BITS) - 1u) << at, BASE));
  return fma_exact(f, pow2<-at>(), -(pow2<23 - at>() + offset));
}

// The levels (code - offset) of eight codes, exact in fp32.
template <int BITS, int SYM>
ZPP_HD void levels(Packed p, float (&q)[8]) {
  constexpr float offset = float(Grid<BITS, SYM>::offset);
  if constexpr (BITS == 8) {
    q[0] = byte_level<0>(p.a, offset), q[1] = byte_level<1>(p.a, offset);
    q[2] = byte_level<2>(p.a, offset), q[3] = byte_level<3>(p.a, offset);
    q[4] = byte_level<0>(p.b, offset), q[5] = byte_level<1>(p.b, offset);
    q[6] = byte_level<2>(p.b, offset), q[7] = byte_level<3>(p.b, offset);
  } else if constexpr (BITS == 6) {
    Packed const w = widen_six(p);
    q[0] = byte_level<0>(w.a, offset), q[1] = byte_level<0>(w.b, offset);
    q[2] = byte_level<1>(w.a, offset), q[3] = byte_level<1>(w.b, offset);
    q[4] = byte_level<2>(w.a, offset), q[5] = byte_level<2>(w.b, offset);
    q[6] = byte_level<3>(w.a, offset), q[7] = byte_level<3>(w.b, offset);
  } else {
    constexpr int each = BITS == 3 ? 4 : BITS;
    uint32_t const w = BITS == 3 ? widen_three(p) : p.a;
    q[0] = nibble_level<each, 0>(w, offset), q[1] = nibble_level<each, 1>(w, offset);
    q[2] = nibble_level<each, 2>(w, offset), q[3] = nibble_level<each, 3>(w, offset);
    q[4] = nibble_level<each, 4>(w, offset), q[5] = nibble_level<each, 5>(w, offset);
    q[6] = nibble_level<each, 6>(w, offset), q[7] = nibble_level<each, 7>(w, offset);
  }
}

template <int SYM>
ZPP_HD float dequantize(float level, float scale, float zero) {
  float const x = mul(level, scale);
  return SYM ? x : add(x, zero);
}

// ---- noise -------------------------------------------------------------------------------

struct Words {
  uint32_t w[4];
};

// Philox4x32 with 7 rounds.
ZPP_HD Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    uint64_t const p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0, c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1, c3 = uint32_t(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// u = (16 bits + 0.5) / 65536 for element i of the eight that `noise` serves.
ZPP_HD float uniform(Words const& noise, int i) {
  uint32_t const w = noise.w[i >> 1];
  // 0x4300hhhh is 128 + h / 65536
#if defined(__CUDA_ARCH__)
  uint32_t const f = __byte_perm(w, 0x43000000u, i & 1 ? 0x7632 : 0x7610);
#else
  uint32_t const f = 0x43000000u | ((i & 1) ? w >> 16 : w & 0xFFFFu);
#endif
  return add(float_of(f), -(128.0f - 0x1p-17f));
}

// ---- rotation ----------------------------------------------------------------------------

// Butterflies at strides 1, 2 and 4 on eight neighbours.
ZPP_HD void butterflies(float (&x)[8]) {
#pragma unroll
  for (int stride = 1; stride < 8; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & stride) continue;
      float const a = x[i], b = x[i + stride];
      x[i] = add(a, b);
      x[i + stride] = add(a, -b);
    }
  }
}

// 256 fixed signs, bit i % 32 of word i / 32 (zpp_lab/codecs/hadamard.py, sign_words).
ZPP_HD uint32_t sign_word(int i) {
  constexpr uint32_t words[8] = {0xE0A1AF35u, 0x7DC5825Eu, 0xDD64C57Eu, 0x1A68A567u,
                                 0xDD879537u, 0xB3A08515u, 0x432D8559u, 0x097F4DFCu};
  return words[i & 7];
}

}  // namespace zpp
