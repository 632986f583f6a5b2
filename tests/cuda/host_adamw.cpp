// The arithmetic of adamw.cu compiled for the host, block by block, for test_adamw.py.
#include <algorithm>
#include <cmath>
#include <vector>

#include "adamw.cuh"

using namespace zpp;

extern "C" void adamw8(long rows, long columns, float* weight, float const* grad, uint8_t* first,
                       float* first_scale, uint8_t* second, float* second_scale,
                       int32_t const* noise, float const* numbers) {
  Hyper h;
  memcpy(&h, numbers, sizeof h);
  long const across = (columns + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
  for (long b = 0; b < rows * across; ++b) {
    long const row = b / across, begin = (b - row * across) * MOMENT_BLOCK;
    long const end = std::min(begin + MOMENT_BLOCK, columns);
    std::vector<Moments> m;
    float most[2] = {0.0f, 0.0f};
    for (long c = begin; c < end; ++c) {
      long const at = row * columns + c;
      Moments const old = decoded(first[at], second[at], first_scale[b], second_scale[b]);
      m.push_back(updated(old, grad[at], h, weight[at]));
      most[0] = upper(most[0], std::fabs(m.back().first)), most[1] = upper(most[1], m.back().second);
    }
    for (long c = begin; c < end; ++c) {
      first[row * columns + c] = first_code(m[c - begin].first, most[0]);
      second[row * columns + c] = second_code(m[c - begin].second, most[1], noise[c]);
    }
    first_scale[b] = most[0], second_scale[b] = most[1];
  }
}
