// What the layout operators' bindings share: checks of tensors, and plans filled from them and from
// the layout's table.
//
// `table` is an int64 tensor [segments, COLUMNS] on the host, made once for a layout by
// zpp_lab/codecs/kernels/table.py; its columns are the enum below.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "bindings/checked.h"
#include "layout/plan.h"

namespace zpp {

enum Column {
  NUMEL,         // elements of a row
  FROM_CODED,    // the same in the incoming codec's domain
  TO_CODED,      // and in the outgoing codec's
  FROM_OFFSET,   // bytes in an incoming payload row
  FROM_NBYTES,
  TO_OFFSET,     // bytes in an outgoing payload row
  TO_NBYTES,
  SUM_OFFSET,    // elements in a row of sums
  PLAIN_OFFSET,  // elements in a row of plain values
  PARAMETER,     // id for noise
  FROM_CODEC,    // eight bytes each, see Codec in plan.h
  TO_CODEC,
  FROM_RAW,      // dtype of a raw segment, see Dtype in plan.h
  TO_RAW,
  COLUMNS
};

constexpr int64_t ENDLESS = std::numeric_limits<int64_t>::max();

inline Dtype dtype_of(Tensor const& t, char const* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Dtype::fp32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::fp16;
    default: STD_TORCH_CHECK(false, name, ": use float32, bfloat16 or float16");
  }
  return Dtype::fp32;
}

// What all tensors of a call share, and the host table.
struct Call {
  int32_t device;
  int64_t const* table;
  int64_t segments;

  int64_t at(int64_t s, Column c) const { return table[s * COLUMNS + c]; }
};

inline void check_device(Tensor const& t, int32_t device, char const* name) {
  STD_TORCH_CHECK(t.is_cuda(), name, ": must be on a CUDA device; move it, or use the reference");
  STD_TORCH_CHECK(t.get_device_index() == device, name, ": is on device ", t.get_device_index(),
                  ", but the other tensors are on device ", device);
}

inline Call begin(Tensor const& main, char const* name, Tensor const& table) {
  STD_TORCH_CHECK(main.is_cuda(), name, ": must be on a CUDA device");
  STD_TORCH_CHECK(table.is_cpu() && table.scalar_type() == ScalarType::Long && table.dim() == 2 &&
                      table.is_contiguous() && table.size(1) == COLUMNS,
                  "table: must be a contiguous int64 host tensor [segments, ", int(COLUMNS), "]");
  return {main.get_device_index(), static_cast<int64_t const*>(table.const_data_ptr()),
          table.size(0)};
}

inline int64_t width_of(Call const& call, Column offset, Column len) {
  int64_t width = 0;
  for (int64_t s = 0; s < call.segments; ++s) {
    int64_t const end = call.at(s, offset) + call.at(s, len);
    width = end > width ? end : width;
  }
  return width;
}

// Payload rows: uint8, the last dimension contiguous, every row 16-byte aligned.
inline void check_payload(Tensor const& t, int64_t ndim, char const* name, Call const& call, bool incoming) {
  check_device(t, call.device, name);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte, name, ": must be uint8");
  STD_TORCH_CHECK(t.dim() == ndim, name, ": needs ", ndim, " dimensions, has ", t.dim());
  int64_t const need =
      incoming ? width_of(call, FROM_OFFSET, FROM_NBYTES) : width_of(call, TO_OFFSET, TO_NBYTES);
  STD_TORCH_CHECK(t.size(ndim - 1) >= need, name, ": too short, rows have ", t.size(ndim - 1),
                  " bytes but the layout needs ", need);
  if (t.numel() == 0) return;
  STD_TORCH_CHECK(t.stride(ndim - 1) == 1, name, ": rows must be contiguous");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                  ": must start at a multiple of 16 bytes");
  for (int64_t d = 0; d + 1 < ndim; ++d) {
    STD_TORCH_CHECK(t.size(d) == 1 || t.stride(d) % 16 == 0, name,
                    ": rows must start at multiples of 16 bytes");
  }
}

// Rows of floats: [R, width], the last dimension contiguous.
inline Dtype check_matrix(Tensor const& t, int64_t width, char const* name, Call const& call) {
  check_device(t, call.device, name);
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) == width, name, ": must be [R, ", width, "]");
  STD_TORCH_CHECK(t.numel() == 0 || t.stride(1) == 1, name, ": rows must be contiguous");
  return dtype_of(t, name);
}

