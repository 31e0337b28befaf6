// The status and message of a C ABI call.
#pragma once

#include "../tpverify.h"

#include <exception>
#include <initializer_list>
#include <new>

namespace tpv {

// Sets this thread's message (printf-style: "argument: expected ..., got ...") and returns the status.
tpv_status fail(tpv_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Runs the body of an ABI function; what it throws becomes a status.
template <class Body>
tpv_status guarded(Body body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return fail(TPV_OUT_OF_MEMORY, "out of host memory");
    } catch (const std::exception& error) {
        return fail(TPV_INTERNAL_ERROR, "%s", error.what());
    }
}

template <class Params>
tpv_status check_struct(const Params* params) {
    if (params == nullptr) return fail(TPV_INVALID_ARGUMENT, "params: expected a struct, got NULL");
    if (params->struct_size != sizeof(Params))
        return fail(TPV_INVALID_ARGUMENT, "struct_size: expected %zu, got %llu", sizeof(Params),
                    static_cast<unsigned long long>(params->struct_size));
    return TPV_OK;
}

struct Pointer {
    const char* name;
    const void* value;
};

inline tpv_status check_pointers(std::initializer_list<Pointer> pointers) {
    for (const Pointer& p : pointers)
        if (p.value == nullptr) return fail(TPV_INVALID_ARGUMENT, "%s: expected an array, got NULL", p.name);
    return TPV_OK;
}

struct Number {
    const char* name;
    int64_t value, lowest;
};

inline tpv_status check_at_least(std::initializer_list<Number> numbers) {
    for (const Number& n : numbers)
        if (n.value < n.lowest)
            return fail(TPV_INVALID_ARGUMENT, "%s: expected %lld or more, got %lld", n.name, static_cast<long long>(n.lowest),
                        static_cast<long long>(n.value));
    return TPV_OK;
}

}  // namespace tpv
