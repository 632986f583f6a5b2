// One thread block's share of a segment in registers: load it, store it, rotate it.
//
// A tile is 8192 neighbouring elements of one row. Each of its 8 warps holds 1024 of them as 4
// chunks of 256; in a chunk lane l holds elements 8 l ... 8 l + 7. Eight neighbours are what one
// noise counter serves, 4-bit codes in one word, and bf16 values in one 16-byte access.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cutlass/array.h"
#include "cutlass/functional.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass/numeric_types.h"

#include "codec/numerics.cuh"
#include "layout/walk.cuh"

namespace zpp {

constexpr unsigned ALL = 0xFFFFFFFFu;

using Tile = float[CHUNKS][8];

// f(v, i) for all of a tile's elements.
template <class F>
__device__ __forceinline__ void for_each(F const& f) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
#pragma unroll
    for (int i = 0; i < 8; ++i) f(v, i);
  }
}

// f(null pointer of the floats' type)
template <class F>
__device__ __forceinline__ void by_dtype(uint8_t dtype, F const& f) {
  if (dtype == uint8_t(Dtype::bf16)) return f(static_cast<cutlass::bfloat16_t*>(nullptr));
  if (dtype == uint8_t(Dtype::fp32)) return f(static_cast<float*>(nullptr));
  f(static_cast<cutlass::half_t*>(nullptr));
}

// ---- floats ------------------------------------------------------------------------------

__device__ __forceinline__ bool aligned16(void const* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

template <typename T>
using Eight = cutlass::AlignedArray<T, 8, 16>;

template <typename T>
__device__ __forceinline__ void widen(Eight<T> const& from, float (&x)[8]) {
  cutlass::NumericArrayConverter<float, T, 8> convert;
  auto const wide = convert(from);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = wide[i];
}

template <typename T>
__device__ __forceinline__ Eight<T> narrow(float const (&x)[8]) {
  cutlass::Array<float, 8> wide;
#pragma unroll
  for (int i = 0; i < 8; ++i) wide[i] = x[i];
  cutlass::NumericArrayConverter<T, float, 8> convert;
  Eight<T> to;
  static_cast<cutlass::Array<T, 8>&>(to) = convert(wide);
  return to;
}

template <>
__device__ __forceinline__ void widen(Eight<cutlass::bfloat16_t> const& from, float (&x)[8]) {
  uint4 const w = reinterpret_cast<uint4 const&>(from);
  uint32_t const words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = float_of(words[i] << 16);
    x[2 * i + 1] = float_of(words[i] & 0xFFFF0000u);
  }
}

// A whole tile from 16-byte aligned memory; all loads are issued before the first use.
template <typename T>
__device__ __forceinline__ void load_whole(T const* p, Tile& x) {
  Eight<T> raw[CHUNKS];
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) raw[v] = *reinterpret_cast<Eight<T> const*>(p + v * CHUNK);
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) widen(raw[v], x[v]);
}

template <>
__device__ __forceinline__ void load_whole(float const* p, Tile& x) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    float4 const a = *reinterpret_cast<float4 const*>(p + v * CHUNK);
    float4 const b = *reinterpret_cast<float4 const*>(p + v * CHUNK + 4);
    x[v][0] = a.x, x[v][1] = a.y, x[v][2] = a.z, x[v][3] = a.w;
    x[v][4] = b.x, x[v][5] = b.y, x[v][6] = b.z, x[v][7] = b.w;
  }
}

// Any alignment, zeros from element `left` of the tile on.
template <typename T>
__device__ __forceinline__ void load_part(T const* tile, int within, int left, Tile& x) {
  for_each([&](int v, int i) {
    int const at = within + v * CHUNK + i;
    x[v][i] = at < left ? float(tile[at]) : 0.0f;
  });
}

template <typename T>
__device__ __forceinline__ void load_as(
    T*, FloatView const& view, Place const& at, int64_t len, int k, Tile& x) {
  int64_t const begin = at.row * view.row_stride;
  T const* tile = reinterpret_cast<T const*>(view.base) + begin + k * view.k_stride + at.start;
  int const left = at.left(min(view.total - begin, len));
  if (left == TILE && aligned16(tile)) return load_whole(tile + at.within, x);
  load_part(tile, at.within, left, x);
}

// Elements of a row up to `len`, zeros past it and past the view's end.
__device__ __forceinline__ void load_floats(
    FloatView const& view, uint8_t dtype, Place const& at, int64_t len, int k, Tile& x) {
  by_dtype(dtype, [&](auto* t) { load_as(t, view, at, len, k, x); });
}

template <typename T>
__device__ __forceinline__ T narrow_one(float x) {
  return T(x);
}
template <>
__device__ __forceinline__ cutlass::bfloat16_t narrow_one(float x) {
  // NaN becomes the one that torch writes on the host, so that payloads are equal everywhere
  uint16_t const b = x != x ? 0x7FC0 : __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return cutlass::bfloat16_t::bitcast(b);
}
template <>
__device__ __forceinline__ cutlass::half_t narrow_one(float x) {
  uint16_t const nan = 0x7E00 | (bits_of(x) >> 16 & 0x8000);
  return cutlass::half_t::bitcast(x != x ? nan : __half_as_ushort(__float2half_rn(x)));
}

// `exact`: by narrow_one, which costs more.
template <typename T>
__device__ __forceinline__ void store_whole(T* p, Tile const& x, bool exact) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    Eight<T> to;
    if (exact) {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = narrow_one<T>(x[v][i]);
    } else {
      to = narrow<T>(x[v]);
    }
    *reinterpret_cast<Eight<T>*>(p + v * CHUNK) = to;
  }
}