// The layout's widths cannot be known from the rows given when segments of other packages'
// codecs are left out, so the tensor may be wider than the table says.
inline void check_width(Tensor const& t, int64_t need, char const* name) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(1) >= need, name, ": must be [R, ", need, "] or wider");
}

// The sums of a hop, in the coded domain of its incoming payload: fp32 [rows, width or wider].
inline void check_sums(Tensor const& sums, Call const& call, int64_t rows) {
  check_width(sums, width_of(call, SUM_OFFSET, FROM_CODED), "sums");
  Dtype const dtype = check_matrix(sums, sums.size(1), "sums", call);
  STD_TORCH_CHECK(dtype == Dtype::fp32, "sums: must be float32");
  STD_TORCH_CHECK(sums.size(0) == rows, "sums: needs ", rows, " rows");
}

// Payload rows to be summed, and a row of `out` for each sum.
inline void check_hop(Tensor const& payload, Tensor const& out) {
  STD_TORCH_CHECK(out.size(0) == payload.size(1), "out: needs ", payload.size(1), " rows");
  STD_TORCH_CHECK(payload.size(0) > 0, "payload: needs at least one row to sum");
}

inline FloatView matrix_view(Tensor const& t, Dtype dtype, int64_t offset) {
  char* base = static_cast<char*>(t.data_ptr()) + offset * itemsize(dtype);
  return {base, t.stride(0), ENDLESS, 0};
}

inline Codec codec_of(int64_t packed) {
  Codec c;
  static_assert(sizeof(c) == sizeof(packed));
  std::memcpy(&c, &packed, sizeof(c));
  bool const known = c.bits == 2 || c.bits == 3 || c.bits == 4 || c.bits == 6 || c.bits == 8;
  STD_TORCH_CHECK(c.raw || c.bits == 0 || (known && c.log2_block >= 4 && c.log2_block <= 13),
                  "bits=", int(c.bits), " with block 2^", int(c.log2_block),
                  ": use 2, 3, 4, 6 or 8 bits and blocks of 16 to 8192");
  STD_TORCH_CHECK(c.log2_group == 0 || (c.log2_group >= 4 && c.log2_group <= 8),
                  "hadamard=2^", int(c.log2_group), ": use 16 to 256");
  return c;
}

struct Flags {
  bool stochastic = false, rotated = false;
};

// A segment without its float views.
inline Segment segment_at(Call const& call, int64_t s) {
  Segment seg = {};
  seg.numel = call.at(s, NUMEL);
  seg.from_len = call.at(s, FROM_CODED);
  seg.to_len = call.at(s, TO_CODED);
  seg.from_codec = codec_of(call.at(s, FROM_CODEC));
  seg.to_codec = codec_of(call.at(s, TO_CODEC));
  seg.from_planes = planes_of(call.at(s, FROM_OFFSET), seg.from_codec, seg.from_len);
  seg.to_planes = planes_of(call.at(s, TO_OFFSET), seg.to_codec, seg.to_len);
  seg.parameter = uint32_t(call.at(s, PARAMETER));
  Codec const &a = seg.from_codec, &b = seg.to_codec;
  bool const stay = a.log2_group && a.log2_group == b.log2_group && a.signs == b.signs;
  seg.inverse = a.log2_group && !stay;
  seg.forward = b.log2_group && !stay;
  return seg;
}

// A raw segment inside payload rows, seen as floats.
inline FloatView raw_view(char const* base, int64_t offset, int64_t row, int64_t k, Dtype dtype) {
  int64_t const each = itemsize(dtype);
  return {const_cast<char*>(base) + offset, row / each, ENDLESS, k / each};
}

inline void view_raw_input(Plan const& plan, Call const& call, int64_t s, Segment& seg) {
  if (!seg.from_codec.raw) return;
  auto const dtype = Dtype(call.at(s, FROM_RAW));
  seg.from = raw_view(plan.payload, seg.from_planes.codes, plan.payload_row, plan.payload_k, dtype);
  seg.from_dtype = uint8_t(dtype);
}

