// encode with a memory: a tile and what is remembered of it are encoded, and what the codes lost is
// remembered, in one pass.
#include "codec/decode.cuh"

namespace zpp {

struct Remember : EachTile<Remember> {
  static constexpr int BLOCKS = 2;

  // As the segment of a memory's codes is written.
  __device__ __forceinline__ static Segment& codes() {
    __shared__ Segment own;
    return own;
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
    at.where = &codes();
    encode_block_tile<8, true, false>(m.to + at.row * m.bytes, at, x, {});
  }

  // Asks for bytes that the next tile needs, a line a thread.
  __device__ __forceinline__ static void fetch(char const* from, int bytes) {
#if defined(__CUDA_ARCH__)
    for (int b = threadIdx.x * 128; b < bytes; b += THREADS * 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + b));
    }
#endif
  }

  __device__ __forceinline__ static void fetch(RememberPlan const& plan, Place const& at) {
    Segment const& s = at.segment();
    Memory const& m = memory(plan, at);
    if (at.row >= plan.rows) return;
    int const left = at.left(s.from_len), each = itemsize(Dtype(s.from_dtype));
    fetch(s.from.base + (at.row * s.from.row_stride + at.start) * each, left * each);
    if (m.store == Store::none || !m.from) return;
    int const width = m.store == Store::fp32 ? 4 : m.store == Store::bf16 ? 2 : 1;
    fetch(m.from + at.row * m.bytes + at.start * width, left * width);
  }

  __device__ __forceinline__ static void segment(
      RememberPlan const& plan, Place at, Stride const& stride) {
    __syncthreads();  // the last segment's tiles are done
    if (threadIdx.x == 0) {
      codes() = at.segment();
      codes().to_codec = {0, 8, 8, 1, 0, 0, 0, 0};  // 8 bits, blocks of 256, symmetric, fp32 scales
      codes().to_planes = memory(plan, at).planes;
      codes().to_len = codes().from_len;
    }
    __syncthreads();
    Place next;
#pragma unroll 1
    for (; at.row < plan.rows; at = next) {
      fetch(plan, next = stride.after(at));
      tile(plan, at);
    }
  }

  __device__ __forceinline__ static void tile(RememberPlan const& plan, Place const& at) {
    Segment const& s = at.segment();
    Memory const& m = memory(plan, at);
    if (s.copy) return copy_segment(s, at);
    Tile y, d;  // what is encoded, x + m; what that decodes to
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, y);
    if (m.store != Store::none) {
      load(m, at, d);
      for_each([&](int v, int i) { y[v][i] = add(y[v][i], d[v][i]); });
    }
    for_each([&](int v, int i) { d[v][i] = y[v][i]; });
    change_domain(s, at, d);
    encode_tile<true, true>(plan, at, d, &d);
    if (m.store == Store::none) return;
    if (at.left(s.to_len) < TILE) zero_from(d, at.within, at.left(s.to_len));
    if (s.forward) leave_domain(s.to_codec, s.numel, at, d);
    for_each([&](int v, int i) {
      y[v][i] = add(y[v][i], -d[v][i]);
      if (m.weight != 1.0f) y[v][i] = mul(y[v][i], m.weight);
    });
    if (m.average != 0.0f) {  // m again, from the cache
      load(m, at, d);
      for_each([&](int v, int i) { y[v][i] = add(mul(d[v][i], m.average), y[v][i]); });
    }
    store(m, at, y);
  }
};

int launch_encode_remembering(RememberPlan& plan, void* stream) {
  return launch<Remember>(plan, stream);
}

}  // namespace zpp
