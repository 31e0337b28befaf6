// The acceptance walks. tpverify/tree/accept.py has the contracts and the Python twins.

#include "error.h"

#include <algorithm>
#include <vector>

namespace {

tpv_status check_tree(const tpv_tree& tree) {
    if (tpv_status status = tpv::check_pointers(
            {{"tokens", tree.tokens}, {"first_child", tree.first_child}, {"next_sibling", tree.next_sibling}});
        status != TPV_OK)
        return status;
    if (tree.num_nodes < 1 || tree.num_nodes > TPV_MAX_NODES)
        return tpv::fail(TPV_INVALID_ARGUMENT, "num_nodes: expected 1..%d, got %d", TPV_MAX_NODES, tree.num_nodes);
    for (int32_t i = 0; i < tree.num_nodes; ++i) {
        for (const int32_t link : {tree.first_child[i], tree.next_sibling[i]}) {
            // Links that only ever point forward cannot form a cycle.
            if (link != -1 && (link <= i || link >= tree.num_nodes))
                return tpv::fail(TPV_INVALID_ARGUMENT, "tree: expected links to later nodes or -1, got %d at node %d", link, i);
        }
    }
    return TPV_OK;
}

// The first token whose cumulative weight exceeds u * total; rounding up to the total falls to the last one with weight.
int64_t sample(const std::vector<double>& weights, double u) {
    double total = 0.0;
    for (const double w : weights) total += w;
    const double target = u * total;
    double cumulative = 0.0;
    for (size_t t = 0; t < weights.size(); ++t) {
        cumulative += weights[t];
        if (cumulative > target || cumulative == total) return static_cast<int64_t>(t);
    }
    return static_cast<int64_t>(weights.size()) - 1;
}

void accept_sampled(tpv_accept_sampled_params& p) {
    std::vector<double> residual(p.vocab_size);
    int32_t node = 0;
    for (p.path_length = 0;;) {
        p.path[p.path_length++] = node;
        const double* probs = p.target_probs + node * p.vocab_size;
        std::copy_n(probs, p.vocab_size, residual.begin());
        double acc = 0.0;
        int32_t possible = -1;
        int32_t child = p.tree.first_child[node];
        for (; child >= 0; child = p.tree.next_sibling[child]) {
            const int64_t token = p.tree.tokens[child];
            const double prob = probs[token];
            acc += prob;
            if (prob >= p.threshold_single || (acc > 0.0 && p.coins[node] <= acc / p.threshold_acc)) break;
            residual[token] = 0.0;
            if (prob > 0.0) possible = child;
        }
        // Rounding can leave nothing off the children although the coin lies above their sum.
        if (child < 0 && std::all_of(residual.begin(), residual.end(), [](double w) { return w == 0.0; })) child = possible;
        if (child < 0) {
            p.bonus = sample(residual, p.final_coin);
            return;
        }
        node = child;
    }
}

}  // namespace

extern "C" tpv_status tpv_accept_greedy(tpv_accept_greedy_params* params) {
    return tpv::guarded([&]() -> tpv_status {
        if (tpv_status status = tpv::check_struct(params); status != TPV_OK) return status;
        if (tpv_status status = check_tree(params->tree); status != TPV_OK) return status;
        if (tpv_status status = tpv::check_pointers({{"target_tokens", params->target_tokens}, {"path", params->path}});
            status != TPV_OK)
            return status;
        int32_t node = 0;
        for (params->path_length = 0; node >= 0;) {
            params->path[params->path_length++] = node;
            params->bonus = params->target_tokens[node];
            node = params->tree.first_child[node];
            while (node >= 0 && params->tree.tokens[node] != params->bonus) node = params->tree.next_sibling[node];
        }
        return TPV_OK;
    });
}

extern "C" tpv_status tpv_accept_sampled(tpv_accept_sampled_params* params) {
    return tpv::guarded([&]() -> tpv_status {
        if (tpv_status status = tpv::check_struct(params); status != TPV_OK) return status;
        if (tpv_status status = check_tree(params->tree); status != TPV_OK) return status;
        if (tpv_status status = tpv::check_pointers(
                {{"target_probs", params->target_probs}, {"coins", params->coins}, {"path", params->path}});
            status != TPV_OK)
            return status;
        if (params->vocab_size < 1)
            return tpv::fail(TPV_INVALID_ARGUMENT, "vocab_size: expected at least 1, got %lld",
                             static_cast<long long>(params->vocab_size));
        for (int32_t i = 1; i < params->tree.num_nodes; ++i) {
            const long long token = params->tree.tokens[i];
            if (token < 0 || token >= params->vocab_size)
                return tpv::fail(TPV_INVALID_ARGUMENT, "tokens: expected ids in 0..%lld, got %lld at node %d",
                                 static_cast<long long>(params->vocab_size - 1), token, i);
        }
        params->threshold_acc = std::max(params->threshold_acc, 1e-9);
        accept_sampled(*params);
        return TPV_OK;
    });
}
