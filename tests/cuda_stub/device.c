/* The device that the stub plays, and what it answers about it. FXMEM_STUB_* say which; the default is an H100 SXM. */
#include "stub.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct stub_device device;
static pthread_once_t read_once = PTHREAD_ONCE_INIT;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void read_environment(void) {
    const char *name = getenv("FXMEM_STUB_NAME");
    device.name = name && *name ? name : "NVIDIA H100 80GB HBM3";
    device.capability = number("FXMEM_STUB_CAPABILITY", 90);
    device.num_sms = number("FXMEM_STUB_SMS", 132);
    device.threads_per_sm = number("FXMEM_STUB_THREADS_PER_SM", 2048);
    device.shared_per_sm_bytes = number("FXMEM_STUB_SHARED_PER_SM", 233472);
    device.l2_bytes = number("FXMEM_STUB_L2", 52428800);
    device.memory_bytes = number("FXMEM_STUB_BYTES", 84929347584);
}

const struct stub_device *stub_device(void) {
    pthread_once(&read_once, read_environment);
    return &device;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int ordinal) {
    COUNTED;
    const struct stub_device *d = stub_device();
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", d->name);
    properties->totalGlobalMem = d->memory_bytes;
    properties->major = d->capability / 10;
    properties->minor = d->capability % 10;
    properties->multiProcessorCount = d->num_sms;
    properties->maxThreadsPerMultiProcessor = d->threads_per_sm;
    properties->l2CacheSize = d->l2_bytes;
    properties->sharedMemPerMultiprocessor = d->shared_per_sm_bytes;
    properties->sharedMemPerBlockOptin = d->shared_per_sm_bytes - 1024;
    properties->sharedMemPerBlock = 48 << 10;
    properties->reservedSharedMemPerBlock = 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->totalConstMem = 65536;
    properties->memPitch = 2147483647;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = properties->canMapHostMemory = properties->concurrentKernels = 1;
    properties->cooperativeLaunch = properties->managedMemory = properties->concurrentManagedAccess = 1;
    properties->streamPrioritiesSupported = properties->memoryPoolsSupported = properties->ECCEnabled = 1;
    properties->clusterLaunch = d->capability >= 90;
    return cudaSuccess;
}

int stub_device_attribute(int attribute) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, 0);
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return p.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX: return p.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY: return p.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ: return p.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return p.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: return p.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ: return p.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock: return p.sharedMemPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return p.sharedMemPerBlockOptin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return p.sharedMemPerMultiprocessor;
    case cudaDevAttrReservedSharedMemoryPerBlock: return p.reservedSharedMemPerBlock;
    case cudaDevAttrMaxRegistersPerBlock: return p.regsPerBlock;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return p.regsPerMultiprocessor;
    case cudaDevAttrMultiProcessorCount: return p.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return p.maxBlocksPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor: return p.major;
    case cudaDevAttrComputeCapabilityMinor: return p.minor;
    case cudaDevAttrWarpSize: return p.warpSize;
    case cudaDevAttrL2CacheSize: return p.l2CacheSize;
    case cudaDevAttrTextureAlignment: return p.textureAlignment;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrMemoryPoolsSupported: return 1;
    default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal) {
    COUNTED;
    *value = stub_device_attribute(attribute);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count) {
    COUNTED;
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *ordinal) {
    COUNTED;
    *ordinal = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int ordinal) {
    COUNTED;
    return ordinal == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
    COUNTED;
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int ordinal) {
    COUNTED;
    snprintf(text, length, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    COUNTED;
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    COUNTED;
    *version = CUDART_VERSION;
    return cudaSuccess;
}
