// Before one of cuda/'s bindings: the operator is registered as zpp_host's, for tensors that lie on
// the CPU, and looks for neither device nor stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

namespace zpp {

struct NoGuard {
  explicit NoGuard(int32_t) {}
};

int no_stream(int32_t, void**) { return 0; }

}  // namespace zpp

namespace torch::stable::accelerator {
using NoGuard = zpp::NoGuard;
}

#define zpp_lab zpp_host
#define CUDA CPU
#define is_cuda is_cpu
#define aoti_torch_get_current_cuda_stream no_stream
#define DeviceGuard NoGuard
