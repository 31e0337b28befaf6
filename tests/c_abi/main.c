/* The C ABI as a C program meets it: tpverify.h, the library, and reference files that references.py wrote.
 *
 * check_abi                        refuses what it must; no GPU is needed
 * check_abi verify.bin move.bin    the same, then every kernel on device 0 against the files
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

int failures = 0;

void expect(int condition, const char* what, ...) {
    va_list arguments;
    if (condition) return;
    ++failures;
    va_start(arguments, what);
    printf("FAILED: ");
    vprintf(what, arguments);
    printf("\n");
    va_end(arguments);
}

void expect_refused(tpv_status status, const char* message) {
    expect(status == TPV_INVALID_ARGUMENT && strncmp(tpv_last_error(), message, strlen(message)) == 0,
           "expected \"%s...\", got status %d, \"%s\"", message, (int)status, tpv_last_error());
}

static struct {
    int (*init)(unsigned);
    int (*device_get)(int*, int);
    int (*retain)(void**, int);
    int (*set_current)(void*);
    int (*alloc)(uint64_t*, size_t);
    int (*alloc_host)(void**, size_t);
    int (*to_device)(uint64_t, const void*, size_t);
    int (*to_host)(void*, uint64_t, size_t);
} driver;

static void load(void* library, const char* name, void* function) {
    void* found = dlsym(library, name);
    if (!found) {
        printf("no %s in the driver\n", name);
        exit(1);
    }
    memcpy(function, &found, sizeof found);
}

int open_device(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int device;
    if (!library) return 0;
    load(library, "cuInit", &driver.init);
    load(library, "cuDeviceGet", &driver.device_get);
    load(library, "cuDevicePrimaryCtxRetain", &driver.retain);
    load(library, "cuCtxSetCurrent", &driver.set_current);
    load(library, "cuMemAlloc_v2", &driver.alloc);
    load(library, "cuMemAllocHost_v2", &driver.alloc_host);
    load(library, "cuMemcpyHtoD_v2", &driver.to_device);
    load(library, "cuMemcpyDtoH_v2", &driver.to_host);
    return !driver.init(0) && !driver.device_get(&device, 0) && !driver.retain(&context, device) &&
           !driver.set_current(context);
}

void* device_memory(size_t bytes) {
    uint64_t address;
    if (driver.alloc(&address, bytes ? bytes : 16)) {
        printf("no %zu bytes of device memory\n", bytes);
        exit(1);
    }
    return (void*)(uintptr_t)address;
}

void* device_copy(const void* host, size_t bytes) {
    void* device = device_memory(bytes);
    expect(!driver.to_device((uint64_t)(uintptr_t)device, host, bytes), "copy of %zu bytes to the device", bytes);
    return device;
}

void* locked_memory(size_t bytes) {
    void* memory;
    if (driver.alloc_host(&memory, bytes)) {
        printf("no %zu bytes of page-locked memory\n", bytes);
        exit(1);
    }
    return memory;
}

/* Waits for what was launched on the default stream. */
void from_device(void* host, const void* device, size_t bytes) {
    expect(!driver.to_host(host, (uint64_t)(uintptr_t)device, bytes), "copy of %zu bytes from the device", bytes);
}

int main(int count, char** arguments) {
    expect(tpv_abi_version() == TPV_ABI_VERSION, "ABI version %d, the header's is %d", tpv_abi_version(), TPV_ABI_VERSION);
    check_arguments();
    if (count == 3) {
        if (!open_device()) {
            printf("FAILED: no GPU\n");
            return 1;
        }
        check_device_pointers();
        check_verify(arguments[1]);
        check_move(arguments[2]);
        check_fetch();
    } else if (count != 1) {
        printf("usage: check_abi [verify.bin move.bin]\n");
        return 2;
    }
    printf("%s\n", failures ? "failed" : "passed");
    return failures != 0;
}
