// The arithmetic of kernels that read rows where they lie (pull.h, planes.h), walked as pull.cuh
// does: turns, a warp's share staged word by word, and the lanes' reads out of it, for test_pull.py.
#include <cstring>

#include "pull.h"

using namespace zpp;

namespace {

constexpr int CHUNK = 256, CHUNKS = 4;

struct Divide {
  int by;
  void operator()(int& quotient, int& remainder, int value) const {
    quotient = value / by, remainder = value % by;
  }
};

struct Stage {
  uint8_t bytes[STAGE];
  bool bad = false;

  // Words of 16 bytes, none past the row's end or the room that they have here.
  void fetch(int to, int room, uint8_t const* row, int64_t from, int words, int64_t nbytes) {
    bad |= from % 16 != 0 || words < 0 || 16 * words > room;
    bad |= words > 0 && (from < 0 || from + 16 * words > nbytes);
    if (!bad) memcpy(bytes + to, row + from, 16 * words);
  }
};

template <int BITS>
Packed codes_at(uint8_t const* codes, uint8_t const* crumbs) {
  Packed p = {0, 0};
  if (BITS == 8) memcpy(&p.a, codes, 4), memcpy(&p.b, codes + 4, 4);
  if (BITS == 6 || BITS == 4) memcpy(&p.a, codes, 4);
  if (BITS == 6) memcpy(&p.b, crumbs, 2);
  if (BITS == 2) memcpy(&p.a, codes, 2);
  return p;
}

float part_of(uint8_t const* at, bool bf16) {
  uint32_t bits = 0;
  bf16 ? memcpy(reinterpret_cast<char*>(&bits) + 2, at, 2) : memcpy(&bits, at, 4);
  return float_of(bits);
}

template <int BITS, bool SYM>
void read_share(Stage const& s, Codec const& c, int shift, int n, float* out) {
  int const width = BITS == 6 ? 4 : BITS, each = (c.bf16_scale ? 2 : 4) * (SYM ? 1 : 2);
  for (int lane = 0; lane < 32; ++lane) {
    for (int v = 0; v < CHUNKS; ++v) {
      int const within = lane * 8 + v * CHUNK;
      if (within >= n) continue;
      int const block = (lane * 8 >> c.log2_block) + (v * CHUNK >> c.log2_block);
      uint8_t const* scale = s.bytes + SCALES_AT + shift + block * each;
      float const a = part_of(scale, c.bf16_scale), z = SYM ? 0 : part_of(scale + each / 2, c.bf16_scale);
      float q[8];
      levels<BITS, SYM>(codes_at<BITS>(s.bytes + within * width / 8,
                                       s.bytes + CRUMBS_AT + within / 4), q);
      for (int i = 0; i < 8 && within + i < n; ++i) {
        out[within + i] = SYM ? mul(q[i], a) : add(mul(q[i], a), z);
      }
    }
  }
}

template <int BITS>
void read_any(Stage const& s, Codec const& c, int shift, int n, float* out) {
  c.symmetric ? read_share<BITS, true>(s, c, shift, n, out)
              : read_share<BITS, false>(s, c, shift, n, out);
}

}  // namespace

// Decodes a segment of `numel` elements at `offset` of `count` rows to out [count, numel]; `turns`
// takes the entry of every turn, `visits` [count, parts] how often each tile came. 0 when all is well.
extern "C" int decode_rows(uint8_t const* const* rows, int const* to, int count, int near,
                           int64_t nbytes, int64_t offset, int64_t numel, int bits, int log2_block,
                           int symmetric, int bf16, float* out, int* turns, int* visits) {
  Codec const c = {0, uint8_t(bits), uint8_t(log2_block), uint8_t(symmetric), uint8_t(bf16), 0, 0, 0};
  Planes const planes = planes_of(offset, c, numel);
  int const parts = int((numel + TILE - 1) / TILE);
  for (int turn = 0; turn < count * parts; ++turn) {
    Turn const t = turn_of(turn, count, near, Divide{count}, Divide{parts});
    if (t.entry < 0 || t.entry >= count || t.part < 0 || t.part >= parts) return 1;
    turns[turn] = t.entry, ++visits[t.entry * parts + t.part];
    for (int warp = 0; warp < TILE / WARP_TILE; ++warp) {
      int64_t const first = int64_t(t.part) * TILE + warp * WARP_TILE;
      Slice const need = slice_of(planes, c, first, numel);
      Stage s;
      memset(s.bytes, 0xA5, STAGE);
      s.fetch(0, bits == 6 ? CRUMBS_AT : SCALES_AT, rows[t.entry], need.codes, need.code_words, nbytes);
      s.fetch(CRUMBS_AT, bits == 6 ? SCALES_AT - CRUMBS_AT : 0, rows[t.entry], need.crumbs,
              need.crumb_words, nbytes);
      s.fetch(SCALES_AT, STAGE - SCALES_AT, rows[t.entry], need.scales, need.scale_words, nbytes);
      if (s.bad || need.shift != scale_shift(c, first)) return 2;
      float* into = out + int64_t(to[t.entry]) * numel + first;
      int const n = share_of(first, numel);
      if (bits == 8) read_any<8>(s, c, need.shift, n, into);
      if (bits == 6) read_any<6>(s, c, need.shift, n, into);
      if (bits == 4) read_any<4>(s, c, need.shift, n, into);
      if (bits == 2) read_any<2>(s, c, need.shift, n, into);
    }
  }
  return 0;
}
