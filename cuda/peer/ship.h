// One shipment over memory that the ranks of a link read from each other, as the host gives it
// to the device: the plan that bindings/ship.cpp takes from tensors, and ship.cu carries out.
#pragma once

#include <cstdint>

namespace zpp {

// A host table int64, made once for a place in a slot by zpp_lab/collectives/peer/slots.py: these
// columns, then for every copy its source and its row in `out`.
enum Route {
  ROUTE_RANK,     // this rank's place on the link
  ROUTE_MEMBERS,
  ROUTE_PADS,     // uint32_t* const*, on the device: a pad of flags of each member
  ROUTE_COUNT,    // uint32_t*, on the device: how many meetings there have been on this memory
  ROUTE_ROOM,     // where this rank's rows start in its slot
  ROUTE_READ,     // cudaEvent_t: this rank's reads of the latest use
  ROUTE_MET,      // cudaEvent_t: the meeting for this slot
  ROUTE_LANE,     // cudaStream_t for copies inside this device
  ROUTE_HOME,     // cudaEvent_t: those copies
  ROUTE_ROW,      // bytes of a row
  ROUTE_OWN,      // the first copies, which come from this rank's room
  ROUTE_COLUMNS
};

struct Shipment {
  int64_t const* route;
  int64_t copies;
  char* out;            // [copies, row]
  char const* held;     // the room's rows, where they are not there yet
  char* keep;           // [kept, row]: rows of `out` to copy once they are there
  int64_t kept;
  void* watch;          // cudaEvent_t: the meeting, for the watchdog; or null
};

// Everything goes to `stream`, a cudaStream_t. Returns a cudaError_t.
int ship(Shipment const&, void* stream);

}  // namespace zpp
