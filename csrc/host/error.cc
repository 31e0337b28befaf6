#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace tpv {

static thread_local char message[512] = "";

tpv_status fail(tpv_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return status;
}

}  // namespace tpv

extern "C" int32_t tpv_abi_version(void) { return TPV_ABI_VERSION; }

extern "C" const char* tpv_last_error(void) { return tpv::message; }
