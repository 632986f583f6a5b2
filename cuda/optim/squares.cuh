// The pairwise tree of zpp_lab/codecs/numerics.py, `fold_sum`, for device and host.
//
// A row is halved again and again: with n elements left, h = ceil(n / 2), element i < h becomes
// x[i] + x[i + h], or stays x[i] where i + h is past the end. So element j of what k halvings leave
// is the root of a tree over up to 2^k elements of the row, and one thread can add them up in the
// order of the tree without ever writing the levels between. What is missing counts as +0: sums of
// squares are never -0, so that adding it changes no bit.
// The host compiles this file too (tests/cuda/test_squares.py).
#pragma once

#include "codec/numerics.cuh"
#include "optim/squares.h"

namespace zpp {

constexpr int INNER = 4;  // levels whose 2^INNER loads are under way together

ZPP_HD uint32_t left_after(uint32_t numel, int halvings) {
  return uint32_t((numel + (uint64_t(1) << halvings) - 1) >> halvings);
}

ZPP_HD int levels_to(uint32_t numel, uint32_t most) {
  int found = 0;
  while (left_after(numel, found) > most) ++found;
  return found;
}

ZPP_HD float value_of(float x) { return x; }
ZPP_HD float value_of(uint16_t bf16) { return float_of(uint32_t(bf16) << 16); }

template <class T>
struct Squares {  // of the gradients; what is not there is 0
  T const* values;
  uint32_t count;

  ZPP_HD bool has(uint32_t i) const { return i < count; }
  ZPP_HD double there(uint32_t i) const {
    double const x = double(value_of(values[i]));
    return x * x;  // exact
  }
};

struct Sums {  // what the first kernel left
  double const* values;

  ZPP_HD bool has(uint32_t) const { return true; }
  ZPP_HD double there(uint32_t i) const { return values[i]; }
};

// Element i of what LEVEL halvings leave of `numel` elements; 0 where `there` is false.
template <int LEVEL, class From>
ZPP_HD double small_tree(From const& from, uint32_t numel, uint32_t i, bool there) {
  if constexpr (LEVEL == 0) {
    return there && from.has(i) ? from.there(i) : 0.0;
  } else {
    uint32_t const other = i + left_after(numel, LEVEL);
    bool const too = there && other < left_after(numel, LEVEL - 1);
    double const left = small_tree<LEVEL - 1>(from, numel, i, there);
    return left + small_tree<LEVEL - 1>(from, numel, other, too);
  }
}

// The same of a tree that misses nothing. Without branches all its loads are under way together.
template <int LEVEL, class From>
ZPP_HD double full_tree(From const& from, uint32_t numel, uint32_t i) {
  if constexpr (LEVEL == 0) {
    return from.there(i);
  } else {
    double const left = full_tree<LEVEL - 1>(from, numel, i);
    return left + full_tree<LEVEL - 1>(from, numel, i + left_after(numel, LEVEL));
  }
}

// Whether it misses nothing, which its last element tells.
template <int LEVEL, class From>
ZPP_HD bool is_full(From const& from, uint32_t numel, uint32_t i) {
  if constexpr (LEVEL == 0) {
    return from.has(i);
  } else {
    uint32_t const other = i + left_after(numel, LEVEL);
    return other < left_after(numel, LEVEL - 1) && is_full<LEVEL - 1>(from, numel, other);
  }
}

// The same for any number of levels: small trees from left to right, and sums of neighbours as soon
// as both are known.
template <class From>
ZPP_HD double tree(From const& from, uint32_t numel, int levels, uint32_t i) {
  switch (levels) {
    case 0: return small_tree<0>(from, numel, i, true);
    case 1: return small_tree<1>(from, numel, i, true);
    case 2: return small_tree<2>(from, numel, i, true);
    case 3: return small_tree<3>(from, numel, i, true);
    default: break;
  }
  static_assert(INNER == 4, "fewer levels have a case above");
  constexpr int MOST = 32 - INNER;
  double known[MOST], sum = 0.0;
  uint32_t const trees = 1u << (levels - INNER);
#pragma unroll 1
  for (uint32_t t = 0; t < trees; ++t) {
    uint32_t at = i;
    bool there = true;
#pragma unroll 1
    for (int level = levels; level > INNER; --level) {  // t's bits say left or right, from the root on
      if (!(t >> (level - 1 - INNER) & 1)) continue;
      at += left_after(numel, level);
      there = there && at < left_after(numel, level - 1);
    }
    sum = there && is_full<INNER>(from, numel, at) ? full_tree<INNER>(from, numel, at)
                                                   : small_tree<INNER>(from, numel, at, there);
    int done = 0;
    for (; t >> done & 1; ++done) sum = known[done] + sum;
    known[done] = sum;
  }
  return sum;
}

// Element i of the `left` that the first kernel leaves of a row.
template <class T>
ZPP_HD double square_tree(SquaredRow const& row, uint32_t i) {
  Squares<T> const from = {static_cast<T const*>(row.values), row.count};
  return tree(from, row.numel, levels_to(row.numel, TOP), i);
}

// Element i of the FOLDERS or fewer that are left of these.
ZPP_HD double top_tree(SquaredRow const& row, double const* tops, uint32_t i) {
  return tree(Sums{tops + row.top}, row.left, levels_to(row.left, FOLDERS), i);
}

}  // namespace zpp
