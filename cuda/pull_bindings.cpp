// The operators whose payload rows lie in the memory of several GPUs.
//
// `rows` is an int64 tensor on the host, made once for a place in a slot by zpp_lab/ops/rows.py: the
// columns of the enum below, then for every row its address and which row of the parameters it is.
// Addresses of other GPUs' memory are taken at their word.
#include "fill.h"

namespace zpp {
namespace {

enum Around {
  ROWS_NEAR,     // the first so many lie in this GPU's memory
  ROWS_NBYTES,   // of each row
  ROWS_PITCH,    // to sum: bytes from one of a rank's rows to its next
  ROWS_SHARDS,   // to sum: how many rows each rank has
  ROWS_COLUMNS
};

struct Given {
  Rows rows;
  int32_t count;
  int64_t shards;
};

Given rows_of(Tensor const& t, Call const& call) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Long && t.dim() == 1 &&
                      t.is_contiguous() && t.size(0) > ROWS_COLUMNS &&
                      (t.size(0) - ROWS_COLUMNS) % 2 == 0,
                  "rows: must be a contiguous int64 host tensor with two columns a row");
  auto const at = static_cast<int64_t const*>(t.const_data_ptr());
  int64_t const count = (t.size(0) - ROWS_COLUMNS) / 2;
  STD_TORCH_CHECK(count <= MAX_ROWS, "rows: a kernel reads up to ", int(MAX_ROWS), ", not ", count,
                  "; copy them together");
  int64_t const need = width_of(call, FROM_OFFSET, FROM_NBYTES);
  STD_TORCH_CHECK(at[ROWS_NBYTES] >= need, "rows: too short, they have ", at[ROWS_NBYTES],
                  " bytes but the layout needs ", need);
  STD_TORCH_CHECK(at[ROWS_NEAR] >= 0 && at[ROWS_NEAR] <= count, "rows: ", at[ROWS_NEAR], " of ",
                  count, " cannot be near");
  STD_TORCH_CHECK(at[ROWS_PITCH] % 16 == 0, "rows: must start at multiples of 16 bytes");
  Given g = {};
  g.count = int32_t(count), g.shards = at[ROWS_SHARDS];
  g.rows.pitch = at[ROWS_PITCH], g.rows.near = int32_t(at[ROWS_NEAR]);
  g.rows.count = cutlass::FastDivmod(int(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t const base = at[ROWS_COLUMNS + 2 * i], to = at[ROWS_COLUMNS + 2 * i + 1];
    STD_TORCH_CHECK(base % 16 == 0, "rows: must start at multiples of 16 bytes");
    STD_TORCH_CHECK(to >= 0 && to < count, "rows: there is no row ", to, " of ", count);
    g.rows.base[i] = reinterpret_cast<char const*>(base), g.rows.to[i] = uint8_t(to);
  }
  return g;
}

// Which floats a raw segment travels as; where, the kernel finds in its rows.
void note_raw_input(Call const& call, int64_t s, Segment& seg) {
  if (seg.from_codec.raw) seg.from_dtype = uint8_t(call.at(s, FROM_RAW));
}

void pull_decode(Tensor rows, Tensor table, std::vector<Tensor> outs, int64_t multiprocessors) {
  STD_TORCH_CHECK(!outs.empty(), "outs: must not be empty");
  Call const call = begin(outs[0], "outs", table);
  check_count(outs, call, "outs");
  Given const given = rows_of(rows, call);
  Plan plan = {};
  plan.k = 1;
  run(plan, call, given.count, [&](int64_t s, Segment& seg) {
    Dtype dtype;
    seg.to = parameter_view(outs[s], call, seg.numel, given.count, "outs", dtype);
    seg.to_dtype = uint8_t(dtype);
    seg.to_len = seg.numel;
    note_raw_input(call, s, seg);
    seg.copy = seg.from_codec.raw && same_floats(seg);
  }, [&](Plan& p, Flags f, void* stream) {
    return launch_pull_decode({p, given.rows}, f.rotated, int(multiprocessors), stream);
  });
}

void pull_reduce(Tensor rows, Tensor table, Tensor out, int64_t multiprocessors) {
  Call const call = begin(out, "out", table);
  Given const given = rows_of(rows, call);
  check_width(out, width_of(call, PLAIN_OFFSET, NUMEL), "out");
  Dtype const dtype = check_matrix(out, out.size(1), "out", call);
  STD_TORCH_CHECK(out.size(0) == given.shards, "out: needs ", given.shards, " rows");
  Plan plan = {};
  plan.k = given.count;
  run(plan, call, given.shards, [&](int64_t s, Segment& seg) {
    seg.to = matrix_view(out, dtype, call.at(s, PLAIN_OFFSET));
    seg.to_dtype = uint8_t(dtype);
    seg.to_len = seg.numel;
    note_raw_input(call, s, seg);
  }, [&](Plan& p, Flags f, void* stream) {
    return launch_pull_reduce({p, given.rows}, f.rotated, int(multiprocessors), stream);
  });
}

void pull_reencode(Tensor rows, Tensor table, int64_t key,
                   std::optional<Tensor> noise_rows, Tensor out, int64_t multiprocessors) {
  Call const call = begin(out, "out", table);
  Given const given = rows_of(rows, call);
  check_payload(out, 2, "out", call, false);
  STD_TORCH_CHECK(out.size(0) == given.shards, "out: needs ", given.shards, " rows");
  Plan plan = {};
  plan.k = given.count;
  set_output(plan, out);
  set_noise(plan, {key, noise_rows}, out.size(0), call);
  run(plan, call, given.shards, [&](int64_t s, Segment& seg) {
    note_raw_input(call, s, seg);
    view_raw_output(plan, call, s, seg);
  }, [&](Plan& p, Flags f, void* stream) {
    return launch_pull_reencode(
        {p, given.rows}, f.stochastic, f.rotated, int(multiprocessors), stream);
  });
}

}  // namespace
}  // namespace zpp

STABLE_TORCH_LIBRARY_FRAGMENT(zpp_lab, m) {
  m.def("pull_decode(Tensor rows, Tensor table, Tensor(a!)[] outs, int multiprocessors) -> ()");
  m.def("pull_reduce(Tensor rows, Tensor table, Tensor(a!) out, int multiprocessors) -> ()");
  m.def("pull_reencode(Tensor rows, Tensor table, int key, Tensor? noise_rows, "
        "Tensor(a!) out, int multiprocessors) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CUDA, m) {
  m.impl("pull_decode", TORCH_BOX(&zpp::pull_decode));
  m.impl("pull_reduce", TORCH_BOX(&zpp::pull_reduce));
  m.impl("pull_reencode", TORCH_BOX(&zpp::pull_reencode));
}
