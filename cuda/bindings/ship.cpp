// The operator of shipments over peer memory: its schema and every check.
#include <optional>

#include "bindings/checked.h"
#include "peer/ship.h"

namespace zpp {
namespace {

char* bytes_of(Tensor const& t, char const* name, int32_t device) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == device, name, ": must be on out's device");
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Byte && t.is_contiguous(), name,
                  ": must be contiguous uint8");
  auto const data = static_cast<char*>(t.data_ptr());
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0, name,
                  ": must start at a multiple of 16 bytes");
  return data;
}

// Meets the link's other ranks, then copies their rows to `out`. held: what this rank's room shall
// have before; keep [k, row]: takes every (rows / k)th row of `out`, from this rank's place modulo
// that step on. watch: a cudaEvent_t or 0.
void ship_tensors(Tensor out, Tensor route, int64_t watch, std::optional<Tensor> held,
                  std::optional<Tensor> keep) {
  STD_TORCH_CHECK(out.is_cuda(), "out: must be on a CUDA device");
  STD_TORCH_CHECK(route.is_cpu() && route.scalar_type() == ScalarType::Long && route.dim() == 1 &&
                      route.is_contiguous() && route.size(0) > ROUTE_COLUMNS &&
                      (route.size(0) - ROUTE_COLUMNS) % 2 == 0,
                  "route: must be a contiguous int64 host tensor with two columns a copy");
  int32_t const device = out.get_device_index();
  Shipment s = {};
  s.route = static_cast<int64_t const*>(route.const_data_ptr());
  s.copies = (route.size(0) - ROUTE_COLUMNS) / 2;
  int64_t const row = s.route[ROUTE_ROW];
  STD_TORCH_CHECK(row % 16 == 0, "rows: must be multiples of 16 bytes");
  s.out = bytes_of(out, "out", device);
  STD_TORCH_CHECK(out.numel() == s.copies * row, "out: needs ", s.copies * row, " bytes, has ",
                  out.numel());
  if (held) {
    s.held = bytes_of(*held, "held", device);
    STD_TORCH_CHECK(held->numel() == s.route[ROUTE_OWN] * row, "held: must fill the room");
  }
  if (keep) {
    s.keep = bytes_of(*keep, "keep", device), s.kept = keep->size(0);
    STD_TORCH_CHECK(s.kept > 0 && s.copies % s.kept == 0 && keep->numel() == s.kept * row,
                    "keep: must be [k, ", row, "], with k a divisor of ", s.copies);
  }
  s.watch = reinterpret_cast<void*>(watch);
  if (row == 0) return;
  DeviceGuard const guard(device);
  int const error = ship(s, stream_of(device));
  STD_TORCH_CHECK(error == 0, "a shipment could not be started, CUDA error ", error);
}

}  // namespace
}  // namespace zpp

STABLE_TORCH_LIBRARY_FRAGMENT(zpp_lab, m) {
  m.def("ship(Tensor(a!) out, Tensor route, int watch, Tensor? held, Tensor(b!)? keep) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(zpp_lab, CUDA, m) { m.impl("ship", TORCH_BOX(&zpp::ship_tensors)); }