inline void view_raw_output(Plan const& plan, Call const& call, int64_t s, Segment& seg) {
  if (!seg.to_codec.raw) return;
  auto const dtype = Dtype(call.at(s, TO_RAW));
  seg.to = raw_view(plan.out, seg.to_planes.codes, plan.out_row, 0, dtype);
  seg.to_dtype = uint8_t(dtype);
  seg.to_len = call.at(s, TO_NBYTES) / itemsize(dtype);  // the filling is zeros
}

inline void set_input(Plan& plan, Tensor const& payload) {
  int64_t const d = payload.dim();
  plan.payload = static_cast<char const*>(payload.const_data_ptr());
  plan.payload_row = payload.stride(d - 2);
  plan.k = int32_t(d == 3 ? payload.size(0) : 1);
  plan.payload_k = d == 3 ? payload.stride(0) : 0;
}

// Rows to write, and the noise of their encoding. A row more in `noise_rows` has the key's low and
// high word, in place of `key`: what a CUDA graph has captured reads each step's there.
inline void set_output(Plan& plan, Tensor const& out, int64_t key,
                       std::optional<Tensor> const& noise_rows, Call const& call) {
  plan.out = static_cast<char*>(out.mutable_data_ptr());
  plan.out_row = out.stride(0);
  plan.key = uint64_t(key);
  if (!noise_rows) return;
  Tensor const& t = *noise_rows;
  check_device(t, call.device, "noise_rows");
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.dim() == 2 &&
                      (t.size(0) == out.size(0) || t.size(0) == out.size(0) + 1) &&
                      t.size(1) == 2,
                  "noise_rows: must be contiguous int32 [", out.size(0), ", 2]: rank and row; "
                  "with a row more for the key");
  plan.noise_rows = static_cast<int32_t const*>(t.const_data_ptr());
  if (t.size(0) > out.size(0)) plan.key_at = plan.noise_rows + 2 * out.size(0);
}

// Where tiles of floats to encode are whole and start at multiples of 16 bytes.
inline void set_bulk(Segment& seg) {
  FloatView const& v = seg.from;
  int64_t const each = itemsize(Dtype(seg.from_dtype));
  bool const aligned = reinterpret_cast<uintptr_t>(v.base) % 16 == 0 &&
                       v.row_stride * each % 16 == 0;
  if (!aligned || seg.copy || v.total < seg.from_len) return;
  int64_t const most = std::numeric_limits<int32_t>::max();
  int64_t const rows = v.row_stride ? (v.total - seg.from_len) / v.row_stride + 1 : 1;
  seg.bulk_rows = int32_t(std::min(rows, most));
  seg.bulk_parts = int32_t(std::min(seg.from_len / TILE, most));
}

// Fills plans with segments, MAX_SEGMENTS at a time, and launches each when it is full.
template <typename P, typename Fill, typename Launch>
void run(P& plan, Call const& call, int64_t rows, Fill fill, Launch launch,
         std::optional<Tensor> const& errors = std::nullopt) {
  DeviceGuard const guard(call.device);
  void* const stream = stream_of(call.device);
  std::vector<P> plans;  // all checks first: nothing is launched when one fails
  std::vector<Flags> flags;
  int64_t tiles = 0, all = 0;
  auto const close = [&](Flags f) {
    if (!plan.segments) return;
    plan.tiles = uint32_t(tiles);
    plan.rows = int32_t(rows);
    plan.stage_bytes = 0;
    for (int i = 0; i < plan.segments; ++i) {
      int32_t const bytes = TILE * int32_t(itemsize(Dtype(plan.segment[i].from_dtype)));
      plan.stage_bytes = std::max(plan.stage_bytes, bytes);
    }
    plans.push_back(plan), flags.push_back(f);
    if (plan.errors) plan.errors += tiles * ERROR_SUMS;
    all += tiles, plan.segments = 0, tiles = 0;
  };
  Flags f;
  for (int64_t s = 0; s < call.segments; ++s) {
    Segment seg = segment_at(call, s);
    fill(s, seg);
    set_bulk(seg);
    int64_t const each = (seg.to_len + TILE - 1) / TILE, mine = each * rows;
    if (!mine) continue;
    STD_TORCH_CHECK(tiles + mine < std::numeric_limits<int32_t>::max(),
                    "too many elements for one launch: send fewer rows at a time");
    seg.first_tile = uint32_t(tiles);
    seg.tiles = cutlass::FastDivmod(int(each));
    plan.segment[plan.segments++] = seg;
    tiles += mine;
    f.stochastic |= seg.to_codec.stochastic;
    f.rotated |= seg.inverse || seg.forward;
    if (plan.segments == MAX_SEGMENTS) close(f), f = {};
  }
  close(f);
  STD_TORCH_CHECK(!errors || errors->size(0) == all, "errors: needs ", all, " rows, one a tile");
  for (size_t i = 0; i < plans.size(); ++i) {
    STD_TORCH_CHECK(!flags[i].stochastic || plans[i].noise_rows,
                    "stochastic rounding needs noise: pass a Noise for this collective");
  }
  for (size_t i = 0; i < plans.size(); ++i) check_launch(launch(plans[i], flags[i], stream));
}

