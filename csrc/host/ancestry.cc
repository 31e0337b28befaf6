// A tree's ancestor words and depths from its parents: what a rank makes of the tree that a step brings, before anything
// else can begin. tpverify/tree/ancestry.py has the Python twin.
#include "ancestry.h"

#include "error.h"

extern "C" tpv_status tpv_ancestry(const tpv_ancestry_params* params) {
    tpv_status status = tpv::check_struct(params);
    if (status != TPV_OK) return status;
    const tpv_ancestry_params& a = *params;
    if (a.nodes < 1 || a.nodes > TPV_MAX_NODES)
        return tpv::fail(TPV_INVALID_ARGUMENT, "nodes: expected 1..%d, got %d", TPV_MAX_NODES, a.nodes);
    status = tpv::check_pointers({{"parents", a.parents}, {"depths", a.depths}, {"ancestor_words", a.ancestor_words}});
    if (status != TPV_OK) return status;

    for (int32_t node = 0; node < a.nodes; ++node) {
        const int32_t parent = a.parents[node];
        if (node == 0 ? parent != -1 : parent < 0 || parent >= node)
            return tpv::fail(TPV_INVALID_ARGUMENT, "parents[%d]: expected an earlier node, and -1 for the root, got %d", node, parent);
        a.depths[node] = node == 0 ? 0 : a.depths[parent] + 1;
    }
    tpv::write_ancestors(a.parents, a.nodes, a.ancestor_words);
    return TPV_OK;
}
