// What every operator over lists of tensors asks of each of them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace zpp {

// The tensor's elements; an error of `name` where they are not as the kernels take them.
inline void* checked(torch::stable::Tensor const& t, torch::headeronly::ScalarType type,
                     int64_t least, int32_t device, char const* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name,
                  ": must be on the first tensor's CUDA device");
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": has the wrong dtype");
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
  STD_TORCH_CHECK(t.numel() >= least, name, ": has ", t.numel(), " elements, needs ", least);
  return t.data_ptr();
}

}  // namespace zpp
