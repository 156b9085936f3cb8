/* libcuda.so.1 of one GPU whose memory is this machine's: the calls the link test makes, each checked as the driver would.
 * Declarations are those of cuda.h, so that arguments of another width or order are seen.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef unsigned long long CUdeviceptr;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201 };

static int is_initialized;
static char primary;
static _Thread_local CUcontext current;
static size_t allocated;

CUresult cuInit(unsigned flags) {
    is_initialized = flags == 0;
    return flags ? INVALID_VALUE : SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    if (ordinal != 0) return INVALID_VALUE;
    *device = 0;
    return SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (device != 0) return INVALID_VALUE;
    *context = (CUcontext)&primary;
    return SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
    if (context != (CUcontext)&primary) return INVALID_CONTEXT;
    current = context;
    return SUCCESS;
}
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    if (!current) return INVALID_CONTEXT;
    const char *limit = getenv("FAKE_CUDA_BYTES");
    if (limit && size > strtoull(limit, NULL, 10)) return OUT_OF_MEMORY;
    *address = (CUdeviceptr)(uintptr_t)malloc(allocated = size);
    return SUCCESS;
}
CUresult cuMemsetD8_v2(CUdeviceptr address, unsigned char value, size_t count) {
    if (!current) return INVALID_CONTEXT;
    if (count != allocated) return INVALID_VALUE;
    memset((void *)(uintptr_t)address, value, count);
    return SUCCESS;
}
CUresult cuCtxSynchronize(void) { return current ? SUCCESS : INVALID_CONTEXT; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_CONTEXT ? "invalid device context" : "invalid argument";
    return SUCCESS;
}
