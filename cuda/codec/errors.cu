// encode with telemetry: each tile is encoded, decoded again, and compared with what went in.
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

// A tile's values as they decode, still rotated; counts codes at either end of the range.
struct DecodeCounted {
  template <int BITS, bool SYM, bool BF16>
  __device__ __forceinline__ static void run(
      Plan const& plan, Place const& at, Tile& y, Sums& sums) {
    using G = Grid<BITS, SYM>;
    int const left = at.left(at.segment().from_len);
    Coded c;
    clear(c);
    lane_at<BITS, SYM, BF16>(plan, at).read_part(at.within, left, c);
    add_row<BITS, SYM, BF16, false>(c, y);
#pragma unroll
    for (int v = 0; v < CHUNKS; ++v) {
      float q[8];
      levels<BITS, SYM>(c.codes[v], q);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bool const end = q[i] == G::lowest || q[i] == G::levels;
        if (end && at.within + v * CHUNK + i < left) ++sums.saturated;
      }
    }
  }
};

__device__ __forceinline__ void decode_written(
    Plan const& plan, Place const& at, Tile& y, Sums& sums) {
  Segment const& s = at.segment();
  if (s.from_codec.raw) return load_floats(s.from, s.from_dtype, at, s.from_len, 0, y);
  by_kind<DecodeCounted>(s.from_codec, plan, at, y, sums);
}

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

__device__ __forceinline__ void encode_one(Plan const& plan, Place const& at) {
  Segment const& s = at.segment();
  if (s.copy) return copy_segment(s, at);
  Tile x;
  load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
  change_domain(s, at, x);
  encode_tile<true>(plan, at, x);
}

}  // namespace

struct EncodeErrors : EachTile<EncodeErrors> {
  static constexpr int BLOCKS = 2;

  __device__ __forceinline__ static Segment& back() {
    __shared__ Segment own;
    return own;
  }

  __device__ __forceinline__ static void segment(Plan const& plan, Place at, Stride const& stride) {
    __syncthreads();  // the last segment's tiles are done
    if (threadIdx.x == 0) back() = written(at.segment());
    EachTile::segment(plan, at, stride);
  }

  __device__ __forceinline__ static void tile(Plan const& plan, Place const& at) {
    Segment const& s = at.segment();
    encode_one(plan, at);
    __syncthreads();  // the tile's bytes, and the sums of the one before, are there for all
    Place place = at;
    place.where = &back();
    Sums sums;
    Tile x, y;
    decode_written(plan, place, y, sums);
    change_domain(back(), place, y);
    int const left = at.left(s.numel);
    if (left < TILE) zero_from(y, at.within, left);
    load_floats(s.from, s.from_dtype, at, s.from_len, 0, x);
    compare(x, y, sums);
    int64_t const number = s.first_tile + int64_t(at.row) * s.tiles.divisor + at.part;
    write_sums(sums, plan.errors + number * ERROR_SUMS);
  }
};

int launch_encode_errors(Plan& plan, void* stream) { return launch<EncodeErrors>(plan, stream); }

}  // namespace zpp
