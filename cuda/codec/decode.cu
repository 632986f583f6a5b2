// decode: payload rows → whole parameters. finish_sums: rotated sums → plain sums.
#include "codec/decode.cuh"

namespace zpp {

// Decodes all of a block's tiles in a segment, each read while the one before is stored. ONTO: by the
// plan's `onto`.
template <bool ROTATED, bool ONTO>
struct DecodeCoded {
  template <int BITS, int SYM, bool BF16>
  __device__ __forceinline__ static void run(Plan const& plan, Place at, Stride const& stride) {
    Segment const& s = at.segment();
    Coded now;
    clear(now);
    float const book = book_of<BITS, SYM>(s.from_codec.log2_block);
    auto const read = [&](Place const& place) {
      auto const lane = lane_at<BITS, SYM, BF16>(plan, place);
      int const left = place.left(s.from_len);
      left == TILE ? lane.read(now) : lane.read_part(place.within, left, now);
    };
    read(at);
#pragma unroll 1
    while (at.row < plan.rows) {
      Tile x;
      add_row<BITS, SYM, BF16, false>(now, book, x);
      Place const next = stride.after(at);
      if (next.row < plan.rows) read(next);
      if constexpr (ROTATED) change_domain(s, at, x);
      if (ONTO && plan.onto) {
        Tile m;
        load_floats(s.to, s.to_dtype, at, s.to_len, 0, m);
        for_each([&](int v, int i) { x[v][i] = add(m[v][i], x[v][i]); });
      }
      store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
      at = next;
    }
  }
};

// Raw floats that become others.
struct Convert : EachTile<Convert> {
  __device__ __forceinline__ static void tile(Plan const&, Place const& at) {
    Segment const& s = at.segment();
    Tile x;
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
  }
};

// ONTO: by the plan's `ok` and `onto` too.
template <bool ROTATED, bool ONTO = false>
struct Decode {
  static constexpr int BLOCKS = ONTO ? 2 : 4;

  __device__ __forceinline__ void begin(Plan const&) {}

  __device__ __forceinline__ static void segment(
      Plan const& plan, Place const& at, Stride const& stride) {
    Segment const& s = at.segment();
    if (ONTO && plan.ok && !*plan.ok) return;
    if (s.copy) return Copy::segment(plan, at, stride);
    if (s.from_codec.raw) return Convert::segment(plan, at, stride);
    by_kind<DecodeCoded<ROTATED, ONTO>>(s.from_codec, plan, at, stride);
  }
};

struct FinishSums : EachTile<FinishSums> {
  static constexpr int BLOCKS = 4;

  __device__ __forceinline__ static void tile(Plan const&, Place const& at) {
    Segment const& s = at.segment();
    Tile x;
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
    change_domain(s, at, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
  }
};

int launch_decode(Plan& plan, bool rotated, void* stream) {
  if (plan.ok || plan.onto) return launch<Decode<true, true>>(plan, stream);
  return rotated ? launch<Decode<true>>(plan, stream) : launch<Decode<false>>(plan, stream);
}

int launch_finish_sums(Plan& plan, void* stream) { return launch<FinishSums>(plan, stream); }

}  // namespace zpp
