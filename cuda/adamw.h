// One parameter's update, as adamw_bindings.cpp hands it to adamw.cu.
#pragma once

#include <cstdint>

namespace zpp {

struct AdamW8 {
  int64_t rows, columns;
  float *weight, *first_scale, *second_scale;
  float const *grad, *rate, *root;
  uint8_t *first, *second;
  int32_t const* noise;
  bool const* ok;  // null: update
  float beta1, rest1, beta2, rest2, eps, decay;
};

int launch_adamw8(AdamW8 const& a, void* stream);

}  // namespace zpp
