// The operator adamw8: its schema and every check. Nothing here reads device memory.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "adamw.h"

namespace zpp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t BLOCK = 256;

void* checked(Tensor const& t, ScalarType type, int64_t least, int32_t device, char const* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name,
                  ": must be on the weight's CUDA device");
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": has the wrong dtype");
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
  STD_TORCH_CHECK(t.numel() >= least, name, ": has ", t.numel(), " elements, needs ", least);
  return t.data_ptr();
}

void adamw8(Tensor weight, Tensor grad, Tensor first, Tensor first_scale, Tensor second,
            Tensor second_scale, Tensor noise, Tensor rate, Tensor root, std::optional<Tensor> ok,
            double beta1, double beta2, double eps, double decay) {
  STD_TORCH_CHECK(weight.is_cuda() && weight.dim() == 2, "weight: must be [rows, columns] on CUDA");
  int32_t const device = weight.get_device_index();
  int64_t const rows = weight.size(0), columns = weight.size(1), numel = rows * columns;
  int64_t const scales = rows * ((columns + BLOCK - 1) / BLOCK);
  auto floats = [&](Tensor const& t, int64_t least, char const* name) {
    return static_cast<float*>(checked(t, ScalarType::Float, least, device, name));
  };
  auto codes = [&](Tensor const& t, char const* name) {
    return static_cast<uint8_t*>(checked(t, ScalarType::Byte, numel, device, name));
  };
  AdamW8 a = {};
  a.rows = rows, a.columns = columns;
  a.weight = floats(weight, numel, "weight"), a.grad = floats(grad, numel, "grad");
  a.first = codes(first, "first"), a.second = codes(second, "second");
  a.first_scale = floats(first_scale, scales, "first_scale");
  a.second_scale = floats(second_scale, scales, "second_scale");
  a.rate = floats(rate, 1, "rate"), a.root = floats(root, 1, "root");
  a.noise = static_cast<int32_t*>(checked(noise, ScalarType::Int, columns, device, "noise"));
  if (ok) a.ok = static_cast<bool*>(checked(*ok, ScalarType::Bool, 1, device, "ok"));
  a.beta1 = float(beta1), a.rest1 = float(1.0 - beta1);
  a.beta2 = float(beta2), a.rest2 = float(1.0 - beta2);
  a.eps = float(eps), a.decay = float(decay);
  torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                  "no current CUDA stream");
  int const error = launch_adamw8(a, stream);
  STD_TORCH_CHECK(error == 0, "kernel launch failed, CUDA error ", error);
}

}  // namespace
}  // namespace zpp

STABLE_TORCH_LIBRARY_FRAGMENT(zpp_lab, m) {
  m.def("adamw8(Tensor(a!) weight, Tensor grad, Tensor(b!) first, Tensor(c!) first_scale, "
        "Tensor(d!) second, Tensor(e!) second_scale, Tensor noise, Tensor rate, Tensor root, "
        "Tensor? ok, float beta1, float beta2, float eps, float decay) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CUDA, m) { m.impl("adamw8", TORCH_BOX(&zpp::adamw8)); }
