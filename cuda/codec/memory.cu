// encode with a memory: a tile and what is remembered of it are encoded, and what the codes lost is
// remembered, in one pass. Or a tile less what nodes keep of it, or rounded as they would keep it.
#include "codec/decode.cuh"
#include "codec/stage.cuh"

namespace zpp {

struct Remember {
  static constexpr int BLOCKS = 2;

  Stages stages;

  __device__ __forceinline__ void begin(Plan const& plan) { stages.begin(plan.stage_bytes); }

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
    return {const_cast<char*>(base), m.bytes / each, m.total, 0};
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
    add_row<8, true, false, false>(c, 0.0f, x);
    zero_from(x, at.within, at.left(len));
  }

  __device__ __forceinline__ static void store(Memory const& m, Place at, Tile const& x) {
    if (m.store != Store::eight) {
      return store_floats(floats(m, m.to), dtype(m), at, at.segment().from_len, true, x);
    }
    at.where = &codes();
    encode_block_tile<8, true, false>(m.to + at.row * m.bytes, at, x, {});
  }

  // Asks for what is remembered of a tile, a line a thread.
  __device__ __forceinline__ static void fetch(RememberPlan const& plan, Place const& at) {
    Memory const& m = memory(plan, at);
    if (at.row >= plan.rows || m.store == Store::none || !m.from) return;
    int const width = m.store == Store::fp32 ? 4 : m.store == Store::bf16 ? 2 : 1;
    char const* const from = m.from + at.row * m.bytes + at.start * width;
    int64_t const len = at.segment().from_len;
    int const bytes = at.left(min(m.total - at.row * len, len)) * width;
#if defined(__CUDA_ARCH__)
    for (int b = threadIdx.x * 128; b < bytes; b += THREADS * 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + b));
    }
#endif
  }

  __device__ __forceinline__ void segment(
      RememberPlan const& plan, Place at, Stride const& stride) {
    if (at.segment().copy) return Copy::segment(plan, at, stride);
    __syncthreads();  // the last segment's tiles are done
    if (threadIdx.x == 0) {
      codes() = at.segment();
      codes().to_codec = {0, 8, 8, 1, 0, 0, 0, 0};  // 8 bits, blocks of 256, symmetric, fp32 scales
      codes().to_planes = memory(plan, at).planes;
      codes().to_len = codes().from_len;
    }
    __syncthreads();
    Place ahead = at;
    for (int j = 0; j < STAGES; ++j, ahead = stride.after(ahead)) {
      stages.request(ahead, plan.rows, j);
    }
    int stage = 0;
#pragma unroll 1
    for (; at.row < plan.rows; at = stride.after(at), ahead = stride.after(ahead)) {
      Tile y;
      fetch(plan, stride.after(at));
      stages.take(at, stage, y);
      __syncthreads();
      stages.request(ahead, plan.rows, stage);
      tile(plan, at, y);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    __syncthreads();
  }

  // y: what is encoded, from x on.
  __device__ __forceinline__ static void tile(RememberPlan const& plan, Place const& at, Tile& y) {
    Segment const& s = at.segment();
    Memory const& m = memory(plan, at);
    Tile d;  // what that decodes to
    if (m.store == Store::rounded) {
      for_each([&](int v, int i) { y[v][i] = float(narrow_one<cutlass::bfloat16_t>(y[v][i])); });
    } else if (m.store != Store::none) {
      load(m, at, d);
      for_each([&](int v, int i) { y[v][i] = add(y[v][i], m.to ? d[v][i] : -d[v][i]); });
    }
    for_each([&](int v, int i) { d[v][i] = y[v][i]; });
    change_domain(s, at, d);
    Back back{d};
    encode_tile<true, true>(plan, at, d, &back);
    if (!m.to) return;
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
  return launch<Remember>(plan, stream, STAGES * plan.stage_bytes);
}

}  // namespace zpp
