/* Memory of the emulated device: reserved address space, counted against the device's bytes.

   A kernel computes nothing, so what lies in device memory hardly matters. Only small copies are made: scalars, index
   tables and step counters that the host reads back keep their values, and a model of many GB costs no host memory. */
#define _GNU_SOURCE
#include "stub.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SMALL_COPY_BYTES ((size_t)64 << 10)
#define READ_BACK_BYTES ((size_t)64 << 20) /* untouched pages read as zeros and cost nothing */
#define PAGE_BYTES ((size_t)2 << 20)       /* the granularity of the driver's virtual memory */

#define ARENA_END ((size_t)0x200000000000)
#define CHUNK_BYTES ((size_t)32 << 20)

struct region {
    char *address; /* as handed out */
    char *mapping; /* as mmap gave it, before alignment */
    size_t nbytes, mapped_bytes;
    int on_device;
    struct region *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct region *regions;
static size_t used_bytes, peak_bytes;

static size_t rounded_up(size_t nbytes, size_t grain) { return (nbytes + grain - 1) / grain * grain; }

/* The next address, as the driver gave them on an H200: chunks of 32 MiB at falling addresses, and what fits into the rest
   of the last one behind what is there. Before torch 2.12 the caching allocator breaks ties by address. */
static char *next_address(size_t nbytes) {
    static char *lowest = (char *)ARENA_END, *next;
    static size_t left;
    pthread_mutex_lock(&lock);
    if (nbytes > left) {
        left = rounded_up(nbytes, CHUNK_BYTES);
        next = lowest -= left;
    }
    char *address = next;
    next += nbytes;
    left -= nbytes;
    pthread_mutex_unlock(&lock);
    return address;
}

static void *map_region(size_t nbytes, size_t alignment, int on_device) {
    size_t slack = on_device && alignment <= PAGE_BYTES ? 0 : alignment;
    size_t mapped = rounded_up(nbytes + slack, PAGE_BYTES);
    char *hint = on_device ? next_address(mapped) : NULL;
    char *mapping = mmap(hint, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED)
        return NULL;
    struct region *region = calloc(1, sizeof *region);
    region->mapping = mapping;
    region->mapped_bytes = mapped;
    region->address = (char *)(((size_t)mapping + alignment - 1) / alignment * alignment);
    region->nbytes = nbytes;
    region->on_device = on_device;
    pthread_mutex_lock(&lock);
    region->next = regions;
    regions = region;
    pthread_mutex_unlock(&lock);
    return region->address;
}

static size_t unmap_region(void *address) {
    pthread_mutex_lock(&lock);
    struct region **place = &regions, *region;
    while (*place && (*place)->address != (char *)address)
        place = &(*place)->next;
    region = *place;
    if (region)
        *place = region->next;
    pthread_mutex_unlock(&lock);
    if (!region)
        return 0;
    size_t nbytes = region->nbytes;
    munmap(region->mapping, region->mapped_bytes);
    free(region);
    return nbytes;
}

void *stub_map(size_t nbytes, size_t alignment) { return map_region(nbytes, alignment, 1); }
void stub_unmap(void *address) { unmap_region(address); }

int stub_take(size_t nbytes) {
    pthread_mutex_lock(&lock);
    int refused = used_bytes + nbytes > stub_device()->memory_bytes;
    if (!refused) {
        used_bytes += nbytes;
        peak_bytes = used_bytes > peak_bytes ? used_bytes : peak_bytes;
    }
    pthread_mutex_unlock(&lock);
    return refused;
}

void stub_give_back(size_t nbytes) {
    pthread_mutex_lock(&lock);
    used_bytes -= nbytes;
    pthread_mutex_unlock(&lock);
}

/* For tests: bytes taken from the device now and at most. */
size_t stub_used_bytes(void) { return used_bytes; }
size_t stub_peak_bytes(void) { return peak_bytes; }

/* -- the runtime's calls ------------------------------------------------------------------------------------------ */

cudaError_t cudaMalloc(void **address, size_t nbytes) {
    COUNTED;
    *address = NULL;
    if (stub_take(nbytes))
        return cudaErrorMemoryAllocation;
    *address = map_region(nbytes, PAGE_BYTES, 1);
    return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
    COUNTED;
    if (address)
        stub_give_back(unmap_region(address));
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **address, size_t nbytes, cudaStream_t stream) {
    COUNTED;
    return cudaMalloc(address, nbytes);
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    COUNTED;
    return cudaFree(address);
}

cudaError_t cudaHostAlloc(void **address, size_t nbytes, unsigned flags) {
    COUNTED;
    *address = map_region(nbytes, 4096, 0);
    return *address ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *address) {
    COUNTED;
    unmap_region(address);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    COUNTED;
    *total_bytes = stub_device()->memory_bytes;
    *free_bytes = *total_bytes - used_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    COUNTED;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -1;
    pthread_mutex_lock(&lock);
    for (struct region *r = regions; r; r = r->next)
        if ((char *)address >= r->address && (char *)address < r->address + r->nbytes) {
            attributes->type = r->on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
            attributes->device = 0;
            attributes->devicePointer = (void *)address;
            attributes->hostPointer = r->on_device ? NULL : (void *)address;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static void copy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    if (nbytes <= SMALL_COPY_BYTES || (kind == cudaMemcpyDeviceToHost && nbytes <= READ_BACK_BYTES))
        memcpy(to, from, nbytes);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind) {
    COUNTED;
    copy(to, from, nbytes, kind);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    COUNTED;
    copy(to, from, nbytes, kind);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t nbytes) {
    COUNTED;
    if (nbytes <= SMALL_COPY_BYTES)
        memset(to, value, nbytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t nbytes, cudaStream_t stream) {
    COUNTED;
    return cudaMemset(to, value, nbytes);
}

/* -- the driver's calls, which expandable segments are made of: an address range first, bytes of the device later ---- */

CUresult cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags which) {
    COUNTED;
    *nbytes = PAGE_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    COUNTED;
    *address = (CUdeviceptr)map_region(nbytes, PAGE_BYTES, 1);
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    COUNTED;
    unmap_region((void *)address);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *prop, unsigned long long flags) {
    COUNTED;
    if (stub_take(nbytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t *size = malloc(sizeof *size);
    *size = nbytes;
    *handle = (CUmemGenericAllocationHandle)size;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    COUNTED;
    stub_give_back(*(size_t *)handle);
    free((void *)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    COUNTED;
    madvise((void *)address, nbytes, MADV_DONTNEED);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    COUNTED;
    return (CUresult)cudaMemGetInfo(free_bytes, total_bytes);
}
