// The PV warps: softmax of a group's rows, shared out among its four warps, and O for 128 dims a warp.
#pragma once
#include <cmath>

#include "fetcher.cuh"
#include "partial.cuh"

namespace tpv {

constexpr float kLazy = 8.0f;     // how far, in log2, a score may exceed the running maximum before that follows
constexpr float kNothing = -3e38f;  // the running maximum of a row that has seen no token: every score but -inf exceeds it

// Warp w of a group turns scores into probabilities for one m tile and 8 tokens: m tile w / 2, tokens 8 (w % 2) on (of a
// single m tile: two warps only). The running maximum follows a row's scores only when one exceeds it by more than 2^8, and
// each row by itself, so that almost every tile needs no agreement between warps.
template <class T>
struct PvWarp : FlashBlock<T> {
  static constexpr int MT = T::kMTiles;
  int group, quarter;
  float out[MT][16][4];     // [m tile][8 dims][fragment]
  float maximum[2];         // running, in log2 units, of rows lane / 4 and + 8 of the m tile of this warp's share
  float sum[2];             // this lane's share of that share's denominators

  __device__ PvWarp(const FlashBlock<T>& block, int warp) : FlashBlock<T>(block), group(warp / 4), quarter(warp % 4) {}

  __device__ void run() {
    Fetcher<T> fetcher(*this, group * 4 + quarter);
    this->begin();
    int first = fetcher.start();
    uint32_t count = first, step = 0;
    for (int i = blockIdx.x; i < this->items(); i += this->stride()) {
      for (int t = first; t < T::kQueryTiles; ++t) {
        if (t >= 0) this->arrive(this->empty(count));
        fetcher.next_first(count++);
      }
      first = 0;
      sum[0] = sum[1] = 0.0f;
      maximum[0] = maximum[1] = kNothing;
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        if (this->lane % 4 == 0) store_shared(maxima(m), kNothing, kNothing);
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
          for (int r = 0; r < 4; ++r) out[m][n][r] = 0.0f;
      }
      __syncwarp();
      // The tile fetched after tile t is t + kSlots - 1; of the last one, rows may be missing.
      int tiles = this->tiles_of(this->item(i)), plain = this->plain_of(this->item(i));
      for (int left = min(plain, tiles - T::kSlots); left > 0; --left) advance<false, true>(fetcher, count++, step++);
      tiles = this->tiles_of(this->item(i)), plain = this->plain_of(this->item(i));
      for (int left = min(plain, plain - tiles + T::kSlots); left > 0; --left) advance<false, false>(fetcher, count++, step++);
      tiles = this->tiles_of(this->item(i)), plain = this->plain_of(this->item(i));
      for (int left = tiles - plain; left > 0; --left) advance<true, false>(fetcher, count++, step++);
      finish(this->item(i).partial);
    }
  }

 private:
  __device__ bool shares_softmax() const { return MT == 2 || quarter < 2; }
  __device__ int own_m() const { return MT == 2 ? quarter / 2 : 0; }
  __device__ int own_n() const { return quarter % 2; }
  // Where each warp keeps the maxima of all rows of its group.
  __device__ uint32_t maxima(int m) const {
    return this->smem + T::kMaximumOffset + ((group * 4 + quarter) * MT + m) * 64 + this->lane / 4 * 8;
  }
  // P of 16 rows x 16 tokens as four matrices of 8 x 8, in the order of an A fragment's registers: a warp's share is two of
  // them, 256 B without a gap. (As lanes hold it, its halves of 16 B a lane would lie in every other pair of banks.)
  __device__ uint32_t probs(uint32_t step, int m) const {
    return this->smem + T::kProbOffset + step % 2 * T::kProbBytes + (group * MT + m) * 512 + this->lane * 16;
  }
  __device__ void meet() const { named_barrier(1 + group, 128); }

  // Raw scores of m tile m, tokens 8 n on. Fragment r: row r / 2, token 2 (lane % 4) + r % 2.
  __device__ void load_scores(float (&score)[4], int m, int n) const {
    const uint32_t half = this->scores(group * 2) + (m * 2 + n) * 512;
    float other[4];
    load_matrix(score, half);
    load_matrix(other, half + T::kQkBytes);
#pragma unroll
    for (int r = 0; r < 4; ++r) score[r] += other[r];
  }

  // This warp's share of P, in bf16, of its raw scores relative to the running maxima. Returns whether a score exceeds one.
  __device__ bool share(uint32_t (&pair)[2], float (&score)[4], uint32_t step) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) score[r] = fmaf(score[r], this->p.scale_log2, -maximum[r / 2]);
