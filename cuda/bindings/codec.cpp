// The torch operators: schemas, and the plans that kernels run.
//
// All checks come before any launch. Nothing here reads device memory or waits for the device.
#include "bindings/fill.h"

namespace zpp {
namespace {

void encode(std::vector<Tensor> sources, Tensor table, int64_t key,
            std::optional<Tensor> noise_rows, Tensor out, std::optional<Tensor> errors) {
  Call const call = begin(out, "out", table);
  check_payload(out, 2, "out", call, false);
  check_count(sources, call, "sources");
  Plan plan = {};
  set_output(plan, out, key, noise_rows, call);
  set_errors(plan, errors, call);
  run(plan, call, out.size(0), [&](int64_t s, Segment& seg) {
    Dtype dtype;
    seg.from = parameter_view(sources[s], call, seg.numel, out.size(0), "sources", dtype);
    seg.from_dtype = uint8_t(dtype);
    seg.from_len = seg.numel;
    view_raw_output(plan, call, s, seg);
    seg.copy = seg.to_codec.raw && same_floats(seg);
  }, [](Plan& p, Flags f, void* stream) {
    if (p.errors) return launch_encode_errors(p, stream);
    return launch_encode(p, f.stochastic, f.rotated, stream);
  }, errors);
}

// onto: what block codecs have encoded is added to `outs`; ok: a bool, false where nothing changes.
void decode(Tensor payload, Tensor table, std::vector<Tensor> outs, bool onto,
            std::optional<Tensor> ok) {
  Call const call = begin(payload, "payload", table);
  check_payload(payload, 2, "payload", call, true);
  check_count(outs, call, "outs");
  Plan plan = {};
  set_input(plan, payload);
  plan.onto = onto;
  if (ok) plan.ok = static_cast<bool*>(checked(*ok, ScalarType::Bool, 1, call.device, "ok"));
  run(plan, call, payload.size(0), [&](int64_t s, Segment& seg) {
    Dtype dtype;
    seg.to = parameter_view(outs[s], call, seg.numel, payload.size(0), "outs", dtype);
    seg.to_dtype = uint8_t(dtype);
    seg.to_len = seg.numel;
    view_raw_input(plan, call, s, seg);
    seg.copy = seg.from_codec.raw && same_floats(seg);
  }, [](Plan& p, Flags f, void* stream) { return launch_decode(p, f.rotated, stream); });
}

void decode_sum(Tensor payload, Tensor table, Tensor sums) {
  Call const call = begin(payload, "payload", table);
  check_payload(payload, 3, "payload", call, true);
  check_sums(sums, call, payload.size(1));
  Plan plan = {};
  set_input(plan, payload);
  if (plan.k == 0) return;
  run(plan, call, payload.size(1), [&](int64_t s, Segment& seg) {
    seg.to = matrix_view(sums, Dtype::fp32, call.at(s, SUM_OFFSET));
    seg.to_dtype = uint8_t(Dtype::fp32);
    seg.to_len = seg.from_len;
    seg.inverse = 0;  // sums stay in the rotated domain
    view_raw_input(plan, call, s, seg);
  }, [](Plan& p, Flags, void* stream) { return launch_decode_sum(p, stream); });
}

void reduce(Tensor payload, Tensor table, Tensor out) {
  Call const call = begin(payload, "payload", table);
  check_payload(payload, 3, "payload", call, true);
  check_width(out, width_of(call, PLAIN_OFFSET, NUMEL), "out");
  Dtype const dtype = check_matrix(out, out.size(1), "out", call);
  check_hop(payload, out);
  Plan plan = {};
  set_input(plan, payload);
  run(plan, call, payload.size(1), [&](int64_t s, Segment& seg) {
    seg.to = matrix_view(out, dtype, call.at(s, PLAIN_OFFSET));
    seg.to_dtype = uint8_t(dtype);
    seg.to_len = seg.numel;
    view_raw_input(plan, call, s, seg);
  }, [](Plan& p, Flags f, void* stream) { return launch_reduce(p, f.rotated, stream); });
}

void encode_sums(Tensor sums, Tensor table, int64_t key,
                 std::optional<Tensor> noise_rows, Tensor out) {
  Call const call = begin(out, "out", table);
  check_payload(out, 2, "out", call, false);
  check_sums(sums, call, out.size(0));
  Plan plan = {};
  set_output(plan, out, key, noise_rows, call);
  run(plan, call, out.size(0), [&](int64_t s, Segment& seg) {
    seg.from = matrix_view(sums, Dtype::fp32, call.at(s, SUM_OFFSET));
    seg.from_dtype = uint8_t(Dtype::fp32);
    view_raw_output(plan, call, s, seg);
    seg.copy = seg.to_codec.raw && same_floats(seg) && !seg.inverse;
  }, [](Plan& p, Flags f, void* stream) {
    return launch_encode(p, f.stochastic, f.rotated, stream);
  });
}

// encode, or encode_sums where `sums` is the one source, of what memories, or what nodes keep, make of
// the sources.
void encode_remembering(std::vector<Tensor> sources, bool sums, Tensor table, int64_t key,
                        std::optional<Tensor> noise_rows, Tensor out, Tensor settings,
                        std::vector<Tensor> from, std::vector<Tensor> to) {
  Call const call = begin(out, "out", table);
  int64_t const rows = out.size(0);
  check_payload(out, 2, "out", call, false);
  if (!sums) check_count(sources, call, "sources");
  if (sums) check_sums(sources.at(0), call, rows);
  check_count(from, call, "from"), check_count(to, call, "to");
  STD_TORCH_CHECK(settings.is_cpu() && settings.scalar_type() == ScalarType::Long &&
                      settings.is_contiguous() && settings.numel() == 3 * call.segments,
                  "settings: must be a contiguous int64 host tensor [segments, 3]");
  RememberPlan plan = {};
  set_output(plan, out, key, noise_rows, call);
  run(plan, call, rows, [&](int64_t s, Segment& seg) {
    Dtype dtype = Dtype::fp32;
    if (sums) {
      seg.from = matrix_view(sources[0], dtype, call.at(s, SUM_OFFSET));
    } else {
      seg.from = parameter_view(sources[s], call, seg.numel, rows, "sources", dtype);
      seg.from_len = seg.numel;
    }
    seg.from_dtype = uint8_t(dtype);
    view_raw_output(plan, call, s, seg);
    Memory& memory = plan.memory[plan.segments];
    memory = memory_at(settings, from[s], to[s], s, rows, seg, call);
    bool const as_it_is = memory.store == Store::none && !seg.inverse;
    seg.copy = seg.to_codec.raw && same_floats(seg) && as_it_is;
    STD_TORCH_CHECK(!memory.to || !(seg.to_codec.raw || seg.inverse),
                    "memory: of raw segments, or in a domain that is left, there is none");
  }, [](RememberPlan& p, Flags, void* stream) { return launch_encode_remembering(p, stream); });
}

void finish_sums(Tensor sums, Tensor table, Tensor out) {
  Call const call = begin(sums, "sums", table);
  check_width(sums, width_of(call, SUM_OFFSET, FROM_CODED), "sums");
  check_width(out, width_of(call, PLAIN_OFFSET, NUMEL), "out");
  Dtype const from = check_matrix(sums, sums.size(1), "sums", call);
  Dtype const to = check_matrix(out, out.size(1), "out", call);
  STD_TORCH_CHECK(sums.size(0) == out.size(0), "out: needs ", sums.size(0), " rows");
  Plan plan = {};
  run(plan, call, out.size(0), [&](int64_t s, Segment& seg) {
    seg.from = matrix_view(sums, from, call.at(s, SUM_OFFSET));
    seg.to = matrix_view(out, to, call.at(s, PLAIN_OFFSET));
    seg.from_dtype = uint8_t(from), seg.to_dtype = uint8_t(to);
    seg.to_len = seg.numel;
  }, [](Plan& p, Flags, void* stream) { return launch_finish_sums(p, stream); });
}

void decode_sum_encode(Tensor payload, Tensor table, int64_t key,
                       std::optional<Tensor> noise_rows, Tensor out) {
  Call const call = begin(payload, "payload", table);
  check_payload(payload, 3, "payload", call, true);
  check_payload(out, 2, "out", call, false);
  check_hop(payload, out);
  Plan plan = {};
  set_input(plan, payload);
  set_output(plan, out, key, noise_rows, call);
  run(plan, call, out.size(0), [&](int64_t s, Segment& seg) {
    view_raw_input(plan, call, s, seg);
    view_raw_output(plan, call, s, seg);
  }, [](Plan& p, Flags f, void* stream) {
    return launch_decode_sum_encode(p, f.stochastic, f.rotated, stream);
  });
}

}  // namespace
}  // namespace zpp

