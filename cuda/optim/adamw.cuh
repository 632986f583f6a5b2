// AdamW on eight neighbouring elements, for device and host: addresses, loads, arithmetic, stores.
//
// The reference is zpp_lab/engines/optim: every operation here has its twin there, in the same order,
// each rounded on its own. A warp has a block of 256 neighbours in a row, so that a block of 8-bit
// moments is one warp's; lane l holds elements 8 l ... 8 l + 7, which one draw of noise serves.
// The host compiles this file too (tests/cuda/test_adamw.py); what a warp shares is in adamw.cu.
#pragma once

#include "optim/adamw.h"
#include "codec/numerics.cuh"

#if !defined(__CUDA_ARCH__)
#include <cassert>
#include <cstring>
#endif

namespace zpp {

constexpr int CUT = 20;        // mantissa bits that 8 bits do not keep
constexpr int ONE = 127 << 3;  // 1.0 in eight exponent and three mantissa bits

#if defined(__CUDA_ARCH__)
ZPP_HD float quotient(float a, float b) { return __fdiv_rn(a, b); }
ZPP_HD float square_root(float a) { return __fsqrt_rn(a); }
ZPP_HD float larger(float a, float b) {  // NaN where either is, unlike fmaxf
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
#else
ZPP_HD float quotient(float a, float b) { volatile float r = a / b; return r; }
ZPP_HD float square_root(float a) { volatile float r = std::sqrt(a); return r; }
ZPP_HD float larger(float a, float b) { return a != a || a > b ? a : b; }
#endif

// ---- eight elements of 1, 2 or 4 bytes ---------------------------------------------------

template <typename T>
struct Vector {
  static constexpr int EACH = 4 / sizeof(T), BITS = 8 * sizeof(T), WORDS = 2 * sizeof(T);
  uint32_t w[WORDS];

  ZPP_HD uint32_t get(int i) const {
    return w[i / EACH] >> (BITS * (i % EACH)) & (0xFFFFFFFFu >> (32 - BITS));
  }
  ZPP_HD void put(int i, uint32_t bits) {  // onto zeros
    w[i / EACH] |= bits << (BITS * (i % EACH));
  }
};

// Aligned to 16 bytes, or to 8 where there are no more.
template <typename T>
ZPP_HD void load_whole(T const* from, Vector<T>& v) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 1) {
    uint2 const a = *reinterpret_cast<uint2 const*>(from);
    v.w[0] = a.x, v.w[1] = a.y;
  } else {
#pragma unroll
    for (int i = 0; i < v.WORDS; i += 4) {
      uint4 const a = reinterpret_cast<uint4 const*>(from)[i / 4];
      v.w[i] = a.x, v.w[i + 1] = a.y, v.w[i + 2] = a.z, v.w[i + 3] = a.w;
    }
  }
#else
  assert(reinterpret_cast<uintptr_t>(from) % (sizeof(T) == 1 ? 8 : 16) == 0);
  memcpy(&v, from, sizeof v);
#endif
}

// Written out: nvcc 13.0 takes a plain assignment of a vector apart into words.
template <typename T>
ZPP_HD void store_whole(T* to, Vector<T> const& v) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 1) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)),
                 "r"(v.w[0]), "r"(v.w[1])
                 : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < v.WORDS; i += 4) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                       __cvta_generic_to_global(reinterpret_cast<uint4*>(to) + i / 4)),
                   "r"(v.w[i]), "r"(v.w[i + 1]), "r"(v.w[i + 2]), "r"(v.w[i + 3])
                   : "memory");
    }
  }
#else
  memcpy(to, &v, sizeof v);
#endif
}

// The first `count` elements from there, zeros past them. WHOLE: all eight or none, aligned.
template <bool WHOLE, typename T>
ZPP_HD Vector<T> load8(T const* from, int count) {
  Vector<T> v = {};
  if constexpr (WHOLE) {
    if (count) load_whole(from, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) v.put(i, from[i]);
    }
  }
  return v;
}

template <bool WHOLE, typename T>
ZPP_HD void store8(T* to, int count, Vector<T> const& v) {
  if constexpr (WHOLE) {
    if (count) store_whole(to, v);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) to[i] = T(v.get(i));
    }
  }
}

