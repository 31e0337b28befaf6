// Verify attention on the CPU: rows shared out over threads, each working through blocks that its caches can hold.

#include "attention.h"
#include "error.h"
#include "isa.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int64_t SCORES = 8 << 20;  // scores that a thread holds at a time
constexpr int64_t BLOCK = 12;        // rows of every block but the last are a multiple of the tiles' rows

tpv_status check(const tpv_attention_params& p) {
    if (p.nodes < 1 || p.nodes > TPV_MAX_NODES)
        return tpv::fail(TPV_INVALID_ARGUMENT, "nodes: expected 1..%d, got %d", TPV_MAX_NODES, p.nodes);
    if (tpv_status status = tpv::check_at_least(
            {{"heads", p.heads, 1}, {"threads", p.threads, 1}, {"prefix", p.prefix, 0}, {"slots", p.slots, 1}});
        status != TPV_OK)
        return status;
    if (p.rank < 16 || p.rank % 16 != 0 || p.row_dim < p.rank || p.row_dim % 8 != 0 || p.pool_stride < p.row_dim)
        return tpv::fail(TPV_INVALID_ARGUMENT,
                         "rank, row_dim, pool_stride: expected multiples of 16 and 8 in rising order, got %d, %d, %lld", p.rank,
                         p.row_dim, static_cast<long long>(p.pool_stride));
    const tpv_status pointers =
        tpv::check_pointers({{"q", p.q}, {"kv_pool", p.kv_pool}, {"tree_slots", p.tree_slots}, {"depths", p.depths},
                             {"ancestor_words", p.ancestor_words}, {"out", p.out}, {"lse", p.lse},
                             {"prefix_slots", p.prefix > 0 ? p.prefix_slots : p.tree_slots}});
    if (pointers != TPV_OK) return pointers;
    for (int32_t i = 0; i < p.nodes; ++i)
        if (p.depths[i] < 0 || p.depths[i] >= p.nodes)
            return tpv::fail(TPV_INVALID_ARGUMENT, "depths: expected 0..%d, got %d", p.nodes - 1, p.depths[i]);
    return TPV_OK;
}

// Addresses of the rows at `slots`, appended to `keys`.
tpv_status append_rows(const tpv_attention_params& p, const char* name, const int64_t* slots, int64_t count,
                       std::vector<const float*>& keys) {
    for (int64_t i = 0; i < count; ++i) {
        if (slots[i] < 0 || slots[i] >= p.slots)
            return tpv::fail(TPV_INVALID_ARGUMENT, "%s: expected slots below %lld, got %lld", name,
                             static_cast<long long>(p.slots), static_cast<long long>(slots[i]));
        keys.push_back(p.kv_pool + slots[i] * p.pool_stride);
    }
    return TPV_OK;
}

// A thread's rows and its scratch, allocated before the thread starts: a thread must not throw.
class Share {
public:
    Share(const tpv_attention_params& p, const float* const* keys, int64_t first, int64_t last)
        : p_(p), first_(first), last_(last) {
        // An odd number of cache lines: rows then start in different sets of a cache.
        const int64_t stride = ((p.prefix + p.nodes + 15) / 16 | 1) * 16;
        block_ = std::min(last - first, std::max<int64_t>(SCORES / stride / BLOCK, 1) * BLOCK);
        scores_.resize(block_ * stride);
        partial_.resize(block_ * p.rank);
        rows_.keys = keys;
        rows_.visible = p.ancestor_words;
        rows_.depths = p.depths;
        rows_.dim = p.row_dim;
        rows_.rank = p.rank;
        rows_.heads = p.heads;
        rows_.prefix = p.prefix;
        rows_.words = (p.nodes + 63) / 64;
        rows_.stride = stride;
    }

    void run() {
        tpv::Attend* const attend = TPV_BEST(attend);
        rows_.scores = scores_.data();
        rows_.partial = partial_.data();
        for (int64_t row = first_; row < last_; row += block_) {
            rows_.q = p_.q + row * p_.row_dim;
            rows_.out = p_.out + row * p_.rank;
            rows_.lse = p_.lse + row;
            attend(rows_, row, std::min(block_, last_ - row));
        }
    }

private:
    const tpv_attention_params& p_;
    int64_t first_, last_, block_;
    std::vector<float> scores_, partial_;
    tpv::AttentionRows rows_{};
};

}  // namespace

extern "C" tpv_status tpv_attention(const tpv_attention_params* params) {
    return tpv::guarded([&]() -> tpv_status {
        if (tpv_status status = tpv::check_struct(params); status != TPV_OK) return status;
        if (tpv_status status = check(*params); status != TPV_OK) return status;
        const tpv_attention_params& p = *params;
        std::vector<const float*> keys;
        keys.reserve(p.prefix + p.nodes);
        if (tpv_status status = append_rows(p, "prefix_slots", p.prefix_slots, p.prefix, keys); status != TPV_OK) return status;
        if (tpv_status status = append_rows(p, "tree_slots", p.tree_slots, p.nodes, keys); status != TPV_OK) return status;

        const int64_t count = static_cast<int64_t>(p.nodes) * p.heads;
        const int64_t each = (count + p.threads - 1) / p.threads;
        std::vector<Share> shares;
        for (int64_t first = 0; first < count; first += each) shares.emplace_back(p, keys.data(), first, std::min(first + each, count));
        std::vector<std::jthread> threads;
        try {
            while (threads.size() + 1 < shares.size()) threads.emplace_back(&Share::run, &shares[threads.size() + 1]);
        } catch (const std::system_error&) {  // there is no further thread for this process: this one does the rest
        }
        shares[0].run();
        for (size_t i = threads.size() + 1; i < shares.size(); ++i) shares[i].run();
        return TPV_OK;
    });
}
