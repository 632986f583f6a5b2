// Which bytes of a payload row a warp needs, and in which order tiles are taken from several rows:
// the arithmetic of pull.cuh, for device and host (tests/cuda checks it).
#pragma once

#include "numerics.cuh"
#include "planes.h"

namespace zpp {

// What a warp keeps of its share: codes, the second plane of 6 bits (whose first takes half of what
// 8 bits take), then scales; bytes.
constexpr int STAGE = 1536, CRUMBS_AT = 512, SCALES_AT = 1024;

// A warp's share of a tile: where its parts start in the payload row, at multiples of 16 bytes, and
// how many words of 16 bytes they take. A plane is filled up to such a word, so none lies past it.
struct Slice {
  int64_t codes, crumbs, scales;
  int code_words, crumb_words, scale_words;
  int shift;  // bytes of the first word of scales that belong to earlier blocks
};

// Elements of the share that starts at `first` which a row of `len` has: 0 ... WARP_TILE.
ZPP_HD int share_of(int64_t first, int64_t len) {
  int64_t const left = len - first;
  return left <= 0 ? 0 : left < WARP_TILE ? int(left) : WARP_TILE;
}

// Scales lie side by side, so those of large blocks start inside a word.
ZPP_HD int scale_shift(Codec const& c, int64_t first) {
  int const each = (c.bf16_scale ? 2 : 4) * (c.symmetric ? 1 : 2);
  return int((first >> c.log2_block) * each & 15);
}

ZPP_HD Slice slice_of(Planes const& p, Codec const& c, int64_t first, int64_t len) {
  int const n = share_of(first, len), width = c.bits == 6 ? 4 : c.bits;
  int const each = (c.bf16_scale ? 2 : 4) * (c.symmetric ? 1 : 2);
  int const shift = scale_shift(c, first);
  int const blocks = (n + (1 << c.log2_block) - 1) >> c.log2_block;
  Slice s;
  s.codes = p.codes + first * width / 8, s.code_words = (n * width + 127) / 128;
  s.crumbs = p.crumbs + first / 4, s.crumb_words = c.bits == 6 ? (n * 2 + 127) / 128 : 0;
  s.scales = p.scales + (first >> c.log2_block) * each - shift;
  s.scale_words = n ? (shift + blocks * each + 15) / 16 : 0;
  s.shift = shift;
  return s;
}

struct Turn {
  int entry, part;  // of the table of rows, and the tile of that row
};

// The tile that comes `turn`th of `count` rows with `parts` tiles each. The first `near` rows lie in
// this GPU's memory: their tiles are spread evenly among the others', so that the link is busy all
// the time. The others come one row after another: the table starts with the next rank's row, so at
// any time every rank reads from a different one.
// Divide: d(quotient, remainder, value), by `count` and by `parts`.
template <typename Divide>
ZPP_HD Turn turn_of(int turn, int count, int near, Divide const& by_count, Divide const& by_parts) {
  int group, place, entry, part;
  by_count(group, place, turn);
  int const far = count - near;
  bool const there = place < far;
  int const number = there ? group * far + place : group * near + place - far;
  by_parts(entry, part, number);
  return {there ? near + entry : entry, part};
}

}  // namespace zpp