template <>
__device__ __forceinline__ void store_whole(float* p, Tile const& x, bool) {
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) {
    float4* to = reinterpret_cast<float4*>(p + v * CHUNK);
    to[0] = make_float4(x[v][0], x[v][1], x[v][2], x[v][3]);
    to[1] = make_float4(x[v][4], x[v][5], x[v][6], x[v][7]);
  }
}

template <typename T>
__device__ __forceinline__ void store_as(
    T*, FloatView const& view, Place const& at, int64_t len, bool exact_nan, Tile const& x) {
  int64_t const begin = at.row * view.row_stride;
  T* tile = reinterpret_cast<T*>(view.base) + begin + at.start;
  int const left = at.left(min(view.total - begin, len));
  if (left == TILE && aligned16(tile)) return store_whole(tile + at.within, x, exact_nan);
  for_each([&](int v, int i) {
    int const to = at.within + v * CHUNK + i;
    if (to < left) tile[to] = narrow_one<T>(x[v][i]);
  });
}

// Elements up to `len`, rounded once to the view's dtype; the rest is left alone.
__device__ __forceinline__ void store_floats(
    FloatView const& view, uint8_t dtype, Place const& at, int64_t len, bool exact_nan,
    Tile const& x) {
  by_dtype(dtype, [&](auto* t) { store_as(t, view, at, len, exact_nan, x); });
}

// ---- bytes of raw segments -----------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void copy_as(Segment const& s, Place const& at) {
  int64_t const begin = at.row * s.from.row_stride, end = at.row * s.to.row_stride;
  T const* from = reinterpret_cast<T const*>(s.from.base) + begin;
  T* to = reinterpret_cast<T*>(s.to.base) + end;
  int64_t const have = min(s.from.total - begin, s.from_len), want = min(s.to.total - end, s.to_len);
  if (at.start + TILE <= min(have, want) && aligned16(from) && aligned16(to)) {
    constexpr int each = 16 / sizeof(T), rounds = TILE / each / THREADS;
    uint4 raw[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      raw[i] = reinterpret_cast<uint4 const*>(from + at.start)[threadIdx.x + i * THREADS];
    }
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      reinterpret_cast<uint4*>(to + at.start)[threadIdx.x + i * THREADS] = raw[i];
    }
    return;
  }
  for (int i = threadIdx.x; i < TILE; i += THREADS) {
    int64_t const e = at.start + i;
    if (e < want) to[e] = e < have ? from[e] : T(0);
  }
}

// Same floats on both sides: bytes are moved, so that every NaN keeps its own.
__device__ __forceinline__ void copy_segment(Segment const& s, Place const& at) {
  s.from_dtype == uint8_t(Dtype::fp32) ? copy_as<uint32_t>(s, at) : copy_as<uint16_t>(s, at);
}

struct Copy : EachTile<Copy> {
  __device__ __forceinline__ static void tile(Plan const&, Place const& at) {
    copy_segment(at.segment(), at);
  }
};

// ---- rotation ----------------------------------------------------------------------------

// x -> rotated x in groups of 2^log2_group lanes-and-registers, all inside a chunk.
__device__ __forceinline__ void transform(Tile& x, int log2_group) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int v = 0; v < CHUNKS; ++v) butterflies(x[v]);
#pragma unroll 1
  for (int d = 1; d < (1 << log2_group) / 8; d *= 2) {
    float const sign = lane & d ? -1.0f : 1.0f;  // the upper lane keeps a - b
    for_each([&](int v, int i) {
      x[v][i] = fma_exact(x[v][i], sign, __shfl_xor_sync(ALL, x[v][i], d));
    });
  }
  // fp32(1 / sqrt(2^n)): a power of two, times fp32(sqrt(1/2)) for odd n
  float norm = float_of(uint32_t(127 - log2_group / 2) << 23);
  if (log2_group & 1) norm *= 0.70710678118654752f;
  for_each([&](int v, int i) { x[v][i] = mul(x[v][i], norm); });
}

__device__ __forceinline__ void apply_signs(Tile& x, int log2_group) {
  int const octet = (threadIdx.x % 32) & ((1 << log2_group) / 8 - 1);
  uint32_t word = sign_word(0);
#pragma unroll
  for (int i = 1; i < 8; ++i) word = octet >> 2 == i ? sign_word(i) : word;
  word >>= 8 * (octet & 3);
  for_each([&](int v, int i) { x[v][i] = float_of(bits_of(x[v][i]) ^ (word >> i & 1u) << 31); });
}

__device__ __forceinline__ void zero_from(Tile& x, int within, int left) {
  for_each([&](int v, int i) { x[v][i] = within + v * CHUNK + i < left ? x[v][i] : 0.0f; });
}

// Out of the domain of a codec that rotates.
__device__ __forceinline__ void leave_domain(
    Codec const& codec, int64_t numel, Place const& at, Tile& x) {
  transform(x, codec.log2_group);
  if (codec.signs) apply_signs(x, codec.log2_group);
  if (at.left(numel) < TILE) zero_from(x, at.within, at.left(numel));
}

// Out of the incoming codec's domain and into the outgoing one's.
__device__ __forceinline__ void change_domain(Segment const& s, Place const& at, Tile& x) {
  if (s.inverse) leave_domain(s.from_codec, s.numel, at, x);
  if (s.forward) {
    if (s.to_codec.signs) apply_signs(x, s.to_codec.log2_group);
    transform(x, s.to_codec.log2_group);
  }
}

}  // namespace zpp
