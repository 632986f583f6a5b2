// encode with telemetry: each tile is encoded, and what it decodes to compared with what went in.
//
// The plain encode kernels know nothing of this. The sums of a tile are written out in a fixed
// order (zpp_lab/codecs/errors.py defines it) and tiles are added by the caller, so there are no
// atomics and the same values give the same bits.
#include "codec/decode.cuh"

namespace zpp {
namespace {

constexpr int WARPS = THREADS / 32;

struct Sums {
  double error2 = 0, x2 = 0, y2 = 0, xy = 0, error = 0, abs_x = 0;
  int zeroed = 0, saturated = 0;
};

__device__ __forceinline__ void compare(Tile const& x, Tile const& y, Sums& sums) {
  for_each([&](int v, int i) {
    double const a = x[v][i], b = y[v][i], error = b - a;
    sums.error2 += error * error;
    sums.x2 += a * a;
    sums.y2 += b * b;
    sums.xy += a * b;
    sums.error += error;
    sums.abs_x += fabs(a);
    if (b == 0 && a != 0) ++sums.zeroed;
  });
}

// Lanes in pairs, then warps in order; one thread writes each sum.
__device__ __forceinline__ void write_sums(Sums const& sums, double* to) {
  __shared__ double parts[WARPS][ERROR_SUMS];
  double mine[ERROR_SUMS] = {  // in the order of codecs/errors.py, `count` left out
      sums.error2, sums.x2, sums.y2, sums.xy, sums.error, sums.abs_x,
      double(sums.zeroed), double(sums.saturated)};
#pragma unroll
  for (int j = 0; j < ERROR_SUMS; ++j) {
#pragma unroll
    for (int d = 1; d < 32; d *= 2) mine[j] += __shfl_xor_sync(ALL, mine[j], d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][j] = mine[j];
  }
  __syncthreads();
  if (threadIdx.x < ERROR_SUMS) {
    double total = parts[0][threadIdx.x];
    for (int w = 1; w < WARPS; ++w) total += parts[w][threadIdx.x];
    to[threadIdx.x] = total;
  }
}

}  // namespace

struct EncodeErrors : EachTile<EncodeErrors> {
  static constexpr int BLOCKS = 2;

  __device__ __forceinline__ static void tile(Plan const& plan, Place const& at) {
    Segment const& s = at.segment();
    Sums sums;
    Tile y;
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, y);
    if (s.copy) {
      copy_segment(s, at);
    } else {
      change_domain(s, at, y);
      Back back{y};
      encode_tile<true, true>(plan, at, y, &back);
      if (s.to_codec.raw) load_floats(s.to, s.to_dtype, at, s.to_len, 0, y);  // this thread's own
      sums.saturated = back.saturated;
      if (s.forward) leave_domain(s.to_codec, s.numel, at, y);
    }
    if (at.left(s.numel) < TILE) zero_from(y, at.within, at.left(s.numel));
    Tile x;  // again, from the cache
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
    compare(x, y, sums);
    int64_t const number = s.first_tile + int64_t(at.row) * s.tiles.divisor + at.part;
    write_sums(sums, plan.errors + number * ERROR_SUMS);
    __syncthreads();  // the sums of this tile have been read
  }
};

int launch_encode_errors(Plan& plan, void* stream) { return launch<EncodeErrors>(plan, stream); }

}  // namespace zpp
