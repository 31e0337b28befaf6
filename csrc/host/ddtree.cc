// DDTree: best-first expansion over per-depth candidates (arXiv 2604.12989). tpverify/tree/ddtree.py has the contract
// and the Python twin.

#include "ancestry.h"
#include "error.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace {

constexpr float kLogprobSlack = 1e-3f;  // a log-probability this little above 0 is rounding and counts as 0
constexpr float kImpossible = -std::numeric_limits<float>::infinity();

// Distinctness of the ids of one row after another: open addressing, emptied by moving on to the next row's stamp.
class SeenIds {
public:
    explicit SeenIds(size_t capacity) : slots_(std::bit_ceil(2 * capacity)), shift_(64 - std::countr_zero(slots_.size())) {}

    bool insert(int64_t id, int32_t row) {
        for (size_t i = (static_cast<uint64_t>(id) * 0x9E3779B97F4A7C15ull) >> shift_;; i = (i + 1) & (slots_.size() - 1)) {
            Slot& slot = slots_[i];
            if (slot.row != row) {
                slot = {id, row};
                return true;
            }
            if (slot.id == id) return false;
        }
    }

private:
    struct Slot {
        int64_t id;
        int32_t row = -1;
    };
    std::vector<Slot> slots_;
    int shift_;
};

// A place in the queue: the child of `parent` with this rank among its depth's candidates. Rank k stands for all that
// lies beyond the candidates.
struct Entry {
    double score;
    int32_t parent;
    int32_t rank;
};

class Builder {
public:
    explicit Builder(tpv_ddtree_params& params) : p_(params), ids_(params.token_ids, params.token_ids + size()) {}

    tpv_status run() {
        if (p_.budget > 0 || p_.k > 0) {
            if (tpv_status status = check_rows(); status != TPV_OK) return status;
        }
        expand();
        link();
        return TPV_OK;
    }

private:
    size_t size() const { return static_cast<size_t>(p_.depth) * p_.k; }
    float logprob(int32_t row, int32_t rank) const {
        return std::min(p_.logprobs[static_cast<size_t>(row) * p_.k + rank], 0.0f);
    }

    tpv_status check_rows() {
        if (p_.depth > 0 && p_.k == 0)
            return tpv::fail(TPV_INVALID_ARGUMENT, "logprobs: expected at least one candidate a row, got 0");
        SeenIds seen(p_.k);
        int64_t largest = -1;
        for (int32_t row = 0; row < p_.depth; ++row) {
            bool ties = false;
            float previous = std::numeric_limits<float>::infinity();
            for (int32_t r = 0; r < p_.k; ++r) {
                const float raw = p_.logprobs[static_cast<size_t>(row) * p_.k + r];
                if (!(raw <= kLogprobSlack))  // NaN and +inf too
                    return tpv::fail(TPV_INVALID_ARGUMENT,
                                     "logprobs: expected log-probabilities at most 0, got %g in row %d, column %d", raw, row, r);
                const float value = std::min(raw, 0.0f);
                if (value > previous)
                    return tpv::fail(TPV_INVALID_ARGUMENT,
                                     "logprobs: expected descending rows, got a rise in row %d, column %d", row, r);
                ties |= value == previous;
                previous = value;
            }
            if (logprob(row, 0) == kImpossible)
                return tpv::fail(TPV_INVALID_ARGUMENT, "logprobs: expected a finite entry in each row, got none in row %d", row);
            if (tpv_status status = check_ids(row, seen, largest); status != TPV_OK) return status;
            if (ties) order_ties(row);
        }
        vocab_size_ = p_.vocab_size ? p_.vocab_size : std::min(largest, std::numeric_limits<int64_t>::max() - 1) + 1;
        return TPV_OK;
    }

    tpv_status check_ids(int32_t row, SeenIds& seen, int64_t& largest) {
        const int64_t* ids = &ids_[static_cast<size_t>(row) * p_.k];
        for (int32_t r = 0; r < p_.k; ++r) {
            const long long id = ids[r];
            if (id < 0 || (p_.vocab_size && id >= p_.vocab_size)) {
                if (p_.vocab_size)
                    return tpv::fail(TPV_INVALID_ARGUMENT, "token_ids: expected ids in 0..%lld, got %lld in row %d, column %d",
                                     static_cast<long long>(p_.vocab_size - 1), id, row, r);
                return tpv::fail(TPV_INVALID_ARGUMENT, "token_ids: expected ids >= 0, got %lld in row %d, column %d", id, row, r);
            }
            if (!seen.insert(id, row))
                return tpv::fail(TPV_INVALID_ARGUMENT, "token_ids: expected distinct ids in a row, got %lld twice in row %d", id,
                                 row);
            largest = std::max<int64_t>(largest, id);
        }
        return TPV_OK;
    }

    // Among equal log-probabilities the lower token id ranks first.
    void order_ties(int32_t row) {
        int64_t* ids = &ids_[static_cast<size_t>(row) * p_.k];
        for (int32_t begin = 0, end; begin < p_.k; begin = end) {
            for (end = begin + 1; end < p_.k && logprob(row, end) == logprob(row, begin);) ++end;
            std::sort(ids + begin, ids + end);
        }
    }

