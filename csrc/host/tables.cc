// See tables.h. Beside these loops, numpy's share of a change of some 30 slots is 20 calls.
#include "tables.h"

#include "error.h"

namespace {

enum : uint8_t { FREE, SCRATCH, LIVE };

// SplitMix64, as tpverify/kv/digest.py has it.
uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

uint64_t sequence_hash(const tpv_tables_params& t, int64_t length, int64_t nodes, uint64_t tree_sum) {
    const uint64_t word = mix(mix(mix(static_cast<uint64_t>(t.seq)) + t.prefix_sum) + tree_sum);
    return mix(word ^ static_cast<uint64_t>(length) ^ static_cast<uint64_t>(nodes) << 32);
}

bool all_are(const tpv_tables_params& t, uint8_t state) {
    for (int64_t i = 0; i < t.nodes; ++i)
        if (t.tree[i] < 1 || t.tree[i] >= t.num_slots || t.states[t.tree[i]] != state) return false;
    return true;
}

bool ascends(const int32_t* values, int64_t count, int64_t below) {
    for (int64_t i = 1; i < count; ++i)
        if (values[i] <= values[i - 1]) return false;
    return count > 0 && values[count - 1] < below;
}

}  // namespace

extern "C" int tpv_draft(tpv_tables_params* params) {
    if (tpv::check_struct(params) != TPV_OK) return 1;
    tpv_tables_params& t = *params;
    if (!ascends(t.tree, t.nodes, t.limit) || !all_are(t, FREE)) return 1;
    t.tree_sum = 0;
    for (int64_t i = 0; i < t.nodes; ++i) {
        const int32_t slot = t.tree[i];
        t.states[slot] = SCRATCH;
        t.readers[slot] = 0;
        t.tree_sum += t.slot_keys[slot] * t.position_keys[i];
    }
    t.hash = sequence_hash(t, t.length, t.nodes, t.tree_sum);
    return 0;
}

extern "C" int tpv_commit(tpv_tables_params* params) {
    if (tpv::check_struct(params) != TPV_OK) return 1;
    tpv_tables_params& t = *params;
    if (!ascends(t.path, t.accepted, t.nodes) || t.path[0] != 0 || t.length + t.accepted > t.num_slots) return 1;
    if (!all_are(t, SCRATCH)) return 1;
    int64_t accepted = 0, freed = t.accepted;
    for (int64_t node = 0; node < t.nodes; ++node) {
        const int32_t slot = t.tree[node];
        if (accepted < t.accepted && t.path[accepted] == node) {
            const int64_t position = t.length + accepted;
            t.states[slot] = LIVE;
            t.readers[slot] = 1;
            t.owners[slot] = t.seq;
            t.positions[slot] = static_cast<int32_t>(position);
            t.prefix_sum += t.slot_keys[slot] * t.position_keys[position];
            t.settled[accepted++] = slot;
        } else {
            t.states[slot] = FREE;
            t.generations[slot] = t.generation;
            t.settled[freed++] = slot;
        }
    }
    t.hash = sequence_hash(t, t.length + t.accepted, 0, 0);
    return 0;
}
