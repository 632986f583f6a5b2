// What all bindings share: torch's headers, checks of tensors, the stream, and what a launch said.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace zpp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// The elements of one of a list's tensors; an error of `name` where they are not as the kernels
// take them.
inline void* checked(
    Tensor const& t, ScalarType type, int64_t least, int32_t device, char const* name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name,
                  ": must be on the first tensor's CUDA device");
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": has the wrong dtype");
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
  STD_TORCH_CHECK(t.numel() >= least, name, ": has ", t.numel(), " elements, needs ", least);
  return t.data_ptr();
}

inline void* stream_of(int32_t device) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == 0,
                  "no current CUDA stream");
  return stream;
}

inline void check_launch(int error) {
  STD_TORCH_CHECK(error == 0, "kernel launch failed, CUDA error ", error);
}

}  // namespace zpp
