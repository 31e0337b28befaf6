// The QK warps: raw scores of a group's rows against each tile, for the PV warps.
#pragma once
#include <cmath>

#include "flash_block.cuh"

namespace tpv {

// A score is the sum of two halves over 288 dims. With two m tiles in a group each warp computes one half for both, and the
// PV warps add them; with one, the warp computes both halves and adds them here. Either way the same sums.
template <class T>
struct QkWarp : FlashBlock<T> {
  static constexpr bool kPair = T::kMTiles == 2;
  // Not kept: a register less.
  __device__ static int warp() { return opaque(threadIdx.x) / 32; }
  uint32_t q[T::kHeldSteps][2][4];  // second index: m tile of a pair, else half of the dims

  __device__ QkWarp(const FlashBlock<T>& block) : FlashBlock<T>(block) {}

  __device__ void run() {
    uint32_t count = 0;
    for (int i = blockIdx.x; i < this->items(); i += gridDim.x) {
      load_q(this->item(i));
      int tiles, plain;
      this->count_tiles(this->item(i), tiles, plain);
      for (int left = plain; left > 0; --left) advance<false>(i, 0, count++);
      this->count_tiles(this->item(i), tiles, plain);
      for (int left = tiles - plain; left > 0; --left) advance<true>(i, left, count++);
    }
  }

 private:
  // A fragments straight from global memory; k-steps that do not fit in registers go to shared memory.
  __device__ void load_q(const WorkItem& item) {
    const int last = this->rows_of(item) - 1;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m_tile = kPair ? warp() / 2 * 2 + j : warp(), half = kPair ? warp() % 2 : j;
      const uint32_t* source[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Rows beyond the last repeat it; nothing of them is stored.
        const int row = min(item.row_tile * T::kRows + 16 * m_tile + 8 * r + this->lane() / 4, last);
        source[r] = reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(this->p.q) +
                                                      this->node_of(item, row) * this->p.q_stride_node +
                                                      row % this->p.heads * this->p.q_stride_head) +
                    half * T::kSteps * 8 + this->lane() % 4;
      }
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
        uint32_t a[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = __ldg(source[r & 1] + 8 * s + 4 * (r >> 1));
        if (is_spilled(s)) {
          store_shared(spilled(spilled_before(s), j), a[0], a[1], a[2], a[3]);
        } else {
#pragma unroll
          for (int r = 0; r < 4; ++r) q[is_spilled(s) ? 0 : s - spilled_before(s)][j][r] = a[r];
        }
      }
    }
    __syncwarp();
  }

  // Spilled steps are spread over a row, so that each is loaded well before its use.
  static constexpr int kSpread = T::kSpilledSteps ? T::kSteps / T::kSpilledSteps : 1;
  __device__ static constexpr bool is_spilled(int s) { return T::kSpilledSteps && s % kSpread == 0; }
  __device__ static constexpr int spilled_before(int s) { return T::kSpilledSteps ? (s + kSpread - 1) / kSpread : 0; }

  __device__ void load_spilled(uint32_t (&a)[2][4], int s) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) load_shared(a[j], spilled(s, j));
  }

  __device__ uint32_t spilled(int s, int j) const {
    return this->smem() + T::kSpillOffset + ((warp() * T::kSpilledSteps + s) * 2 + j) * 512 + this->lane() * 16;
  }

  // TREE: some of the tile's tokens are hidden from some rows, or lie beyond the item's end. It is the `left`th from the last.
  template <bool TREE>
  __device__ void advance(int index, int left, uint32_t count) {
    float partial[2][2][4] = {};  // [m tile or half][8 tokens][fragment]
    uint32_t spill[2][4];
    if (T::kSpilledSteps) load_spilled(spill, 0);  // while the tile arrives
    barrier_wait(this->full(count), this->tile_parity(count));
    // Lanes 0-7 and 16-23 address tokens 0-7 and 8-15, the other lanes the same tokens 8 dims on.
    const uint32_t k = this->tile(count) + (this->lane() % 8 + this->lane() / 16 * 8) * T::kPitch + this->lane() / 8 % 2 * 16 +
                       (kPair ? warp() % 2 * T::kSteps * 32 : 0);
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      uint32_t b[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j == 0 || !kPair) load_matrix(b, k + 32 * s + (kPair ? 0 : j * T::kSteps * 32));
        const uint32_t(&a)[4] = is_spilled(s) ? spill[j] : q[is_spilled(s) ? 0 : s - spilled_before(s)][j];
        mma_bf16(partial[j][0], a, b[0], b[1]);
        mma_bf16(partial[j][1], a, b[2], b[3]);
      }
      if (is_spilled(s) && spilled_before(s) + 1 < T::kSpilledSteps) load_spilled(spill, spilled_before(s) + 1);
    }
    this->arrive(this->empty(count));
    if (TREE) {
#pragma unroll
      for (int j = 0; j < 2; ++j) mask(index, left, kPair ? warp() / 2 * 2 + j : warp(), partial[j]);
    }

    const int group = kPair ? warp() / 2 : warp();
    barrier_wait(this->scores_empty(group), (count & 1) ^ 1);
    const uint32_t target = this->group_region(group) + warp() % T::kMTiles * T::kWarpScoreBytes + this->lane() * 16;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float(&a)[4] = partial[0][n];
      const float(&b)[4] = partial[1][n];
      if constexpr (kPair) {
        store_shared(target + n * 512, a[0], a[1], a[2], a[3]);
        store_shared(target + 1024 + n * 512, b[0], b[1], b[2], b[3]);
      } else {
        store_shared(target + n * 512, a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]);
      }
    }
    this->arrive(this->scores_full(group));
  }

  // Both halves of a hidden score become -inf. Fragment r of tokens 8 n: row r / 2, token 8 n + 2 (lane % 4) + r % 2.
  __device__ void mask(int index, int left, int m_tile, float (&score)[2][4]) const {
    const WorkItem item = this->item(index);
    const int first_token = item.begin + (this->tiles_of(item) - left) * T::kTokens;
    const int nodes = this->p.table.nodes[item.request], prefix = this->p.table.prefix_len[item.request];
    const int row_words = (nodes + 63) / 64, lane = opaque(this->lane()), heads = opaque(this->p.heads);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.row_tile * T::kRows + 16 * m_tile + 8 * r + lane / 4;
      const uint64_t* words = this->p.table.words + this->p.table.word_begin[item.request] +
                              (int64_t)min(row / heads, nodes - 1) * row_words;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int token = first_token + 8 * n + lane % 4 * 2 + c, other = token - prefix;
          const bool visible = token < item.end && (other < 0 || (__ldg(words + (other >> 6)) >> (other & 63) & 1));
          if (!visible) score[n][2 * r + c] = -INFINITY;
        }
    }
  }
};

}  // namespace tpv
