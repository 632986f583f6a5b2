// encode with a memory: a tile and what is remembered of it are encoded, decoded again, and what was
// lost is remembered, in one pass.
//
// Values are loaded a second time, from the cache, rather than kept in registers meanwhile.
#include "codec/decode.cuh"

namespace zpp {

struct Remember : EachTile<Remember> {
  static constexpr int BLOCKS = 2;

  struct Segments {
    Segment back, codes;  // what was written, as it is read; the memory's codes, as they are written
  };

  __device__ __forceinline__ static Segments& own() {
    __shared__ Segments both;
    return both;
  }

  __device__ __forceinline__ static Memory const& memory(RememberPlan const& plan, Place const& at) {
    return plan.memory[at.where - plan.segment];
  }

  __device__ __forceinline__ static FloatView floats(Memory const& m, char const* base) {
    int64_t const each = m.store == Store::fp32 ? 4 : 2;
    return {const_cast<char*>(base), m.bytes / each, INT64_MAX, 0};
  }

  __device__ __forceinline__ static uint8_t dtype(Memory const& m) {
    return uint8_t(m.store == Store::fp32 ? Dtype::fp32 : Dtype::bf16);
  }

  __device__ __forceinline__ static void load(Memory const& m, Place const& at, Tile& x) {
    int64_t const len = at.segment().from_len;
    if (!m.from) return zero_tile(x);
    if (m.store != Store::eight) return load_floats(floats(m, m.from), dtype(m), at, len, 0, x);
    Coded c;
    clear(c);
    char* row = const_cast<char*>(m.from) + at.row * m.bytes;
    Lane<8, true, false> const lane(tile_slots<8>(row, m.planes, at.part), at.within, 8);
    lane.read_part(at.within, at.left(len), c);
    add_row<8, true, false, false>(c, x);
    zero_from(x, at.within, at.left(len));
  }

  __device__ __forceinline__ static void store(Memory const& m, Place at, Tile const& x) {
    if (m.store != Store::eight) {
      return store_floats(floats(m, m.to), dtype(m), at, at.segment().from_len, true, x);
    }
    at.where = &own().codes;
    encode_block_tile<8, true, false>(m.to + at.row * m.bytes, at, x, {});
  }

  // What is encoded: x + m.
  __device__ __forceinline__ static void given(Memory const& m, Place const& at, Tile& y) {
    Segment const& s = at.segment();
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, y);
    if (m.store == Store::none) return;
    Tile kept;
    load(m, at, kept);
    for_each([&](int v, int i) { y[v][i] = add(y[v][i], kept[v][i]); });
  }

  // d, what y decodes to, becomes what is remembered: average m + weight (y - d).
  __device__ __forceinline__ static void lose(Memory const& m, Place const& at, Tile& d) {
    Tile other;
    given(m, at, other);
    for_each([&](int v, int i) {
      d[v][i] = add(other[v][i], -d[v][i]);
      if (m.weight != 1.0f) d[v][i] = mul(d[v][i], m.weight);
    });
    if (m.average == 0.0f) return;
    load(m, at, other);
    for_each([&](int v, int i) { d[v][i] = add(mul(other[v][i], m.average), d[v][i]); });
  }

  __device__ __forceinline__ static void segment(
      RememberPlan const& plan, Place at, Stride const& stride) {
    __syncthreads();  // the last segment's tiles are done
    if (threadIdx.x == 0) {
      own() = {written(at.segment()), at.segment()};
      Segment& codes = own().codes;
      codes.to_codec = {0, 8, 8, 1, 0, 0, 0, 0};  // 8 bits, blocks of 256, symmetric, fp32 scales
      codes.to_planes = memory(plan, at).planes;
      codes.to_len = codes.from_len;
    }
    EachTile::segment(plan, at, stride);
  }

  __device__ __forceinline__ static void tile(RememberPlan const& plan, Place const& at) {
    Segment const& s = at.segment();
    Memory const& m = memory(plan, at);
    if (s.copy) return copy_segment(s, at);
    Tile x;
    given(m, at, x);
    change_domain(s, at, x);
    encode_tile<true>(plan, at, x);
    if (m.store == Store::none) return;
    __syncthreads();  // the tile's bytes are there for all, and so are the segment's two others
    Place place = at;
    place.where = &own().back;
    sum_tile<true>(plan, place, x);
    change_domain(own().back, place, x);
    lose(m, at, x);
    store(m, at, x);
  }
};

int launch_encode_remembering(RememberPlan& plan, void* stream) {
  return launch<Remember>(plan, stream);
}

}  // namespace zpp