// ---- noise -------------------------------------------------------------------------------

// 16 random bits for each of the eight elements from `place` on in the strip that `row_noise` in
// states.py makes: a draw serves eight places from a multiple of eight on, so two draws overlap.
ZPP_HD Vector<uint16_t> noise8(uint64_t place, uint32_t key0, uint32_t key1) {
  uint32_t const draw = uint32_t(place / 8);
  Words const a = philox(draw, 0, 0, 0, key0, key1), b = philox(draw + 1, 0, 0, 0, key0, key1);
  uint32_t w[8] = {a.w[0], a.w[1], a.w[2], a.w[3], b.w[0], b.w[1], b.w[2], b.w[3]};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = place & 4 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = place & 2 ? w[i + 1] : w[i];
  Vector<uint16_t> noise;
#pragma unroll
  for (int i = 0; i < 4; ++i) noise.w[i] = place & 1 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
  return noise;
}

// ---- moments -----------------------------------------------------------------------------

struct Moments {
  float first, second;
};

struct Fp32 {
  using Kept = uint32_t;
  static constexpr bool SCALED = false, RANDOM = false;
  ZPP_HD static Moments decoded(uint32_t first, uint32_t second, Moments) {
    return {float_of(first), float_of(second)};
  }
  ZPP_HD static uint32_t first(float x, Moments, uint32_t) { return bits_of(x); }
  ZPP_HD static uint32_t second(float x, Moments, uint32_t) { return bits_of(x); }
};

struct Bf16 {  // the upper half of the fp32 bits plus 16 random ones
  using Kept = uint16_t;
  static constexpr bool SCALED = false, RANDOM = true;
  ZPP_HD static Moments decoded(uint32_t first, uint32_t second, Moments) {
    return {float_of(first << 16), float_of(second << 16)};
  }
  ZPP_HD static uint32_t first(float x, Moments, uint32_t noise) { return (bits_of(x) + noise) >> 16; }
  ZPP_HD static uint32_t second(float x, Moments, uint32_t noise) { return (bits_of(x) + noise) >> 16; }
};

// |x| over its block's largest → steps below 1.0; `more` rounds.
ZPP_HD uint32_t steps(float x, float scale, uint32_t more, int levels) {
  float const size = float_of(bits_of(x) & 0x7FFFFFFFu);
  float const floor = scale < TINY ? TINY : scale;
  int const code = (int(bits_of(quotient(size, floor)) + more) >> CUT) - (ONE - levels);
  return uint32_t(code < 0 ? 0 : code > levels ? levels : code);
}

struct Byte {
  using Kept = uint8_t;
  static constexpr bool SCALED = true, RANDOM = true;
  ZPP_HD static Moments decoded(uint32_t first, uint32_t second, Moments scale) {
    uint32_t const size = first & 127u;
    float const x = size ? float_of((size + ONE - 127) << CUT | first >> 7 << 31) : 0.0f;
    return {mul(x, scale.first), mul(float_of((second + ONE - 255u) << CUT), scale.second)};
  }
  ZPP_HD static uint32_t first(float x, Moments scale, uint32_t) {
    return steps(x, scale.first, 1u << (CUT - 1), 127) | (x < 0.0f ? 128u : 0u);
  }
  ZPP_HD static uint32_t second(float x, Moments scale, uint32_t noise) {
    return steps(x, scale.second, noise << (CUT - 16), 255);
  }
};

// ---- the update --------------------------------------------------------------------------

struct Rates {
  float rate, root;  // with bias corrections, from the device
  float factor;      // of gradients
};

// ---- masters -----------------------------------------------------------------------------

// fp32 in two planes of 16 bits, as in zpp_lab/codecs/planes.py.
struct Halves {
  uint32_t high, low;
};

