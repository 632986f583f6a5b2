// A shipment in one call: meet the link's other ranks, then copy rows out of their slots.
//
// The order of zpp_lab/collectives/peer/slots.py (Ring.ship), without the host's way
// through Python between its dozen small steps.
#include <cuda_runtime.h>

#include <algorithm>

#include "peer/ship.h"

namespace zpp {
namespace {

constexpr int64_t KERNEL_BYTES = int64_t(32) << 20;  // up to here one kernel copies everything
constexpr int MAX_COPIES = 64;                       // and as many rows
constexpr int COPY_THREADS = 512;
constexpr int COPY_BLOCKS = 128;  // they leave most multiprocessors' threads to the model
constexpr int AT_ONCE = 4;        // words of 16 bytes that a thread has under way

// Flags of this file lie behind those of torch's own barrier, which counts differently.
__device__ uint32_t* flag(uint32_t* const* pads, int of, int from, int members) {
  return pads[of] + members + from;
}

// Each rank writes the meeting's number into every other's pad, then waits for theirs. Numbers
// only grow, so one that is overwritten by the next is still seen. The device counts, not the host,
// so that a CUDA graph can be replayed. Meetings over one memory follow one another.
__global__ void meet_kernel(uint32_t* const* pads, int rank, int members, uint32_t* count) {
  int const peer = int(threadIdx.x);
  uint32_t const meeting = *count + 1;
  __syncthreads();
  if (peer == 0) *count = meeting;
  if (peer >= members || peer == rank) return;
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(pads, peer, rank, members)),
               "r"(meeting)
               : "memory");
  uint32_t seen;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                 : "=r"(seen)
                 : "l"(flag(pads, rank, peer, members))
                 : "memory");
  } while (int32_t(seen - meeting) < 0);
}

struct Copies {
  uint4 const* source[MAX_COPIES];
  uint4* out[MAX_COPIES];
};

// Block (x, y) takes its share of copy y, `words` of 16 bytes long.
__global__ void __launch_bounds__(COPY_THREADS)
    copy_kernel(__grid_constant__ Copies const copies, int64_t words) {
  uint4 const* source = copies.source[blockIdx.y];
  uint4* out = copies.out[blockIdx.y];
  int64_t const step = int64_t(gridDim.x) * COPY_THREADS;
  int64_t i = int64_t(blockIdx.x) * COPY_THREADS + threadIdx.x;
  for (; i + (AT_ONCE - 1) * step < words; i += AT_ONCE * step) {
    uint4 held[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) held[j] = source[i + j * step];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) out[i + j * step] = held[j];
  }
  for (; i < words; i += step) out[i] = source[i];
}

#define TRY(call) \
  if (cudaError_t const error = (call)) return error

struct Way {
  Shipment const& s;
  cudaStream_t stream;

  int64_t operator[](Route column) const { return s.route[column]; }
  cudaEvent_t event(Route column) const { return reinterpret_cast<cudaEvent_t>((*this)[column]); }
  char const* source(int64_t i) const {
    return reinterpret_cast<char const*>(s.route[ROUTE_COLUMNS + 2 * i]);
  }
  char* target(int64_t i) const {
    return s.out + s.route[ROUTE_COLUMNS + 2 * i + 1] * (*this)[ROUTE_ROW];
  }

  cudaError_t copy(void* to, void const* from, int64_t bytes, cudaStream_t on) const {
    return cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, on);
  }

  cudaError_t meet() const {
    TRY(cudaStreamWaitEvent(stream, event(ROUTE_READ)));
    int const members = int((*this)[ROUTE_MEMBERS]);
    auto pads = reinterpret_cast<uint32_t* const*>((*this)[ROUTE_PADS]);
    meet_kernel<<<1, (members + 31) / 32 * 32, 0, stream>>>(
        pads, int((*this)[ROUTE_RANK]), members,
        reinterpret_cast<uint32_t*>((*this)[ROUTE_COUNT]));
    TRY(cudaGetLastError());
    TRY(cudaEventRecord(event(ROUTE_MET), stream));
    return s.watch ? cudaEventRecord(static_cast<cudaEvent_t>(s.watch), stream) : cudaSuccess;
  }

  cudaError_t pull_by_kernel() const {
    Copies copies = {};
    for (int64_t i = 0; i < s.copies; ++i) {
      copies.source[i] = reinterpret_cast<uint4 const*>(source(i));
      copies.out[i] = reinterpret_cast<uint4*>(target(i));
    }
    int64_t const words = (*this)[ROUTE_ROW] / 16, most = COPY_BLOCKS / s.copies;
    int64_t const wanted = (words + COPY_THREADS * AT_ONCE - 1) / (COPY_THREADS * AT_ONCE);
    dim3 const grid(unsigned(std::clamp<int64_t>(most, 1, std::max<int64_t>(wanted, 1))),
                    unsigned(s.copies));
    copy_kernel<<<grid, COPY_THREADS, 0, stream>>>(copies, words);
    return cudaGetLastError();
  }

  // Own rows beside the links. The others one after the other: side by side they share links
  // that two ranks pull over.
  cudaError_t pull_by_engines() const {
    auto const lane = reinterpret_cast<cudaStream_t>((*this)[ROUTE_LANE]);
    int64_t const own = (*this)[ROUTE_OWN], row = (*this)[ROUTE_ROW];
    TRY(cudaStreamWaitEvent(lane, event(ROUTE_MET)));
    for (int64_t i = 0; i < own; ++i) TRY(copy(target(i), source(i), row, lane));
    TRY(cudaEventRecord(event(ROUTE_HOME), lane));
    for (int64_t i = own; i < s.copies; ++i) TRY(copy(target(i), source(i), row, stream));
    return cudaStreamWaitEvent(stream, event(ROUTE_HOME));
  }

  cudaError_t keep() const {
    if (!s.kept) return cudaSuccess;
    int64_t const row = (*this)[ROUTE_ROW], step = s.copies / s.kept;
    int64_t const first = (*this)[ROUTE_RANK] % step;
    for (int64_t i = 0; i < s.kept; ++i) {
      TRY(copy(s.keep + i * row, s.out + (first + i * step) * row, row, stream));
    }
    return cudaSuccess;
  }

  cudaError_t go() const {
    int64_t const row = (*this)[ROUTE_ROW];
    if (s.held) {
      auto room = reinterpret_cast<char*>((*this)[ROUTE_ROOM]);
      TRY(copy(room, s.held, (*this)[ROUTE_OWN] * row, stream));
    }
    TRY(meet());
    bool const small = s.copies * row <= KERNEL_BYTES && s.copies <= MAX_COPIES;
    TRY(small ? pull_by_kernel() : pull_by_engines());
    TRY(keep());
    return cudaEventRecord(event(ROUTE_READ), stream);
  }
};

}  // namespace

int ship(Shipment const& shipment, void* stream) {
  return Way{shipment, static_cast<cudaStream_t>(stream)}.go();
}

}  // namespace zpp
