// The operator adamw: its schema, every check, and the plans that the kernel runs. Nothing here
// reads device memory, and nothing is launched before all checks have passed.
#include <optional>
#include <vector>

#include "bindings/checked.h"
#include "optim/adamw.h"

namespace zpp {
namespace {

using Tensors = std::vector<Tensor>;

constexpr int64_t MOST_BLOCKS = int64_t(1) << 31;  // of one launch

State state_of(Tensor const& moment) {
  switch (moment.scalar_type()) {
    case ScalarType::Float: return State::fp32;
    case ScalarType::BFloat16: return State::bf16;
    case ScalarType::Byte: return State::byte;
    default: STD_TORCH_CHECK(false, "first: use float32, bfloat16 or uint8");
  }
  return State::fp32;
}

// Rows are all dimensions but the first. In fp32 they mean nothing: one row is as good.
int64_t columns_of(Tensor const& weight, State state) {
  if (state == State::fp32) return weight.numel();
  int64_t columns = 1;
  for (int64_t d = 1; d < weight.dim(); ++d) columns *= weight.size(d);
  return columns;
}

bool aligned(void const* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

struct Lists {
  Tensors const &weights, &low, &grads, &first, &second, &first_scales, &second_scales;
  std::vector<int64_t> const& offsets;
  State state;
  int32_t device;
};

void check_counts(Lists const& l) {
  size_t const count = l.weights.size(), scales = l.state == State::byte ? count : 0;
  STD_TORCH_CHECK(l.grads.size() == count && l.first.size() == count && l.second.size() == count &&
                      l.offsets.size() == count,
                  "grads, first, second, offsets: need one each for ", count, " weights");
  STD_TORCH_CHECK(l.low.empty() || l.low.size() == count, "low: need none, or ", count);
  STD_TORCH_CHECK(l.first_scales.size() == scales && l.second_scales.size() == scales,
                  "scales: need ", scales, ", one each for moments of a byte");
}

Part part_of(Lists const& l, size_t i) {
  ScalarType const kept = l.first[i].scalar_type();
  STD_TORCH_CHECK(state_of(l.first[i]) == l.state, "first: all must have one dtype");
  int64_t const numel = l.weights[i].numel(), columns = columns_of(l.weights[i], l.state);
  Part p = {};
  bool const planes = !l.low.empty();
  ScalarType const own = planes ? ScalarType::BFloat16 : ScalarType::Float;
  p.weight = checked(l.weights[i], own, numel, l.device, "weights");
  p.grad = checked(l.grads[i], own, numel, l.device, "grads");
  if (planes) {
    p.low = static_cast<uint16_t*>(checked(l.low[i], ScalarType::Short, numel, l.device, "low"));
  }
  p.first = checked(l.first[i], kept, numel, l.device, "first");
  p.second = checked(l.second[i], kept, numel, l.device, "second");
  p.columns = columns;
  if (numel == 0) return p;
  int64_t const across = (columns + MOMENT_BLOCK - 1) / MOMENT_BLOCK;
  int64_t const blocks = numel / columns * across, offset = l.offsets[i];
  STD_TORCH_CHECK(blocks < MOST_BLOCKS, "weights: a parameter has too many elements, ", numel);
  STD_TORCH_CHECK(0 <= offset && offset < MOST_BLOCKS, "offsets: must be from 0 to 2^31 - 1");
  p.across = uint32_t(across), p.blocks = uint32_t(blocks), p.offset = uint32_t(offset);
  if (l.state == State::byte) {
    p.first_scale = static_cast<float*>(
        checked(l.first_scales[i], ScalarType::Float, blocks, l.device, "first_scales"));
    p.second_scale = static_cast<float*>(
        checked(l.second_scales[i], ScalarType::Float, blocks, l.device, "second_scales"));
  }
  uintptr_t const bytes = l.state == State::byte ? 8 : 16;  // a vector's, of moments
  p.whole = columns % 8 == 0 && aligned(p.weight, 16) && aligned(p.grad, 16) &&
            aligned(p.low, 16) &&
            aligned(p.first, bytes) && aligned(p.second, bytes);
  return p;
}

// The parts of all launches: `plan` gives what they share.
std::vector<AdamW> plans_of(Lists const& l, AdamW const& plan) {
  std::vector<AdamW> plans;
  for (size_t i = 0; i < l.weights.size(); ++i) {
    Part const p = part_of(l, i);
    if (plans.empty() || plans.back().parts == MAX_PARTS ||
        plans.back().blocks + int64_t(p.blocks) >= MOST_BLOCKS) {
      plans.push_back(plan);
      plans.back().rates += i, plans.back().roots += i;
    }
    AdamW& last = plans.back();
    last.part[last.parts++] = p;
    last.blocks += p.blocks;
  }
  return plans;
}

void adamw(Tensors weights, Tensors low, Tensors grads, Tensors first, Tensors second,
           Tensors first_scales, Tensors second_scales, std::vector<int64_t> offsets, int64_t key,
           Tensor rates, Tensor roots, std::optional<Tensor> ok, std::optional<Tensor> factor,
           double beta1, double beta2, double eps, double decay) {
  STD_TORCH_CHECK(!weights.empty() && !first.empty(), "weights: must not be empty");
  Lists const lists = {weights, low, grads, first, second, first_scales, second_scales, offsets,
                       state_of(first[0]), weights[0].get_device_index()};
  check_counts(lists);
  int64_t const count = int64_t(weights.size());
  AdamW plan = {};
  plan.rates = static_cast<float*>(checked(rates, ScalarType::Float, count, lists.device, "rates"));
  plan.roots = static_cast<float*>(checked(roots, ScalarType::Float, count, lists.device, "roots"));
  if (ok) plan.ok = static_cast<bool*>(checked(*ok, ScalarType::Bool, 1, lists.device, "ok"));
  if (factor) {
    plan.factor =
        static_cast<float*>(checked(*factor, ScalarType::Float, 1, lists.device, "factor"));
  }
  plan.planes = !low.empty();
  plan.key0 = uint32_t(uint64_t(key)), plan.key1 = uint32_t(uint64_t(key) >> 32);
  plan.beta1 = float(beta1), plan.rest1 = float(1.0 - beta1);
  plan.beta2 = float(beta2), plan.rest2 = float(1.0 - beta2);
  plan.eps = float(eps), plan.decay = float(decay);
  std::vector<AdamW> const plans = plans_of(lists, plan);
  DeviceGuard const guard(lists.device);
  void* const stream = stream_of(lists.device);
  for (AdamW const& one : plans) check_launch(launch_adamw(one, lists.state, stream));
}

}  // namespace
}  // namespace zpp

STABLE_TORCH_LIBRARY_FRAGMENT(zpp_lab, m) {
  m.def("adamw(Tensor(a!)[] weights, Tensor(f!)[] low, Tensor[] grads, Tensor(b!)[] first, "
        "Tensor(c!)[] second, Tensor(d!)[] first_scales, Tensor(e!)[] second_scales, "
        "int[] offsets, int key, Tensor rates, Tensor roots, Tensor? ok, Tensor? factor, "
        "float beta1, float beta2, float eps, float decay) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CUDA, m) { m.impl("adamw", TORCH_BOX(&zpp::adamw)); }
