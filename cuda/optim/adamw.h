// The plan of one launch of AdamW, passed to the kernel by value: bindings/adamw.cpp fills it on
// the host, adamw.cu runs it. As many parameters as 4 KiB hold, for parameters are many and small.
#pragma once

#include <cstdint>

namespace zpp {

constexpr int MOMENT_BLOCK = 256;  // neighbours in a row: BLOCK in states.py, and a warp's work
constexpr int MAX_PARTS = 50;

enum class State : int32_t { fp32 = 0, bf16 = 1, byte = 2 };  // how moments are kept

struct Part {  // one parameter, as rows of `columns` elements
  void* weight;  // fp32, or its high plane
  uint16_t* low;  // its low plane, or null
  void const* grad;  // fp32, or bf16 where there are planes
  void *first, *second;
  float *first_scale, *second_scale;  // one a block; null unless moments take a byte
  int64_t columns;
  uint32_t across;  // blocks of a row
  uint32_t blocks;
  uint32_t offset;  // where its rows begin in the step's noise
  bool whole;       // eight elements at a time are all there, and aligned as vectors
};

struct AdamW {
  float const *rates, *roots;  // one a part
  bool const* ok;              // null: update
  float const* factor;         // of gradients; null: 1
  uint32_t key0, key1;         // of the step's noise
  float beta1, rest1, beta2, rest2, eps, decay;  // rest = 1 - beta, decay = 1 - lr * weight decay
  int32_t parts;
  uint32_t blocks;  // of all parts, below 2^31
  bool planes;      // whether weights are in two planes
  Part part[MAX_PARTS];
};
static_assert(sizeof(AdamW) <= 4096, "kernel parameters are limited to 4 KiB on older drivers");

// `stream` is a cudaStream_t. Returns a cudaError_t.
int launch_adamw(AdamW const& plan, State state, void* stream);

}  // namespace zpp
