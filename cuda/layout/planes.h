// Where the parts of a coded segment lie in a payload row. No CUDA here: the host compiles it too.
#pragma once

#include <cstdint>

namespace zpp {

constexpr int TILE = 8192;       // elements of one thread block's work, and the largest block
constexpr int WARP_TILE = 1024;  // elements of one warp's work

struct Codec {
  uint8_t raw;          // 1: the segment travels as floats of `dtype`
  uint8_t bits;         // 2, 3, 4, 6, 8
  uint8_t log2_block;   // 4 ... 13
  uint8_t symmetric;    // 2: levels for normal numbers, of 2, 3 or 4 bits
  uint8_t bf16_scale;
  uint8_t log2_group;   // the Hadamard rotation's width, 0 for none
  uint8_t signs;
  uint8_t stochastic;
};

struct Planes {
  int64_t codes, high, scales;      // bytes from the row's start; high for 3 and 6 bits only
  int32_t codes_step, scales_step;  // bytes of one tile; of its high bits TILE / 8 each
};

// The bits of a code that lie in the second plane.
constexpr int high_bits(int bits) { return bits == 6 ? 2 : bits == 3 ? 1 : 0; }

// The parts of a segment of `numel` elements that starts at `offset`.
inline Planes planes_of(int64_t offset, Codec const& codec, int64_t numel) {
  auto const plane = [&](int width) { return ((numel * width + 7) / 8 + 15) / 16 * 16; };
  int const second = high_bits(codec.bits), width = codec.bits - second;
  int64_t const high = offset + plane(width);
  int32_t const each = (codec.bf16_scale ? 2 : 4) * (codec.symmetric ? 1 : 2);
  return {offset, high, high + plane(second), TILE / 8 * width,
          (TILE >> codec.log2_block) * each};
}

}  // namespace zpp