STABLE_TORCH_LIBRARY(zpp_lab, m) {
  m.def("encode(Tensor[] sources, Tensor table, int key, Tensor? noise_rows, Tensor(a!) out, "
        "Tensor(b!)? errors=None) -> ()");
  m.def("decode(Tensor payload, Tensor table, Tensor(a!)[] outs, bool onto=False, "
        "Tensor? ok=None) -> ()");
  m.def("decode_sum(Tensor payload, Tensor table, Tensor(a!) sums) -> ()");
  m.def("reduce(Tensor payload, Tensor table, Tensor(a!) out) -> ()");
  m.def("encode_sums(Tensor sums, Tensor table, int key, Tensor? noise_rows, Tensor(a!) out) "
        "-> ()");
  m.def("encode_remembering(Tensor[] sources, bool sums, Tensor table, int key, "
        "Tensor? noise_rows, Tensor(a!) out, Tensor settings, Tensor[] before, "
        "Tensor(b!)[] after) -> ()");
  m.def("finish_sums(Tensor sums, Tensor table, Tensor(a!) out) -> ()");
  m.def("decode_sum_encode(Tensor payload, Tensor table, int key, Tensor? noise_rows, "
        "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CUDA, m) {
  m.impl("encode", TORCH_BOX(&zpp::encode));
  m.impl("decode", TORCH_BOX(&zpp::decode));
  m.impl("decode_sum", TORCH_BOX(&zpp::decode_sum));
  m.impl("reduce", TORCH_BOX(&zpp::reduce));
  m.impl("encode_sums", TORCH_BOX(&zpp::encode_sums));
  m.impl("encode_remembering", TORCH_BOX(&zpp::encode_remembering));
  m.impl("finish_sums", TORCH_BOX(&zpp::finish_sums));
  m.impl("decode_sum_encode", TORCH_BOX(&zpp::decode_sum_encode));
}
