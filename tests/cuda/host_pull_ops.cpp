// The operator pull_decode on the CPU, for test_pull.py: pull_bindings.cpp as it is, and before it a
// twin of pull.cu that walks the plan which it makes. fp32 parameters, no rotation.
#include "host_pull.cpp"
#include "plan.h"

namespace zpp {

void decode_share(Segment const& s, char const* row, int to, int64_t first) {
  float* out = reinterpret_cast<float*>(s.to.base) + to * s.to.row_stride + first;
  int64_t const room = s.to.total - to * s.to.row_stride - first;
  int const n = std::min<int64_t>(share_of(first, s.to_len), std::max<int64_t>(room, 0));
  if (s.from_codec.raw) {
    memcpy(out, row + s.from_planes.codes + 4 * first, 4 * n);
    return;
  }
  Slice const need = slice_of(s.from_planes, s.from_codec, first, s.from_len);
  Stage stage;
  auto const from = reinterpret_cast<uint8_t const*>(row);
  int64_t const far = int64_t(1) << 40;
  stage.fetch(0, SCALES_AT, from, need.codes, need.code_words, far);
  stage.fetch(CRUMBS_AT, SCALES_AT - CRUMBS_AT, from, need.crumbs, need.crumb_words, far);
  stage.fetch(SCALES_AT, STAGE - SCALES_AT, from, need.scales, need.scale_words, far);
  int const bits = s.from_codec.bits;
  if (bits == 8) read_any<8>(stage, s.from_codec, need.shift, n, out);
  if (bits == 6) read_any<6>(stage, s.from_codec, need.shift, n, out);
  if (bits == 4) read_any<4>(stage, s.from_codec, need.shift, n, out);
  if (bits == 2) read_any<2>(stage, s.from_codec, need.shift, n, out);
}

int launch_pull_decode(Pulled const& p, bool, int, void*) {
  int segment = 0;
  for (uint32_t tile = 0; tile < p.plan.tiles; ++tile) {
    while (segment + 1 < p.plan.segments && tile >= p.plan.segment[segment + 1].first_tile) ++segment;
    Segment const& s = p.plan.segment[segment];
    Turn const t = turn_of(int(tile - s.first_tile), p.rows.count.divisor, p.rows.near,
                           p.rows.count, s.tiles);
    for (int warp = 0; warp < TILE / WARP_TILE; ++warp) {
      decode_share(s, p.rows.base[t.entry], p.rows.to[t.entry],
                   int64_t(t.part) * TILE + warp * WARP_TILE);
    }
  }
  return p.plan.k == 1 ? 0 : 1;
}

int launch_pull_reduce(Pulled const&, bool, int, void*) { return 1; }
int launch_pull_reencode(Pulled const&, bool, bool, int, void*) { return 1; }

}  // namespace zpp

#include "on_host.h"
#include "pull_bindings.cpp"

