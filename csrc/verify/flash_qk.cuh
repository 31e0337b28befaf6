// The QK warps: raw scores of a group's rows against each tile, for the PV warps.
#pragma once
#include <cmath>

#include "flash_block.cuh"

namespace tpv {

// Whether the next tile's first loads are done before a tile's scores are handed over. ptxas orders the whole loop otherwise
// then: on sm_90 for the worse (8 % of a long prefix), on sm_120 without the spills that it has else.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
constexpr bool kEarlyLoads = false;
#else
constexpr bool kEarlyLoads = true;
#endif

// Each of a group's two warps computes half of every score, over 288 of the dims; the PV warps add them.
template <class T>
struct QkWarp : FlashBlock<T> {
  static constexpr int MT = T::kMTiles;
  int group, half;
  uint32_t first;  // 16 bytes of a token that this lane addresses, in the ring's first tile
  uint32_t q[T::kHeldSteps][MT][4];

  __device__ QkWarp(const FlashBlock<T>& block, int warp) : FlashBlock<T>(block), group(warp / 2), half(warp % 2) {}

  __device__ void run() {
    uint32_t count = 0, step = 0;
    for (int i = blockIdx.x; i < this->items(); i += this->stride()) {
      prefetch_words(this->item(i));
      load_q(count);
      count += T::kQueryTiles;
      // Lanes 0-7 and 16-23 address tokens 0-7 and 8-15, the other lanes the same tokens 8 dims on. (Here, not once: what is
      // live while Q is loaded is spilled.)
      const int lane = opaque(this->lane);
      first = kept(this->tile(0) + (lane % 8 + lane / 16 * 8) * T::kPitch + lane / 8 % 2 * 16 + half * T::kSteps * 32);
      Loads b;
      int left = this->plain_of(this->item(i));
      for (bool ready = false; left > 0; --left) ready = advance<false>(b, ready, i, left, count++, step++);
      const WorkItem item = this->item(i);
      left = uniform(this->tiles_of(item) - this->plain_of(item));
      for (; left > 0; --left) advance<true>(b, false, i, left, count++, step++);
    }
  }

