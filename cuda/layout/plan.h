// The plan of one launch, passed to the kernel by value: no table on the device, nothing to upload.
//
// bindings/fill.h fills it on the host from tensors and the layout's table; kernels only read it.
// It stays under 4 KiB, which every driver accepts as kernel parameters, so a layout of more than
// MAX_SEGMENTS segments takes several launches.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "cutlass/fast_math.h"

#include "layout/planes.h"

namespace zpp {

constexpr int THREADS = 256;     // threads of one thread block
constexpr int CHUNKS = 4;        // pieces of a warp's work, 8 neighbouring elements a lane each
constexpr int CHUNK = 256;
constexpr int MAX_SEGMENTS = 18;
constexpr int ERROR_SUMS = 8;    // telemetry sums of a tile

enum class Dtype : int32_t { fp32 = 0, bf16 = 1, fp16 = 2 };

constexpr int itemsize(Dtype d) { return d == Dtype::fp32 ? 4 : 2; }

// Floats of one segment: element i of row r lies at base + (r * row_stride + i) * itemsize and
// exists when r * row_stride + i < total. Reading past it gives zero, writing there does nothing.
struct FloatView {
  char* base;
  int64_t row_stride;
  int64_t total;
  int64_t k_stride;  // elements from one summed row to the next (raw payloads only)
};

struct Segment {
  FloatView from, to;     // used where that side holds floats
  int64_t from_len;       // elements of a row on the reading side
  int64_t numel;          // plain elements of a row
  int64_t to_len;         // elements of a row on the writing side
  Planes from_planes, to_planes;  // where the parts of a coded segment start in a payload row
  Codec from_codec, to_codec;
  uint32_t first_tile;
  uint32_t parameter;     // id for noise
  cutlass::FastDivmod tiles;  // tiles of one row
  uint8_t from_dtype, to_dtype;
  uint8_t inverse, forward;   // rotations to apply, in this order
  uint8_t copy;               // same floats on both sides: move bytes
  int32_t bulk_rows, bulk_parts;  // tiles of `from` in these first rows and parts are whole and aligned
};

struct Plan {
  char const* payload;    // incoming payload rows [K, R, bytes]
  int64_t payload_k, payload_row;
  char* out;              // outgoing payload rows [R, bytes]
  int64_t out_row;
  uint64_t key;
  int32_t const* key_at;      // on the device, low and high word, in place of `key`; or null
  int32_t const* noise_rows;  // [R, 2]: rank and row of each outgoing payload row
  double* errors;             // [tiles, ERROR_SUMS], or null: no telemetry
  bool const* ok;             // decode: where it is false nothing is written; null: true
  int32_t k;
  int32_t segments;
  uint32_t tiles;
  int32_t rows;         // R
  int32_t stage_bytes;  // of one tile of the widest floats to encode
  int32_t onto;         // decode: what codes stand for is added to what is there
  Segment segment[MAX_SEGMENTS];
};
static_assert(sizeof(Plan) <= 4096, "kernel parameters are limited to 4 KiB on older drivers");

// What the encoder of one segment remembers; zpp_lab/codecs/kernels/memory.py has the arithmetic.
// Or what nodes keep of it: see `to`.
enum class Store : int32_t {
  none = 0, fp32 = 1, bf16 = 2,
  eight = 3,    // bits: codes
  rounded = 4,  // to bf16 is what is encoded; nothing is remembered
};

struct Memory {
  Store store;
  float average, weight;
  char const* from;  // rows of `bytes` each; null stands for zeros
  char* to;          // may be `from`; null: `from` is taken away, not added, and nothing remembered
  int64_t bytes;
  int64_t total;     // elements from `from` on; past them there are zeros
  Planes planes;     // of a row of codes
};

// Over 4 KiB: drivers for CUDA 12.1 and later accept 32.
struct RememberPlan : Plan {
  Memory memory[MAX_SEGMENTS];
};

// One a kernel family; `stream` is a cudaStream_t. Return a cudaError_t.
int launch_encode(Plan&, bool stochastic, bool rotated, void* stream);
int launch_encode_errors(Plan&, void* stream);
int launch_encode_remembering(RememberPlan&, void* stream);
int launch_decode(Plan&, bool rotated, void* stream);
int launch_decode_sum(Plan&, void* stream);
int launch_reduce(Plan&, bool rotated, void* stream);
int launch_decode_sum_encode(Plan&, bool stochastic, bool rotated, void* stream);
int launch_finish_sums(Plan&, void* stream);

}  // namespace zpp
