// decode, reduce and decode_sum_encode of payload rows that lie in the memory of several GPUs.
#include <algorithm>
#include <atomic>

#include "pull.cuh"

namespace zpp {
namespace {

constexpr int DECODE_TEAMS = 4, REDUCE_TEAMS = 2;  // by the registers that they need
constexpr int REENCODE_BLOCKS = 2;  // a multiprocessor; its teams meet, so a block has one

// Decodes, or sums (SUM) and finishes the sums.
template <bool SUM, bool ROTATED>
__global__ void __launch_bounds__((SUM ? REDUCE_TEAMS : DECODE_TEAMS) * THREADS, 1)
    pull_kernel(__grid_constant__ Pulled const p) {
  Flow<SUM> flow(p);
#pragma unroll 1
  while (flow.now.tile < p.plan.tiles) {
    Place at;
    char const* row = row_at<SUM>(p, flow.now, at);
    Segment const& s = at.segment();
    if constexpr (!SUM) {
      if (s.copy) {
        s.from_dtype == uint8_t(Dtype::fp32) ? copy_row<uint32_t>(row, at)
                                             : copy_row<uint16_t>(row, at);
        flow.advance(p);
        continue;
      }
    }
    Tile x;
    take_tile<SUM>(p, flow, row, at, x);
    if constexpr (ROTATED) change_domain(s, at, x);
    store_floats(s.to, s.to_dtype, at, s.to_len, false, x);
  }
}

template <bool STOCHASTIC, bool ROTATED>
__global__ void __launch_bounds__(THREADS, REENCODE_BLOCKS)
    pull_reencode_kernel(__grid_constant__ Pulled const p) {
  Flow<true> flow(p);
#pragma unroll 1
  while (flow.now.tile < p.plan.tiles) {
    Place at;
    char const* row = row_at<true>(p, flow.now, at);
    Segment const& s = at.segment();
    Tile x;
    take_tile<true>(p, flow, row, at, x);
    if constexpr (ROTATED) change_domain(s, at, x);
    encode_tile<STOCHASTIC>(p.plan, at, x);
  }
}

struct Device {
  int index, multiprocessors, shared_bytes;
};

Device device() {
  Device d = {};
  cudaGetDevice(&d.index);
  cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, d.index);
  cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, d.index);
  return d;
}

// Blocks of up to `most` teams, `each` of them on a multiprocessor.
template <auto KERNEL, bool SUM>
int launch_pulled(Pulled const& p, int most, int each, int multiprocessors, void* stream) {
  static std::atomic<int> known[64];  // teams of a block, by device
  if (p.plan.tiles == 0) return cudaSuccess;
  Device const d = device();
  std::atomic<int>& slot = known[d.index & 63];
  int teams = slot.load(std::memory_order_relaxed);
  if (!teams) {
    teams = std::clamp(d.shared_bytes / TEAM_BYTES<SUM>, 1, most);
    cudaError_t const error = cudaFuncSetAttribute(
        KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, teams * TEAM_BYTES<SUM>);
    if (error != cudaSuccess) return error;
    slot.store(teams, std::memory_order_relaxed);
  }
  int const wide = multiprocessors ? std::min(multiprocessors, d.multiprocessors) : d.multiprocessors;
  uint32_t const wanted = (p.plan.tiles + teams - 1) / teams;
  uint32_t const blocks = std::min(wanted, uint32_t(wide * each));
  KERNEL<<<blocks, teams * THREADS, teams * TEAM_BYTES<SUM>,
           static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace

template <bool SUM>
int launch_pull(Pulled const& p, bool rotated, int wide, void* stream) {
  constexpr int most = SUM ? REDUCE_TEAMS : DECODE_TEAMS;
  if (rotated) return launch_pulled<pull_kernel<SUM, true>, SUM>(p, most, 1, wide, stream);
  return launch_pulled<pull_kernel<SUM, false>, SUM>(p, most, 1, wide, stream);
}

int launch_pull_decode(Pulled const& p, bool rotated, int wide, void* stream) {
  return launch_pull<false>(p, rotated, wide, stream);
}

int launch_pull_reduce(Pulled const& p, bool rotated, int wide, void* stream) {
  return launch_pull<true>(p, rotated, wide, stream);
}

template <bool STOCHASTIC>
int launch_reencode(Pulled const& p, bool rotated, int wide, void* stream) {
  constexpr int each = REENCODE_BLOCKS;
  if (rotated) {
    return launch_pulled<pull_reencode_kernel<STOCHASTIC, true>, true>(p, 1, each, wide, stream);
  }
  return launch_pulled<pull_reencode_kernel<STOCHASTIC, false>, true>(p, 1, each, wide, stream);
}

int launch_pull_reencode(
    Pulled const& p, bool stochastic, bool rotated, int wide, void* stream) {
  return stochastic ? launch_reencode<true>(p, rotated, wide, stream)
                    : launch_reencode<false>(p, rotated, wide, stream);
}

}  // namespace zpp
