// The PV warps: softmax of a group's rows, shared out among its four warps, and O for 128 dims a warp.
#pragma once
#include <cmath>

#include "fetcher.cuh"

namespace tpv {

constexpr float kLazy = 8.0f;  // how far, in log2, a score may exceed the running maximum before that follows

// Warp w of a group turns scores into probabilities for one m tile and 8 tokens: m tile w / 2, tokens 8 (w % 2) on (of a
// single m tile: two warps only). The running maximum follows a row's scores only when one exceeds it by more than 2^8, and
// each row by itself, so that almost every tile needs no agreement between warps.
template <class T>
struct PvWarp : FlashBlock<T> {
  static constexpr int MT = T::kMTiles;
  int group, quarter;
  uint32_t region;          // of the group, at this lane's fragments
  float out[MT][16][4];     // [m tile][8 dims][fragment]
  float sum[2];             // this lane's share of this warp's share of the denominators

  __device__ PvWarp(const FlashBlock<T>& block, int warp)
      : FlashBlock<T>(block),
        group(warp / 4),
        quarter(warp % 4),
        region(opaque(block.group_region(group) + block.lane() * 16)) {}

  __device__ void run() {
    Fetcher<T> fetcher(*this, group * 4 + quarter);
    for (uint32_t i = 0; i < T::kSlots - 1; ++i) fetcher.next(i - (T::kSlots - 1));
    uint32_t count = 0;
    for (int i = blockIdx.x; i < this->items(); i += gridDim.x) {
      sum[0] = sum[1] = 0.0f;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        set_maximum(m, -INFINITY, -INFINITY);
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int r = 0; r < 4; ++r) out[m][n][r] = 0.0f;
      }
      // The tile fetched after tile t is t + kSlots - 1; of the last one, rows may be missing.
      int tiles, plain;
      this->count_tiles(this->item(i), tiles, plain);
      for (int left = min(plain, tiles - T::kSlots); left > 0; --left) {
        advance<false>(count);
        fetcher.next_plain(count++);
      }
      this->count_tiles(this->item(i), tiles, plain);
      for (int left = min(plain, plain - tiles + T::kSlots); left > 0; --left) advance<false>(count), fetcher.next(count++);
      this->count_tiles(this->item(i), tiles, plain);
      for (int left = tiles - plain; left > 0; --left) advance<true>(count), fetcher.next(count++);
      finish(this->item(i).partial);
    }
  }

 private:
  __device__ bool shares_softmax() const { return MT == 2 || quarter < 2; }
  __device__ int own_m() const { return MT == 2 ? quarter / 2 : 0; }
  __device__ int own_n() const { return quarter % 2; }
  // Running maxima, in log2 units, of rows 16 m + lane / 4 and + 8: the same in all warps of a group, each with a copy in
  // shared memory, since registers are scarce.
  __device__ uint32_t maxima(int m) const {
    return this->group_region(group) + T::kMaximumOffset + (quarter * MT + m) * 64 + this->lane() / 4 * 8;
  }
  __device__ void set_maximum(int m, float first, float second) const {
    __syncwarp();
    if (this->lane() % 4 == 0) store_shared(maxima(m), first, second);
    __syncwarp();
  }
  // A lane's fragments: of what a QK warp found for m tile part / 2 and tokens 8 (part % 2) on, and of P.
  __device__ uint32_t scores(int qk_warp, int part) const { return region + qk_warp * T::kWarpScoreBytes + part * 512; }
  __device__ uint32_t probs(uint32_t count, int m) const {
    return region + T::kProbOffset + count % 2 * T::kProbBytes + m * 512;
  }
  __device__ uint32_t own_probs(uint32_t count) const { return probs(count, own_m()) + own_n() * 8; }
  __device__ void meet() const { named_barrier(1 + group, 128); }

  // Scores in log2 units. Fragment r: row r / 2, token 2 (lane % 4) + r % 2.
  __device__ void load_scores(float (&score)[4], int part) const {
    load_shared(score, scores(0, part));
    float other[4] = {};
    if (MT == 2) load_shared(other, scores(1, part));
#pragma unroll
    for (int r = 0; r < 4; ++r) score[r] = (MT == 2 ? score[r] + other[r] : score[r]) * this->p.scale_log2;
  }

  // P in bf16 relative to the running maximum.
  __device__ void share(const float (&score)[4], const float (&maximum)[2], uint32_t count) {
    uint32_t pair[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = maximum[r] == -INFINITY ? 0.0f : maximum[r];
      pair[r] = pack_bf16(exp2_approx(score[2 * r] - reference), exp2_approx(score[2 * r + 1] - reference));
    }
    store_shared(own_probs(count), pair[0], pair[1]);
  }

  // TREE: the tile holds tokens that only some rows see.
  template <bool TREE>
  __device__ void advance(uint32_t count) {
    float maximum[2];
    load_shared(maximum, maxima(own_m()));
    barrier_wait(this->scores_full(group), count & 1);
    bool exceeds = false;
    if (shares_softmax()) {
      float score[4];
      load_scores(score, quarter);
      exceeds = fmaxf(score[0], score[1]) > maximum[0] + kLazy || fmaxf(score[2], score[3]) > maximum[1] + kLazy;
      share(score, maximum, count);
    }
    // Lanes 0-15 address tokens 0-15, lanes 16-31 the same tokens 8 dims on. The QK warps have seen the tile arrive.
    const uint32_t v = this->tile(count) + this->lane() % 16 * T::kPitch + this->lane() / 16 * 16 + quarter * T::kDims * 2;
    uint32_t b[2][4];
    load_matrix_transposed(b[0], v);
    if (named_barrier_any(1 + group, 128, exceeds)) raise(count);
    uint32_t prob[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) load_shared(prob[m], probs(count, m));
    if (shares_softmax()) {  // the denominators sum what P V multiplies
      uint32_t pair[2];
      load_shared(pair, own_probs(count));
#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] += low_float(pair[r]) + high_float(pair[r]);
    }
    this->arrive(this->scores_empty(group));

#pragma unroll
    for (int d = 0; d < 8; ++d) {
      if (!TREE && d < 7) load_matrix_transposed(b[(d + 1) % 2], v + 32 * (d + 1));
      uint32_t(&now)[4] = b[d % 2];
      if (TREE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) now[i] = finite_or_zero(now[i]);
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_bf16(out[m][2 * d], prob[m], now[0], now[1]);
        mma_bf16(out[m][2 * d + 1], prob[m], now[2], now[3]);
      }
      if (TREE && d < 7) load_matrix_transposed(b[(d + 1) % 2], v + 32 * (d + 1));
    }
    this->arrive(this->empty(count));
  }

  // Rows with a score that exceeds: their maximum follows, O and the sums shrink, and the tile's P is made again.
  __device__ void raise(uint32_t count) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float score[4], tops[2], maximum[2];
      load_shared(maximum, maxima(m));
      load_scores(score, 2 * m);
      tops[0] = fmaxf(score[0], score[1]), tops[1] = fmaxf(score[2], score[3]);
      load_scores(score, 2 * m + 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(tops[r], fmaxf(score[2 * r], score[2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (!(top > maximum[r] + kLazy)) continue;
        const float factor = exp2_approx(maximum[r] - top);
        maximum[r] = top;
        if (m == own_m()) sum[r] *= factor;
#pragma unroll
        for (int n = 0; n < 16; ++n) out[m][n][2 * r] *= factor, out[m][n][2 * r + 1] *= factor;
      }
      set_maximum(m, maximum[0], maximum[1]);
    }
    if (shares_softmax()) {
      float score[4], maximum[2];
      load_scores(score, quarter);
      load_shared(maximum, maxima(own_m()));
      share(score, maximum, count);
    }
    meet();
  }

  // A token that a row does not see has weight 0 and may hold anything. (One that it sees has made its weight NaN already.)
  __device__ static uint32_t finite_or_zero(uint32_t pair) {
    if ((pair & 0x7f80u) == 0x7f80u) pair &= 0xffff0000u;
    if ((pair & 0x7f800000u) == 0x7f800000u) pair &= 0xffffu;
    return pair;
  }

  __device__ uint32_t sums(int m, int n) const {
    return this->group_region(group) + T::kSumOffset + (m * 2 + n) * 64 + this->lane() / 4 * 4;
  }

  // Normalised O and its lse, for the combine kernel.
  __device__ void finish(int partial) {
    if (shares_softmax()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (this->lane() % 4 == 0) store_shared(sums(own_m(), own_n()) + 32 * r, total);
      }
    }
    meet();
    const int first = group * T::kGroupRows + this->lane() / 4;
    float* target = this->p.partial_out + ((int64_t)partial * T::kRows + first) * kLatent + quarter * T::kDims + this->lane() % 4 * 2;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float maximum[2];
      load_shared(maximum, maxima(m));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float total = load_shared_float(sums(m, 0) + 32 * r) + load_shared_float(sums(m, 1) + 32 * r);
        const bool seen = total > 0.0f || total != total;
        if (quarter == 0 && this->lane() % 4 == 0)
          this->p.partial_lse[(int64_t)partial * T::kRows + first + 16 * m + 8 * r] = seen ? maximum[r] + log2f(total) : -INFINITY;
        const float inverse = seen ? 1.0f / total : 0.0f;
#pragma unroll
        for (int n = 0; n < 16; ++n)
          *reinterpret_cast<float2*>(target + (16 * m + 8 * r) * kLatent + 8 * n) =
              make_float2(out[m][n][2 * r] * inverse, out[m][n][2 * r + 1] * inverse);
      }
    }
  }
};

}  // namespace tpv
