// The kernels' operators doing nothing, on CPU tensors: what is left is the way to them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

void encode(std::vector<Tensor>, Tensor, int64_t, Maybe, Tensor, Maybe) {}
void decode(Tensor, Tensor, std::vector<Tensor>, bool, Maybe) {}
void reduce(Tensor, Tensor, Tensor) {}
void again(Tensor, Tensor, int64_t, Maybe, Tensor) {}
void remembering(std::vector<Tensor>, bool, Tensor, int64_t, Maybe, Tensor, Tensor,
                 std::vector<Tensor>, std::vector<Tensor>) {}
void squares(std::vector<Tensor>, std::vector<int64_t>, int64_t, Tensor, Tensor) {}
void add(Tensor, Tensor) {}
void ship(Tensor, Tensor, int64_t, Maybe, Maybe) {}

STABLE_TORCH_LIBRARY(zpp_lab, m) {
  m.def("encode(Tensor[] sources, Tensor table, int key, Tensor? noise_rows, Tensor(a!) out, "
        "Tensor(b!)? errors=None) -> ()");
  m.def("decode(Tensor payload, Tensor table, Tensor(a!)[] outs, bool onto=False, "
        "Tensor? ok=None) -> ()");
  m.def("reduce(Tensor payload, Tensor table, Tensor(a!) out) -> ()");
  m.def("decode_sum_encode(Tensor payload, Tensor table, int key, Tensor? noise_rows, "
        "Tensor(a!) out) -> ()");
  m.def("encode_remembering(Tensor[] sources, bool sums, Tensor table, int key, "
        "Tensor? noise_rows, Tensor(a!) out, Tensor settings, Tensor[] before, "
        "Tensor(b!)[] after) -> ()");
  m.def("square_sums(Tensor[] grads, int[] numels, int rows, Tensor(a!) tops, Tensor(b!) sums) "
        "-> ()");
  m.def("add_in_order(Tensor sums, Tensor(a!) total) -> ()");
  m.def("ship(Tensor(a!) out, Tensor route, int watch, Tensor? held, Tensor(b!)? keep) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CPU, m) {
  m.impl("encode", TORCH_BOX(&encode));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("reduce", TORCH_BOX(&reduce));
  m.impl("decode_sum_encode", TORCH_BOX(&again));
  m.impl("encode_remembering", TORCH_BOX(&remembering));
  m.impl("square_sums", TORCH_BOX(&squares));
  m.impl("add_in_order", TORCH_BOX(&add));
  m.impl("ship", TORCH_BOX(&ship));
}
