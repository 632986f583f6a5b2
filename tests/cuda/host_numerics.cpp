// The kernels' arithmetic compiled for the host, one row at a time, for test_numerics.py.
#include <cmath>
#include <vector>

#include "codec/numerics.cuh"
#include "layout/planes.h"

using namespace zpp;

namespace {

template <int BITS>
void store(Packed p, long first, unsigned char* codes, unsigned char* high) {
  if (BITS == 8) memcpy(codes + first, &p.a, 4), memcpy(codes + first + 4, &p.b, 4);
  if (BITS == 6 || BITS == 4) memcpy(codes + first / 2, &p.a, 4);
  if (BITS == 6) memcpy(high + first / 4, &p.b, 2);
  if (BITS == 3) memcpy(high + first / 8, &p.b, 1);
  if (BITS == 3 || BITS == 2) memcpy(codes + first / 4, &p.a, 2);
}

template <int BITS>
Packed fetch(long first, unsigned char const* codes, unsigned char const* high) {
  Packed p = {0, 0};
  if (BITS == 8) memcpy(&p.a, codes + first, 4), memcpy(&p.b, codes + first + 4, 4);
  if (BITS == 6 || BITS == 4) memcpy(&p.a, codes + first / 2, 4);
  if (BITS == 6) memcpy(&p.b, high + first / 4, 2);
  if (BITS == 3) memcpy(&p.b, high + first / 8, 1);
  if (BITS == 3 || BITS == 2) memcpy(&p.a, codes + first / 4, 2);
  return p;
}

long plane(long n, int width) { return ((n * width + 7) / 8 + 15) / 16 * 16; }

struct Row {
  long n, block;
  bool bf16, stochastic;
  float reach;
  uint32_t row, rank, parameter, key0, key1;
  unsigned char *codes, *high, *scales;
};

template <int BITS, bool SYM>
void encode(float const* x, Row const& r) {
  for (long begin = 0, b = 0; begin < r.n; begin += r.block, ++b) {
    long const end = std::min(begin + r.block, r.n);
    float least = INFINITY, most = SYM ? 0.0f : -INFINITY;
    bool nan = false;
    for (long i = begin; i < end; ++i) {
      nan |= x[i] != x[i];
      least = lower(least, x[i]), most = upper(most, SYM ? std::fabs(x[i]) : x[i]);
    }
    if (nan) least = most = NAN;
    Scale const s = make_scale(least, most, Grid<BITS, SYM>::levels, SYM, r.bf16, r.reach);
    float const pair[2] = {s.scale, s.zero};
    for (int i = 0; i < (SYM ? 1 : 2); ++i) {
      long const at = b * (SYM ? 1 : 2) + i;
      uint32_t const bits = bits_of(pair[i]);
      uint16_t const half = uint16_t(bits >> 16);
      r.bf16 ? memcpy(r.scales + 2 * at, &half, 2) : memcpy(r.scales + 4 * at, &bits, 4);
    }
    for (long first = begin; first < end; first += 8) {
      Words const noise = philox(uint32_t(first / 8), r.row, r.rank, r.parameter, r.key0, r.key1);
      uint32_t bits[8];
      for (int i = 0; i < 8; ++i) {
        float const v = first + i < end ? x[first + i] : 0.0f;
        if (r.stochastic && (BITS > 4 || r.bf16)) {
          bits[i] = code_stochastic<BITS, SYM, true>(v, s.inverse, s.zero, uniform(noise, i));
        } else if (r.stochastic) {
          bits[i] = code_stochastic<BITS, SYM, false>(v, s.inverse, s.zero, uniform(noise, i));
        } else if (r.bf16) {
          bits[i] = code_nearest<BITS, SYM, true>(v, s.inverse, s.zero);
        } else {
          bits[i] = code_nearest<BITS, SYM, false>(v, s.inverse, s.zero);
        }
      }
      Packed p = keep<BITS>(pack<BITS>(bits), int(end - first));
      if (s.inverse != s.inverse) p = {0, 0};
      store<BITS>(p, first, r.codes, r.high);
    }
  }
}

template <int BITS, bool SYM>
void decode(Row const& r, float* x) {
  for (long first = 0; first < r.n; first += 8) {
    long const b = first / r.block;
    float pair[2] = {0, 0};
    for (int i = 0; i < (SYM ? 1 : 2); ++i) {
      long const at = b * (SYM ? 1 : 2) + i;
      uint32_t bits = 0;
      if (r.bf16) memcpy(reinterpret_cast<char*>(&bits) + 2, r.scales + 2 * at, 2);
      if (!r.bf16) memcpy(&bits, r.scales + 4 * at, 4);
      pair[i] = float_of(bits);
    }
    float q[8];
    levels<BITS, SYM>(fetch<BITS>(first, r.codes, r.high), q);
    for (int i = 0; i < 8 && first + i < r.n; ++i) x[first + i] = dequantize<SYM>(q[i], pair[0], pair[1]);
  }
}

template <int BITS, bool SYM>
void run(Row const& r, float* x, bool encoding) {
  encoding ? encode<BITS, SYM>(x, r) : decode<BITS, SYM>(r, x);
}

}  // namespace

// x float32 [n], already rotated in groups of `group` (1: not), with room for 8 more, out [nbytes] zeroed; encodes, or decodes out into x.
extern "C" void run_row(float* x, long n, int bits, int symmetric, int stochastic, long block,
                        int bf16, int group, uint32_t const* noise, unsigned char* out, int encoding) {
  int const upper = high_bits(bits);
  long const first = plane(n, bits - upper), second = plane(n, upper);
  std::vector<unsigned char> codes(first + 16), high(second + 16);
  if (!encoding) memcpy(codes.data(), out, first), memcpy(high.data(), out + first, second);
  Row const r = {n, block, bf16 != 0, stochastic != 0, float(group), noise[0], noise[1], noise[2], noise[3],
                 noise[4], codes.data(), high.data(), out + first + second};
  switch (bits * 2 + symmetric) {
    case 16: run<8, false>(r, x, encoding); break;
    case 17: run<8, true>(r, x, encoding); break;
    case 12: run<6, false>(r, x, encoding); break;
    case 13: run<6, true>(r, x, encoding); break;
    case 8: run<4, false>(r, x, encoding); break;
    case 9: run<4, true>(r, x, encoding); break;
    case 6: run<3, false>(r, x, encoding); break;
    case 7: run<3, true>(r, x, encoding); break;
    case 4: run<2, false>(r, x, encoding); break;
    default: run<2, true>(r, x, encoding);
  }
  if (encoding) memcpy(out, codes.data(), first), memcpy(out + first, high.data(), second);
}
