// The operators of squares: their schemas, every check, and the plans that the kernels run. Nothing
// here reads device memory, and nothing is launched before all checks have passed.
#include <algorithm>
#include <vector>

#include "bindings/checked.h"
#include "optim/squares.h"

namespace zpp {
namespace {

constexpr int64_t MOST = int64_t(1) << 31;  // elements of a row

// Row r of a gradient: elements [r numel, (r + 1) numel), zeros past its end.
SquaredRow row_of(char const* values, int64_t width, int64_t total, int64_t numel, int64_t r) {
  int64_t const first = std::min(r * numel, total);
  SquaredRow row = {};
  row.values = values + first * width;
  row.count = uint32_t(std::min(numel, total - first));
  row.numel = uint32_t(numel);
  row.left = left_of(row.numel);
  return row;
}

void add_row(std::vector<SquareSums>& plans, SquaredRow row, bool half, double* sum) {
  if (plans.empty() || plans.back().rows == MAX_ROWS) {
    plans.push_back({});
    plans.back().sums = sum, plans.back().half = half;
  }
  SquareSums& last = plans.back();
  if (last.rows) row.top = last.row[last.rows - 1].top + last.row[last.rows - 1].left;
  last.tiles += (row.left + FOLDERS - 1) / FOLDERS;
  last.row[last.rows++] = row;
}

// All launches use the same `tops`, one after the other.
void square_sums(std::vector<Tensor> grads, std::vector<int64_t> numels, int64_t rows, Tensor tops,
                 Tensor sums) {
  STD_TORCH_CHECK(!grads.empty() && rows > 0, "grads: must not be empty, nor have 0 rows");
  STD_TORCH_CHECK(numels.size() == grads.size(), "numels: need one for each of ", grads.size());
  int32_t const device = grads[0].get_device_index();
  int64_t const count = int64_t(grads.size());
  auto* const each = static_cast<double*>(
      checked(sums, ScalarType::Double, count * rows, device, "sums"));
  bool const half = grads[0].scalar_type() == ScalarType::BFloat16;
  std::vector<SquareSums> plans;
  for (int64_t i = 0; i < count; ++i) {
    Tensor const& grad = grads[size_t(i)];
    int64_t const numel = numels[size_t(i)];
    STD_TORCH_CHECK(0 <= numel && numel < MOST, "numels: must be from 0 to 2^31 - 1");
    STD_TORCH_CHECK(grad.numel() <= rows * numel, "grads: one has ", grad.numel(),
                    " elements, more than ", rows, " rows of ", numel);
    ScalarType const type = half ? ScalarType::BFloat16 : ScalarType::Float;
    auto const* const values = static_cast<char const*>(checked(grad, type, 0, device, "grads"));
    for (int64_t r = 0; r < rows; ++r) {
      add_row(plans, row_of(values, half ? 2 : 4, grad.numel(), numel, r), half,
              each + i * rows + r);
    }
  }
  int64_t least = 0;
  for (SquareSums const& plan : plans) {
    SquaredRow const& last = plan.row[plan.rows - 1];
    least = std::max(least, int64_t(last.top) + last.left);
  }
  auto* const room = static_cast<double*>(checked(tops, ScalarType::Double, least, device, "tops"));
  DeviceGuard const guard(device);
  void* const stream = stream_of(device);
  for (SquareSums& plan : plans) {
    plan.tops = room;
    check_launch(launch_square_sums(plan, stream));
  }
}

// sums [count, rows] → total [rows]
void add_in_order(Tensor sums, Tensor total) {
  int32_t const device = sums.get_device_index();
  int64_t const rows = total.numel(), count = rows ? sums.numel() / rows : 0;
  STD_TORCH_CHECK(sums.numel() == count * rows, "sums: need a multiple of ", rows, " elements");
  auto const* const each =
      static_cast<double const*>(checked(sums, ScalarType::Double, 0, device, "sums"));
  auto* const all = static_cast<double*>(checked(total, ScalarType::Double, 0, device, "total"));
  DeviceGuard const guard(device);
  check_launch(launch_add_in_order(each, count, rows, all, stream_of(device)));
}

}  // namespace
}  // namespace zpp

STABLE_TORCH_LIBRARY_FRAGMENT(zpp_lab, m) {
  m.def("square_sums(Tensor[] grads, int[] numels, int rows, Tensor(a!) tops, Tensor(b!) sums) "
        "-> ()");
  m.def("add_in_order(Tensor sums, Tensor(a!) total) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CUDA, m) {
  m.impl("square_sums", TORCH_BOX(&zpp::square_sums));
  m.impl("add_in_order", TORCH_BOX(&zpp::add_in_order));
}