    void expand() {
        const int32_t capacity = p_.budget + 1;
        ranks_.resize(capacity);
        scores_.resize(capacity);
        queue_.reserve(2 * static_cast<size_t>(capacity));
        p_.tokens[0] = p_.root_token;
        p_.parents[0] = -1;
        p_.depths[0] = 0;
        p_.num_nodes = 1;
        p_.exact = 1;
        const auto later = [this](const Entry& a, const Entry& b) { return precedes(b, a); };
        const auto offer = [&](int32_t parent, int32_t rank) {
            const int32_t row = p_.depths[parent];
            if (rank == p_.k && p_.k >= vocab_size_) return;
            const float lp = logprob(row, std::min(rank, p_.k - 1));  // beyond the candidates: at most the last one's
            if (lp == kImpossible) return;
            queue_.push_back({scores_[parent] + lp, parent, rank});
            std::push_heap(queue_.begin(), queue_.end(), later);
        };
        if (p_.depth > 0 && p_.budget > 0) offer(0, 0);
        while (!queue_.empty() && p_.num_nodes < capacity) {
            std::pop_heap(queue_.begin(), queue_.end(), later);
            const Entry entry = queue_.back();
            queue_.pop_back();
            if (entry.rank == p_.k) {
                p_.exact = 0;
                continue;
            }
            const int32_t node = p_.num_nodes++;
            const int32_t row = p_.depths[entry.parent];
            p_.tokens[node] = ids_[static_cast<size_t>(row) * p_.k + entry.rank];
            p_.parents[node] = entry.parent;
            p_.depths[node] = row + 1;
            ranks_[node] = entry.rank;
            scores_[node] = entry.score;
            offer(entry.parent, entry.rank + 1);
            if (row + 1 < p_.depth) offer(node, 0);
        }
    }

    // Higher score first; equal scores in the order of the rank tuples, a prefix before its extensions. The tuples are
    // compared by climbing to where the two paths part.
    bool precedes(const Entry& a, const Entry& b) const {
        if (a.score != b.score) return a.score > b.score;
        Entry x = a, y = b;
        const auto climb = [this](Entry& e) { e = {0.0, p_.parents[e.parent], ranks_[e.parent]}; };
        const int32_t depth_a = p_.depths[a.parent], depth_b = p_.depths[b.parent];
        for (int32_t d = depth_a; d > depth_b; --d) climb(x);
        for (int32_t d = depth_b; d > depth_a; --d) climb(y);
        while (x.parent != y.parent) climb(x), climb(y);
        if (x.rank != y.rank) return x.rank < y.rank;
        return depth_a < depth_b;
    }

    void link() {
        const int32_t n = p_.num_nodes;
        std::fill_n(p_.first_child, n, -1);
        std::fill_n(p_.next_sibling, n, -1);
        for (int32_t i = n - 1; i > 0; --i) {  // insertion at the head, from the back: siblings end in ascending order
            p_.next_sibling[i] = p_.first_child[p_.parents[i]];
            p_.first_child[p_.parents[i]] = i;
        }
        tpv::write_ancestors(p_.parents, n, p_.ancestor_words);
    }

    tpv_ddtree_params& p_;
    std::vector<int64_t> ids_;  // in rank order once checked
    int64_t vocab_size_ = 0;
    std::vector<Entry> queue_;
    std::vector<int32_t> ranks_;   // of each node
    std::vector<double> scores_;  // of each node
};

tpv_status check_range(const char* name, int32_t value, int32_t high) {
    if (value < 0 || value > high)
        return tpv::fail(TPV_INVALID_ARGUMENT, "%s: expected an integer in 0..%d, got %d", name, high, value);
    return TPV_OK;
}

}  // namespace

extern "C" tpv_status tpv_build_ddtree(tpv_ddtree_params* params) {
    return tpv::guarded([&]() -> tpv_status {
        tpv_status status = tpv::check_struct(params);
        if (status == TPV_OK) status = check_range("depth", params->depth, TPV_MAX_DEPTH);
        if (status == TPV_OK) status = check_range("k", params->k, std::numeric_limits<int32_t>::max());
        if (status == TPV_OK) status = check_range("budget", params->budget, TPV_MAX_NODES - 1);
        if (status == TPV_OK && params->depth > 0 && params->k > 0)
            status = tpv::check_pointers({{"logprobs", params->logprobs}, {"token_ids", params->token_ids}});
        if (status == TPV_OK)
            status = tpv::check_pointers({{"tokens", params->tokens},
                                          {"parents", params->parents},
                                          {"depths", params->depths},
                                          {"first_child", params->first_child},
                                          {"next_sibling", params->next_sibling},
                                          {"ancestor_words", params->ancestor_words}});
        if (status != TPV_OK) return status;
        return Builder(*params).run();
    });
}
