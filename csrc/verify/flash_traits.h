// Shapes, roles and shared memory of the bf16 flash kernel. Values here change speed, never results.
#pragma once
#include <cstdint>

#include "../params.h"

namespace tpv {

// A block holds GROUPS x 16 MT query rows (row = node * heads + head) against tiles of 16 tokens. A group has two QK warps,
// which compute nothing but scores over half of the dims each, and four PV warps with 128 of the 512 output dims each.
template <int GROUPS, int MT>
struct FlashTraits {
  static constexpr int kGroups = GROUPS, kMTiles = MT;
  static constexpr int kGroupRows = 16 * MT, kRows = GROUPS * kGroupRows;
  static constexpr int kTokens = 16;
  static constexpr int kQueryTiles = kRows / 16;         // tiles of queries, which go through the ring before an item's tokens

  static constexpr int kQkWarps = 2 * GROUPS, kPvWarps = 4 * GROUPS;
  static constexpr int kThreads = 32 * (kQkWarps + kPvWarps);
  static constexpr int kCopyRows = 16 / kPvWarps;        // rows of a tile that each PV warp fetches

  static constexpr int kSteps = kRow / 16 / 2;           // k-steps of 16 dims in half a row
  static constexpr int kSpilledSteps = GROUPS * MT == 4 ? 3 : 0;  // of these, steps whose Q fragments live in shared memory
  static constexpr int kHeldSteps = kSteps - kSpilledSteps;

  // 16 bytes more than a row: eight consecutive rows then start in different banks.
  static constexpr int kPitch = kRow * 2 + 16;
  static constexpr int kTileBytes = 16 * kPitch;
  static constexpr int kSlots = kRows == 16 ? 5 : 4;  // a short chain of products leaves more of the time to the copies

  // Whether a block's first tokens come by the code of a whole tile: PV warps then are there before the scores, not after
  // them. With more rows it changes nothing but how ptxas orders the loops.
  static constexpr bool kWholeFirst = kRows == 16;

  // Of each QK warp: [fragment][register][lane] scores of 16 MT rows x 16 tokens, then [spilled step][m tile][lane] uint4 of Q.
  static constexpr int kScoreBytes = MT * 1024;
  static constexpr int kQkBytes = kScoreBytes + kSpilledSteps * MT * 512;
  static constexpr int kQkOffset = kSlots * kTileBytes;
  static constexpr int kProbOffset = kQkOffset + kQkWarps * kQkBytes;  // [buffer][m tile][8 tokens][row] uint4
  static constexpr int kProbBytes = GROUPS * MT * 512;
  static constexpr int kSumOffset = kProbOffset + 2 * kProbBytes;      // [m tile][8 tokens][row of it]
  static constexpr int kMaximumOffset = kSumOffset + GROUPS * MT * 128;  // [PV warp][m tile][row % 8][row / 8] float
  static constexpr int kExceedsOffset = kMaximumOffset + kPvWarps * MT * 64;  // [group][buffer] step
  static constexpr int kBarrierOffset = kExceedsOffset + GROUPS * 8;
  static constexpr int kBarriers = 2 * kSlots + 2 * GROUPS;
  static constexpr int kSharedBytes = kBarrierOffset + 8 * kBarriers;
  static_assert(kSharedBytes <= kSharedLimit, "more shared memory than a block has on sm_120");
};

}  // namespace tpv
