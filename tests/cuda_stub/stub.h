/* What the parts of the stub share: the device it plays, the memory it hands out, and a count of every call. */
#pragma once
#include <stdatomic.h>
#include <stddef.h>

/* The emulated device; each field comes from an environment variable, see device.c. */
struct stub_device {
    const char *name;
    int capability; /* 90 for sm_90 */
    int num_sms;
    int threads_per_sm;
    size_t shared_per_sm_bytes;
    size_t l2_bytes;
    size_t memory_bytes;
};
const struct stub_device *stub_device(void);
int stub_device_attribute(int attribute); /* cudaDeviceAttr and CUdevice_attribute share their numbers */

/* Device memory is address space that nobody has touched yet: reading it gives zeros, writing it costs host memory. */
void *stub_map(size_t nbytes, size_t alignment);
void stub_unmap(void *address);
int stub_take(size_t nbytes); /* 0 if the device has so many bytes left, and takes them */
void stub_give_back(size_t nbytes);

/* Every function of the stub says COUNTED first; tests ask how often a name was called (stub_calls). */
struct stub_counter {
    const char *name;
    atomic_long calls;
    atomic_int listed;
    struct stub_counter *next;
};
void stub_count(struct stub_counter *counter);
#define COUNTED                                                                                                             \
    static struct stub_counter counter_ = {.name = __func__};                                                              \
    stub_count(&counter_)

void *stub_handle(void); /* a new non-null handle: streams, events, descriptors have no content */
