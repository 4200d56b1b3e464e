/* Streams, events, kernels and the look-up of functions: handles without content, launches without effect. */
#define _GNU_SOURCE
#include "stub.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Atomic(struct stub_counter *) counters;

void stub_count(struct stub_counter *counter) {
    atomic_fetch_add(&counter->calls, 1);
    if (atomic_exchange(&counter->listed, 1) == 0) {
        counter->next = atomic_load(&counters);
        while (!atomic_compare_exchange_weak(&counters, &counter->next, counter))
            ;
    }
}

/* For tests: how often a function of this name was called. */
long stub_calls(const char *name) {
    long calls = 0;
    for (struct stub_counter *c = atomic_load(&counters); c; c = c->next)
        calls += strcmp(c->name, name) == 0 ? atomic_load(&c->calls) : 0;
    return calls;
}

void *stub_handle(void) { return calloc(1, 64); }

/* -- streams and events: everything is done as soon as it is asked for ---------------------------------------------- */

cudaError_t cudaStreamCreate(cudaStream_t *stream) {
    COUNTED;
    *stream = stub_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    COUNTED;
    *stream = stub_handle();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    COUNTED;
    *stream = stub_handle();
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    COUNTED;
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    COUNTED;
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    COUNTED;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *num_nodes) {
    COUNTED;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *event) {
    COUNTED;
    *event = stub_handle();
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    COUNTED;
    *event = stub_handle();
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    COUNTED;
    *milliseconds = 1;
    return cudaSuccess;
}

/* -- kernels ---------------------------------------------------------------------------------------------------------- */

static char anything[1 << 20]; /* stands for a device variable, a kernel, a context: only its address counts */

void **__cudaRegisterFatBinary(void *binary) { return (void **)anything; }
char __cudaInitModule(void **module) { return 1; }

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *entry) {
    *kernel = (cudaKernel_t)entry;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    COUNTED;
    *address = anything;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
    COUNTED;
    *kernel = (cudaKernel_t)anything;
    return cudaSuccess;
}

/* 32 registers a thread is a guess: the true number is in the machine code. It decides how many blocks fit on an SM,
   and with that the scratch of those few kernels that size it by occupancy. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    COUNTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->binaryVersion = attributes->ptxVersion = stub_device()->capability;
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}

static int blocks_per_sm(int threads, size_t shared_bytes) {
    int by_threads = stub_device()->threads_per_sm / (threads > 0 ? threads : 1);
    int by_shared = stub_device()->shared_per_sm_bytes / (shared_bytes + 1024);
    int blocks = by_threads < by_shared ? by_threads : by_shared;
    return blocks < 1 ? 1 : blocks > 32 ? 32 : blocks;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared_bytes) {
    COUNTED;
    *blocks = blocks_per_sm(threads, shared_bytes);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared_bytes, unsigned flags) {
    COUNTED;
    *blocks = blocks_per_sm(threads, shared_bytes);
    return cudaSuccess;
}

/* -- errors and look-up ----------------------------------------------------------------------------------------------- */

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfTheStub";
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the CUDA stub";
}

static CUresult nothing(void) {
    COUNTED;
    return CUDA_SUCCESS;
}

/* The driver's functions carry version suffixes, and callers ask without them. One that even cuda.h does not know does
   nothing. */
static void *driver_function(const char *name) {
    static const char *suffixes[] = {"_v4", "_v3", "_v2", ""};
    char versioned[256];
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        snprintf(versioned, sizeof versioned, "%s%s", name, suffixes[i]);
        void *found = dlsym(RTLD_DEFAULT, versioned);
        if (found)
            return found;
    }
    return (void *)nothing;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    COUNTED;
    *function = driver_function(name);
    if (result)
        *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
    COUNTED;
    *function = driver_function(name);
    if (result)
        *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

/* -- what libraries with a runtime of their own ask the driver -------------------------------------------------------- */

CUresult cuDriverGetVersion(int *version) {
    COUNTED;
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    COUNTED;
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    COUNTED;
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    COUNTED;
    snprintf(name, length, "%s", stub_device()->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *nbytes, CUdevice device) {
    COUNTED;
    *nbytes = stub_device()->memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    COUNTED;
    *value = stub_device_attribute(attribute);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    COUNTED;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    COUNTED;
    *context = (CUcontext)anything;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    COUNTED;
    *context = (CUcontext)anything;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    COUNTED;
    *function = (CUfunction)anything;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    COUNTED;
    *module = (CUmodule)anything;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    COUNTED;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared_bytes) {
    COUNTED;
    *blocks = blocks_per_sm(threads, shared_bytes);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    COUNTED;
    *text = "an error of the CUDA stub";
    return CUDA_SUCCESS;
}

CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    COUNTED;
    *table = NULL; /* private tables: who insists on them cannot run here, and is told so */
    return CUDA_ERROR_NOT_FOUND;
}