 private:
  // A fragments from the tiles of queries; k-steps that do not fit in registers go to shared memory of their own.
  __device__ void load_q(uint32_t count) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const uint32_t own = count + group * MT + m;
      barrier_wait(this->full(own), this->tile_parity(own));
      // Lanes 0-15 address rows 0-15, lanes 16-31 the same rows 8 dims on.
      const int half = opaque(threadIdx.x) / 32 % 2;
      const uint32_t source = this->tile(own) + this->lane % 16 * T::kPitch + this->lane / 16 * 16 + half * T::kSteps * 32;
#pragma unroll
      for (int s = 0; s < T::kSteps; ++s) {
        uint32_t a[4];
        load_matrix(a, source + 32 * s);
        if (is_spilled(s)) {
          store_shared(spilled(spilled_before(s), m), a[0], a[1], a[2], a[3]);
        } else {
#pragma unroll
          for (int r = 0; r < 4; ++r) q[is_spilled(s) ? 0 : s - spilled_before(s)][m][r] = a[r];
        }
      }
    }
    // An arrival for a tile of the other group before it is full could count for what was in its place before.
    for (int i = 0; i < T::kQueryTiles; ++i) {
      barrier_wait(this->full(count + i), this->tile_parity(count + i));
      this->arrive(this->empty(count + i));
    }
  }

  // Spilled steps are spread over a row, and each is loaded two steps before its use.
  static constexpr int kSpread = T::kSpilledSteps ? T::kSteps / T::kSpilledSteps : 1;
  __device__ static constexpr bool is_spilled(int s) { return T::kSpilledSteps && s % kSpread == 1; }
  __device__ static constexpr int spilled_before(int s) {
    return T::kSpilledSteps ? (s + kSpread - 2) / kSpread : 0;
  }
  __device__ uint32_t own_scores() const { return this->scores(group * 2 + half); }
  __device__ uint32_t spilled(int s, int m) const { return own_scores() + T::kScoreBytes + (s * MT + m) * 512; }

  __device__ void load_spilled(uint32_t (&spill)[MT][4], int s) const {
#pragma unroll
    for (int m = 0; m < MT; ++m) load_shared(spill[m], spilled(spilled_before(s), m));
  }

  using Loads = uint32_t[3][4];  // of K, by k-step modulo 3; they run two ahead of the products
  __device__ uint32_t own(uint32_t count) const { return first + count % T::kSlots * T::kTileBytes; }
  __device__ static void load_k(Loads& b, uint32_t k, int s) { load_matrix(b[s % 3], k + 32 * s); }

  // TREE: some of the tile's tokens are hidden from some rows, or lie beyond the item's end. It is the `left`th from the last
  // of its kind. `ready`: its first loads are done; returns whether those of the next one are.
  template <bool TREE>
  __device__ bool advance(Loads& b, bool ready, int index, int left, uint32_t count, uint32_t step) {
    constexpr int kAhead = TREE ? 1 : 2;  // the mask needs registers
    float score[MT][2][4] = {};           // [m tile][8 tokens][fragment]
    const uint32_t k = own(count);
    if (!ready) {
      barrier_wait(this->full(count), this->tile_parity(count));
      load_k(b, k, 0);
      if (!TREE) load_k(b, k, 1);
    }
    uint32_t spill[MT][4];
#pragma unroll
    for (int s = 0; s < kAhead; ++s)
      if (is_spilled(s)) load_spilled(spill, s);
    bool next_ready = false, room = false;
#pragma unroll
    for (int s = 0; s < T::kSteps; ++s) {
      if (s + kAhead < T::kSteps) load_k(b, k, s + kAhead);
      if (s + kAhead < T::kSteps && is_spilled(s + kAhead)) load_spilled(spill, s + kAhead);
      if (!TREE && s == T::kSteps - 8) {
        room = barrier_ready(this->scores_empty(group), (step & 1) ^ 1);
        if (kEarlyLoads) next_ready = barrier_ready(this->full(count + 1), this->tile_parity(count + 1));
      }
      if (TREE) __syncwarp();  // so that no later load comes before
      const uint32_t(&now)[4] = b[s % 3];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint32_t(&a)[4] = is_spilled(s) ? spill[m] : q[is_spilled(s) ? 0 : s - spilled_before(s)][m];
        mma_bf16(score[m][0], a, now[0], now[1]);
        mma_bf16(score[m][1], a, now[2], now[3]);
      }
    }
    this->arrive(this->empty(count));
    if (!TREE) {
      if (kEarlyLoads) next_ready = left > 1 && __all_sync(~0u, next_ready);
      if (kEarlyLoads && next_ready) load_k(b, own(count + 1), 0), load_k(b, own(count + 1), 1);
    } else {
#pragma unroll
      for (int m = 0; m < MT; ++m) mask(index, left, group * MT + m, score[m]);
    }

    if (!room) barrier_wait(this->scores_empty(group), (step & 1) ^ 1);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        store_matrix(own_scores() + (m * 2 + n) * 512, score[m][n]);
    this->arrive(this->scores_full(group));
    return kEarlyLoads && next_ready;
  }

  // Ancestor words of row lane / 4 + 8 r of an m tile.
  __device__ const uint64_t* words_of(const WorkItem& item, int m_tile, int r) const {
    const int row = item.row_tile * T::kRows + 16 * m_tile + 8 * r + this->lane / 4;
    return this->p.table.words + item.word_begin +
           (int64_t)min(row / opaque(this->p.heads), item.nodes - 1) * ((item.nodes + 63) / 64);
  }
  __device__ void prefetch_words(const WorkItem& item) const {
    if (item.committed >= item.tokens) return;
    for (int m = 0; m < MT; ++m)
      for (int r = 0; r < 2; ++r) prefetch(words_of(item, group * MT + m, r) + max(-item.committed, 0) / 64);
  }

  // Both halves of a hidden score become -inf. Fragment r of tokens 8 n: row r / 2, token 8 n + 2 (lane % 4) + r % 2.
  __device__ void mask(int index, int left, int m_tile, float (&score)[2][4]) const {
    const WorkItem item = this->item(index);
    const int first_token = (this->tiles_of(item) - left) * T::kTokens;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t visible = visible_nodes(words_of(item, m_tile, r), (item.nodes + 63) / 64, first_token - item.committed);
      if (item.tokens - first_token < T::kTokens) visible &= (1u << (item.tokens - first_token)) - 1;
      visible >>= this->lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (!(visible & 1u << (8 * n + c))) score[n][2 * r + c] = -INFINITY;
    }
  }

  // Bit i: node first + i is an ancestor, or not a node but committed, below 0.
  __device__ static uint32_t visible_nodes(const uint64_t* words, int row_words, int first) {
    if (first < 0) return static_cast<uint32_t>(__ldg(words)) << -first | ((1u << -first) - 1);
    uint64_t bits = __ldg(words + first / 64) >> first % 64;
    if (first % 64 > 64 - T::kTokens && first / 64 + 1 < row_words) bits |= __ldg(words + first / 64 + 1) << (64 - first % 64);
    return static_cast<uint32_t>(bits);
  }
};

}  // namespace tpv