#pragma unroll
    for (int r = 0; r < 2; ++r) pair[r] = pack_bf16(exp2_approx(score[2 * r]), exp2_approx(score[2 * r + 1]));
    store_matrix(probs(step, own_m()) + own_n() * 256, pair[0], pair[1]);
    return fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3])) > kLazy;
  }

  // TREE: the tile holds tokens that only some rows see. WHOLE: the tile to fetch is whole and not its item's last.
  template <bool TREE, bool WHOLE>
  __device__ void advance(Fetcher<T>& fetcher, uint32_t count, uint32_t step) {
    // V before the scores are there, for after them P would queue behind it. Lanes 0-15 address tokens 0-15, lanes 16-31 the
    // same tokens 8 dims on.
    barrier_wait(this->full(count), this->tile_parity(count));
    const int lane = opaque(this->lane);  // the thread index would be read again
    const uint32_t v = this->tile(count) + lane % 16 * T::kPitch + lane / 16 * 16 + quarter * kSlice * 2;
    uint32_t b[3][4], prob[MT][4];
    load_matrix_transposed(b[0], v);
    load_matrix_transposed(b[1], v + 32);
    barrier_wait(this->scores_full(group), step & 1);
    float score[4];
    if (shares_softmax()) load_scores(score, own_m(), own_n());
    uint32_t pair[2] = {};
    if (shares_softmax() && share(pair, score, step)) store_shared(this->exceeds(group, step), step);
    meet();
    const auto load_probs = [&] {
#pragma unroll
      for (int m = 0; m < MT; ++m) load_matrix(prob[m], probs(step, m));
    };
    const uint32_t exceeding = load_shared_word(this->exceeds(group, step));
    load_probs();  // at once, so that one latency is paid; thrown away if other warps are just making P again
    typename Fetcher<T>::Slots slots;
    if (WHOLE) slots = fetcher.next_slots();  // their way is no longer than that of P
    if (exceeding == step) {
      raise(pair, step);
      load_matrix_transposed(b[0], v);
      load_matrix_transposed(b[1], v + 32);
      load_probs();
    }
    this->arrive(this->scores_empty(group));
    // The denominators sum what P V multiplies.
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += low_float(pair[r]) + high_float(pair[r]);

#pragma unroll
    for (int d = 0; d < 8; ++d) {
      if (d < 6) load_matrix_transposed(b[(d + 2) % 3], v + 32 * (d + 2));
      uint32_t(&now)[4] = b[d % 3];
      if (TREE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) now[i] = finite_or_zero(now[i]);
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_bf16(out[m][2 * d], prob[m], now[0], now[1]);
        mma_bf16(out[m][2 * d + 1], prob[m], now[2], now[3]);
      }
    }
    this->arrive(this->empty(count));
    if (WHOLE) fetcher.next_whole(slots, count); else fetcher.next(count);
  }

  // Rows with a score that exceeds: their maximum follows, O and the sums shrink, and the tile's P is made again.
  __device__ void raise(uint32_t (&pair)[2], uint32_t step) {
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      float score[4], tops[2], before[2], factor[2];
      load_scores(score, m, 0);
      tops[0] = fmaxf(score[0], score[1]), tops[1] = fmaxf(score[2], score[3]);
      load_scores(score, m, 1);
      load_shared(before, maxima(m));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = fmaxf(tops[r], fmaxf(score[2 * r], score[2 * r + 1])) * this->p.scale_log2;
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (!(top > before[r] + kLazy)) top = before[r];
        factor[r] = exp2_approx(before[r] - top);
        if (m == own_m()) maximum[r] = top, sum[r] *= factor[r];
        before[r] = top;
      }
      __syncwarp();
      if (this->lane % 4 == 0) store_shared(maxima(m), before[0], before[1]);
#pragma unroll
      for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) out[m][n][r] *= factor[r / 2];
    }
    if (shares_softmax()) {
      float score[4];
      load_scores(score, own_m(), own_n());
      share(pair, score, step);
    }
    meet();
  }

  // A token that a row does not see has weight 0 and may hold anything. (One that it sees has made its weight NaN already.)
  __device__ static uint32_t finite_or_zero(uint32_t pair) {
    if ((pair & 0x7f80u) == 0x7f80u) pair &= 0xffff0000u;
    if ((pair & 0x7f800000u) == 0x7f800000u) pair &= 0xffffu;
    return pair;
  }

  __device__ uint32_t sums(int m, int n, int lane) const {
    return this->smem + T::kSumOffset + ((group * MT + m) * 2 + n) * 64 + lane / 4 * 4;
  }

  // Normalised O and its lse, for the combine kernel.
  __device__ void finish(int partial) {
    const int lane = opaque(this->lane);  // what is made of it would be kept across the loops over tiles
    if (shares_softmax()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float total = sum[r] + __shfl_xor_sync(~0u, sum[r], 1);
        total += __shfl_xor_sync(~0u, total, 2);
        if (lane % 4 == 0) store_shared(sums(own_m(), own_n(), lane) + 32 * r, total);
      }
    }
    meet();
    const int first = group * T::kGroupRows + lane / 4;
    float4* const target = reinterpret_cast<float4*>(this->p.partial_out) + (int64_t)partial * T::kRows * (kLatent / 4) +
                           partial_offset(group * T::kGroupRows, quarter, 0, 0) + lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float total = load_shared_float(sums(m, 0, lane) + 32 * r) + load_shared_float(sums(m, 1, lane) + 32 * r);
        const bool seen = total > 0.0f || total != total;
        if (quarter == 0 && lane % 4 == 0)
          this->p.partial_lse[(int64_t)partial * T::kRows + first + 16 * m + 8 * r] =
              seen ? load_shared_float(maxima(m) + 4 * r) + log2_approx(total) : -INFINITY;
        const float inverse = seen ? reciprocal_approx(total) : 0.0f;
#pragma unroll
        for (int s = 0; s < kSliceSteps; ++s) {
          const float(&a)[4] = out[m][2 * s], (&b)[4] = out[m][2 * s + 1];
          target[partial_offset(16 * m + 8 * r, 0, s, 0)] =
              make_float4(a[2 * r] * inverse, a[2 * r + 1] * inverse, b[2 * r] * inverse, b[2 * r + 1] * inverse);
        }
      }
  }
};

}  // namespace tpv