ZPP_HD Halves split(float x) {
  uint32_t const b = bits_of(x);
  if ((b & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FC0u, 0u};
  uint32_t const even = (b + 0x7FFFu + (b >> 16 & 1u)) & 0xFFFF0000u;
  int32_t const low = int32_t(b - even);
  return {even >> 16, uint32_t(low > 0x7FFF ? 0x7FFF : low) & 0xFFFFu};
}

ZPP_HD float joined(uint32_t high, uint32_t low) {
  return float_of((high << 16) + uint32_t(int32_t(int16_t(low))));
}

template <bool PLANES>
struct Master {  // how weights and gradients are kept
  using Kept = uint32_t;
};

template <>
struct Master<true> {
  using Kept = uint16_t;
};

// New moments, and the weight in `weight`.
ZPP_HD Moments updated(Moments m, float grad, AdamW const& h, Rates const& r, float& weight) {
  m.first = add(mul(m.first, h.beta1), mul(grad, h.rest1));
  m.second = add(mul(m.second, h.beta2), mul(mul(grad, grad), h.rest2));
  float const below = add(quotient(square_root(m.second), r.root), h.eps);
  weight = add(mul(weight, h.decay), -mul(quotient(m.first, below), r.rate));
  return m;
}

// A lane's eight elements: where they start in the parameter and in their row, how many there are.
struct Lane {
  int64_t at, column;
  int count;
};

ZPP_HD Lane lane_of(Part const& p, uint32_t block, int lane) {
  uint32_t const row = block / p.across, part = block - row * p.across;
  int64_t const column = int64_t(part) * MOMENT_BLOCK + 8 * lane, left = p.columns - column;
  return {int64_t(row) * p.columns + column, column, int(left < 0 ? 0 : left > 8 ? 8 : left)};
}

// New weights go to memory, new moments to `m`; returns the largest of either moment.
template <class S, bool PLANES, bool WHOLE>
ZPP_HD Moments advance(
    AdamW const& h, Part const& p, Rates const& r, uint32_t block, Lane const& l, Moments (&m)[8]) {
  using Kept = typename S::Kept;
  using Word = typename Master<PLANES>::Kept;
  auto* const weights = static_cast<Word*>(p.weight) + l.at;
  auto const grads = load8<WHOLE>(static_cast<Word const*>(p.grad) + l.at, l.count);
  auto const weight = load8<WHOLE>(weights, l.count);
  Vector<uint16_t> low = {}, lower = {};
  if constexpr (PLANES) low = load8<WHOLE>(p.low + l.at, l.count);
  Vector<Word> written = {};
  auto const first = load8<WHOLE>(static_cast<Kept const*>(p.first) + l.at, l.count);
  auto const second = load8<WHOLE>(static_cast<Kept const*>(p.second) + l.at, l.count);
  Moments scale = {}, most = {};
  if constexpr (S::SCALED) scale = {p.first_scale[block], p.second_scale[block]};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = float_of(weight.get(i));
    if constexpr (PLANES) x = joined(weight.get(i), low.get(i));
    float const grad = mul(float_of(grads.get(i) << (PLANES ? 16 : 0)), r.factor);
    m[i] = S::decoded(first.get(i), second.get(i), scale);
    m[i] = updated(m[i], grad, h, r, x);
    if constexpr (PLANES) {
      Halves const planes = split(x);
      written.put(i, planes.high), lower.put(i, planes.low);
    } else {
      written.w[i] = bits_of(x);
    }
    if (i >= l.count) m[i] = {0.0f, 0.0f};
    most.first = larger(most.first, float_of(bits_of(m[i].first) & 0x7FFFFFFFu));
    most.second = larger(most.second, m[i].second);
  }
  store8<WHOLE>(weights, l.count, written);
  if constexpr (PLANES) store8<WHOLE>(p.low + l.at, l.count, lower);
  return most;
}

// Moments go to memory as the state keeps them; `scale` is the block's largest.
template <class S, bool WHOLE>
ZPP_HD void keep(
    AdamW const& h, Part const& p, Lane const& l, Moments scale, Moments const (&m)[8]) {
  using Kept = typename S::Kept;
  Vector<uint16_t> noise = {};
  if constexpr (S::RANDOM) noise = noise8(p.offset + uint64_t(l.column), h.key0, h.key1);
  Vector<Kept> first = {}, second = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    first.put(i, S::first(m[i].first, scale, noise.get(i)));
    second.put(i, S::second(m[i].second, scale, noise.get(i)));
  }
  store8<WHOLE>(static_cast<Kept*>(p.first) + l.at, l.count, first);
  store8<WHOLE>(static_cast<Kept*>(p.second) + l.at, l.count, second);
}

}  // namespace zpp
