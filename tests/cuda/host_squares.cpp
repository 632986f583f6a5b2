// The operator square_sums on the CPU, for test_squares.py: bindings/squares.cpp as it is,
// registered under another name for tensors that lie here, and before it a twin of squares.cu that
// runs the same code of squares.cuh element by element.
#include "optim/squares.cuh"

namespace zpp {

void square_sum(SquareSums const& plan, int r) {
  SquaredRow const& row = plan.row[r];
  for (uint32_t i = 0; i < row.left; ++i) {
    plan.tops[row.top + i] =
        plan.half ? square_tree<uint16_t>(row, i) : square_tree<float>(row, i);
  }
  double sums[FOLDERS];
  uint32_t left = left_after(row.left, levels_to(row.left, FOLDERS));
  for (uint32_t i = 0; i < left; ++i) sums[i] = top_tree(row, plan.tops, i);
  while (left > 1) {
    uint32_t const half = left_after(left, 1);
    for (uint32_t i = 0; i < left - half; ++i) sums[i] = sums[i] + sums[i + half];
    left = half;
  }
  plan.sums[r] = left ? sums[0] : 0.0;
}

int launch_square_sums(SquareSums const& plan, void*) {
  for (int r = 0; r < plan.rows; ++r) square_sum(plan, r);
  return 0;
}

int launch_add_in_order(double const* sums, int64_t count, int64_t rows, double* total, void*) {
  for (int64_t r = 0; r < rows; ++r) {
    total[r] = 0.0;
    for (int64_t i = 0; i < count; ++i) total[r] = total[r] + sums[i * rows + r];
  }
  return 0;
}

}  // namespace zpp

#include "on_host.h"
#include "bindings/squares.cpp"
