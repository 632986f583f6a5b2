// The plan of one launch of the gradient's sums of squares, passed to the kernels by value:
// bindings/squares.cpp fills it on the host, squares.cu runs it. As many rows as 4 KiB hold, for
// parameters are many and small.
#pragma once

#include <cstdint>

namespace zpp {

constexpr int MAX_ROWS = 160;
constexpr uint32_t TOP = 32768;  // what the first kernel leaves of a row, at most
constexpr uint32_t FOLDERS = 256;  // threads of a block

struct SquaredRow {  // `numel` elements, of which the first `count` are there and the rest are zeros
  void const* values;  // fp32, or bf16
  uint32_t count, numel;  // numel below 2^31
  uint32_t left;          // `left_of(numel)`
  uint32_t top;           // where these begin in `tops`
};

struct SquareSums {
  double* tops;  // of all rows of the launch
  double* sums;  // one a row
  int32_t rows;
  uint32_t tiles;  // of FOLDERS elements, of the tops of all rows
  bool half;  // whether values are bf16
  SquaredRow row[MAX_ROWS];
};
static_assert(sizeof(SquareSums) <= 4096, "kernel parameters are limited to 4 KiB on older drivers");

// What halving again and again, rounding up, leaves of a row: TOP or fewer.
inline uint32_t left_of(uint32_t numel) {
  while (numel > TOP) numel = numel / 2 + numel % 2;
  return numel;
}

// `stream` is a cudaStream_t. Both return a cudaError_t.
int launch_square_sums(SquareSums const& plan, void* stream);

// sums [count, rows] → total [rows]: 0 + the first + the second + ...
int launch_add_in_order(double const* sums, int64_t count, int64_t rows, double* total, void* stream);

}  // namespace zpp
