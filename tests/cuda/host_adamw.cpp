// The operator adamw on the CPU, for test_adamw.py: bindings/adamw.cpp as it is, registered under
// another name for tensors that lie here, and before it a twin of adamw.cu that runs the same code
// of adamw.cuh warp by warp, a lane after the other.
#include "optim/adamw.cuh"

namespace zpp {

constexpr uint32_t STRIDE = 7;  // warps, fewer than most parts have blocks

template <class S, bool PLANES, bool WHOLE>
void update_block(AdamW const& plan, Part const& p, Rates const& r, uint32_t block) {
  Moments m[32][8], most = {0.0f, 0.0f};
  for (int lane = 0; lane < 32; ++lane) {
    Moments const own = advance<S, PLANES, WHOLE>(plan, p, r, block, lane_of(p, block, lane), m[lane]);
    most = {larger(most.first, own.first), larger(most.second, own.second)};
  }
  if (S::SCALED) p.first_scale[block] = most.first, p.second_scale[block] = most.second;
  for (int lane = 0; lane < 32; ++lane) {
    keep<S, WHOLE>(plan, p, lane_of(p, block, lane), most, m[lane]);
  }
}

template <class S, bool PLANES>
void run_warp(AdamW const& plan, uint32_t block) {
  float const factor = plan.factor ? *plan.factor : 1.0f;
  for (int i = 0; i < plan.parts; ++i) {
    Part const& p = plan.part[i];
    Rates const r = {plan.rates[i], plan.roots[i], factor};
    for (; block < p.blocks; block += STRIDE) {
      p.whole ? update_block<S, PLANES, true>(plan, p, r, block)
              : update_block<S, PLANES, false>(plan, p, r, block);
    }
    block -= p.blocks;
  }
}

template <class S>
void run_warps(AdamW const& plan) {
  for (uint32_t warp = 0; warp < STRIDE; ++warp) {
    plan.planes ? run_warp<S, true>(plan, warp) : run_warp<S, false>(plan, warp);
  }
}

int launch_adamw(AdamW const& plan, State state, void*) {
  if (plan.ok && !*plan.ok) return 0;
  if (state == State::fp32) run_warps<Fp32>(plan);
  if (state == State::bf16) run_warps<Bf16>(plan);
  if (state == State::byte) run_warps<Byte>(plan);
  return 0;
}

}  // namespace zpp

#include "on_host.h"
#include "bindings/adamw.cpp"