inline void check_count(std::vector<Tensor> const& list, Call const& call, char const* name) {
  STD_TORCH_CHECK(int64_t(list.size()) == call.segments, name, ": the layout has ", call.segments,
                  " segments, but there are ", list.size(), " tensors");
}

// A whole parameter cut into rows of `numel` elements.
inline FloatView parameter_view(
    Tensor const& t, Call const& call, int64_t numel, int64_t rows, char const* name, Dtype& dtype) {
  check_device(t, call.device, name);
  dtype = dtype_of(t, name);
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous; call .contiguous()");
  STD_TORCH_CHECK(t.numel() <= rows * numel, name, ": has ", t.numel(), " elements, but ", rows,
                  " rows of ", numel, " hold fewer");
  return {static_cast<char*>(t.data_ptr()), numel, t.numel(), 0};
}

inline void set_errors(Plan& plan, std::optional<Tensor> const& errors, Call const& call) {
  if (!errors) return;
  check_device(*errors, call.device, "errors");
  STD_TORCH_CHECK(errors->scalar_type() == ScalarType::Double && errors->dim() == 2 &&
                      errors->size(1) == ERROR_SUMS && errors->is_contiguous(),
                  "errors: must be contiguous float64 [tiles, ", int(ERROR_SUMS), "]");
  plan.errors = static_cast<double*>(errors->mutable_data_ptr());
}

// Row `s` of `settings`, int64 on the host: Store, and the bits of average and weight. Rows that are
// remembered now and next: [rows, elements of the store], the first one perhaps empty. Where the last
// one is empty, `from` is a parameter as the sources are, of the store's dtype.
inline Memory memory_at(Tensor const& settings, Tensor const& from, Tensor const& to, int64_t s,
                        int64_t rows, Segment const& seg, Call const& call) {
  int64_t const* row = static_cast<int64_t const*>(settings.const_data_ptr()) + 3 * s;
  Memory m = {};
  m.store = Store(row[0]);
  if (m.store == Store::none || m.store == Store::rounded) return m;
  if (!rows || !seg.from_len) return m;  // nothing to remember, so no tensor either
  std::memcpy(&m.average, row + 1, 4), std::memcpy(&m.weight, row + 2, 4);
  m.planes = planes_of(0, {0, 8, 8, 1, 0, 0, 0, 0}, seg.from_len);
  bool const codes = m.store == Store::eight, wide = m.store == Store::fp32;
  int64_t const scales = (seg.from_len + 255) / 256 * 4;
  int64_t const width = codes ? m.planes.scales + (scales + 15) / 16 * 16 : seg.from_len;
  auto const type = codes ? ScalarType::Byte : wide ? ScalarType::Float : ScalarType::BFloat16;
  m.bytes = width * (codes ? 1 : wide ? 4 : 2), m.total = ENDLESS;
  if (!to.numel()) {
    Dtype dtype;
    FloatView const view = parameter_view(from, call, seg.numel, rows, "kept", dtype);
    STD_TORCH_CHECK(from.scalar_type() == type, "kept: has the wrong dtype");
    m.from = view.base, m.total = view.total;
    return m;
  }
  m.to = static_cast<char*>(checked(to, type, rows * width, call.device, "memory"));
  if (from.numel()) {
    m.from = static_cast<char*>(checked(from, type, rows * width, call.device, "memory"));
  }
  return m;
}

inline bool same_floats(Segment const& s) { return s.from_dtype == s.to_dtype; }

}  // namespace zpp
