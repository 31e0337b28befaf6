// The two changes of every decode step in the slot tables (tpverify/kv/table.py), for the Python package alone.
#pragma once

#include "../tpverify.h"

extern "C" {

// Of one pool, then of one change. Nothing is changed unless all that is checked holds: then the call returns 0, else 1.
struct tpv_tables_params {
    uint64_t struct_size;
    int64_t num_slots;
    uint8_t* states;      // [num_slots], see tpverify/kv/slots.py
    int32_t* readers;     // these too
    int32_t* positions;
    int64_t* owners;
    int64_t* generations;
    const uint64_t* slot_keys;
    const uint64_t* position_keys;

    int64_t limit;        // slots from here on are not claimed
    int64_t generation;   // of the slots that become free
    int64_t seq;
    int64_t length;       // its committed positions before the change
    int64_t nodes;        // of its tree
    int64_t accepted;     // of these
    const int32_t* tree;  // [nodes] slots
    const int32_t* path;  // [accepted] nodes
    int32_t* settled;     // out [nodes]: the slots accepted, then those freed
    uint64_t prefix_sum;  // in and out
    uint64_t tree_sum;    // out
    uint64_t hash;        // out: the sequence's
};

// Free slots become the sequence's tree; it has none yet.
TPV_API int tpv_draft(tpv_tables_params* params);

// Nodes on the path become its next positions, and the others' slots free.
TPV_API int tpv_commit(tpv_tables_params* params);
}
