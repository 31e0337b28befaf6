/* Shared by the two halves of the check: what fails is printed and counted, and the device is reached through the driver
 * alone, so that nothing but tpverify.h and libc is needed to build. */
#ifndef CHECK_H
#define CHECK_H

#include <stddef.h>
#include <stdint.h>
#include <tpverify.h>

extern int failures;

void expect(int condition, const char* what, ...);

/* The call was refused, and the message starts with `message`. */
void expect_refused(tpv_status status, const char* message);

/* 0 if there is no driver or no GPU. */
int open_device(void);
void* device_memory(size_t bytes);             /* exits if there is none */
void* device_copy(const void* host, size_t bytes);
void* locked_memory(size_t bytes);             /* of the host, page-locked; likewise */
void from_device(void* host, const void* device, size_t bytes);

/* arguments.c */
void check_arguments(void);
void check_device_pointers(void);

/* kernels.c */
void check_verify(const char* path);
void check_move(const char* path);
void check_fetch(void);

#endif
