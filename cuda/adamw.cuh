// AdamW on moments of 8 bits, element by element, for device and host.
//
// The reference is zpp_lab/optimizers: every operation here has its twin there, in the same order,
// each rounded on its own. The host compiles this file too (tests/cuda/test_adamw.py).
#pragma once

#include "numerics.cuh"

namespace zpp {

constexpr int MOMENT_BLOCK = 256;  // BLOCK in states.py
constexpr int CUT = 20;            // mantissa bits that a code does not keep
constexpr int ONE = 127 << 3;      // 1.0 in eight exponent and three mantissa bits

#if defined(__CUDA_ARCH__)
ZPP_HD float quotient(float a, float b) { return __fdiv_rn(a, b); }
ZPP_HD float square_root(float a) { return __fsqrt_rn(a); }
#else
ZPP_HD float quotient(float a, float b) { volatile float r = a / b; return r; }
ZPP_HD float square_root(float a) { volatile float r = std::sqrt(a); return r; }
#endif

struct Hyper {
  float beta1, rest1, beta2, rest2, eps, decay;  // rest = 1 - beta, decay = 1 - lr * weight decay
  float rate, root;                              // with bias corrections, from the device
};

struct Moments {
  float first, second;
};

ZPP_HD Moments decoded(uint8_t first, uint8_t second, float first_scale, float second_scale) {
  uint32_t const size = first & 127u;
  uint32_t const bits = ((size + ONE - 127) << CUT) | (uint32_t(first >> 7) << 31);
  float const x = size ? float_of(bits) : 0.0f;
  return {mul(x, first_scale), mul(float_of((second + ONE - 255u) << CUT), second_scale)};
}

// New moments, and the weight in `weight`.
ZPP_HD Moments updated(Moments m, float grad, Hyper const& h, float& weight) {
  m.first = add(mul(m.first, h.beta1), mul(grad, h.rest1));
  m.second = add(mul(m.second, h.beta2), mul(mul(grad, grad), h.rest2));
  float const below = add(quotient(square_root(m.second), h.root), h.eps);
  weight = add(mul(weight, h.decay), -mul(quotient(m.first, below), h.rate));
  return m;
}

// |x| over its block's largest → steps below 1.0; `more` rounds.
ZPP_HD uint32_t steps(float x, float scale, uint32_t more, int levels) {
  float const size = float_of(bits_of(x) & 0x7FFFFFFFu);
  float const floor = scale < TINY ? TINY : scale;
  int const code = (int(bits_of(quotient(size, floor)) + more) >> CUT) - (ONE - levels);
  return uint32_t(code < 0 ? 0 : code > levels ? levels : code);
}

ZPP_HD uint8_t first_code(float x, float scale) {
  return uint8_t(steps(x, scale, 1u << (CUT - 1), 127) | (x < 0.0f ? 128u : 0u));
}

ZPP_HD uint8_t second_code(float x, float scale, int32_t noise) {
  return uint8_t(steps(x, scale, uint32_t(noise) << (CUT - 16), 255));
}

}  // namespace zpp
