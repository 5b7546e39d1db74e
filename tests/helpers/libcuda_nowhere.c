/* A libcuda that launches nothing: it hands every launch to a function of the test's. What else
   Triton's launcher and loader ask of it succeeds. */
#include "cuda.h"
#include <string.h>

typedef void (*Seen)(const CUlaunchConfig *, CUfunction, void **);
static Seen seen = NULL;
void tell(Seen function) { seen = function; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
  if (seen) seen(config, f, params);
  return CUDA_SUCCESS;
}

/* The map holds, side by side, what it was asked to encode. */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
    void *address, const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  cuuint64_t *words = (cuuint64_t *)map;
  memset(map, 0, sizeof *map);
  words[0] = (cuuint64_t)address;
  words[1] = type;
  words[2] = (cuuint64_t)swizzle << 32 | fill;
  words[3] = strides[0];
  for (cuuint32_t i = 0; i < rank && i < 4; i++) {
    words[4 + i] = sizes[i];
    words[8 + i] = box[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
  *value = what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
           : what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
                                                                  : 232448;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  static size_t next = 16;
  *f = (CUfunction)(next++);
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute what, CUfunction f) {
  *value = what == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute what, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int which) { return *device = which, CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { return *m = (CUmodule)2, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return *text = "?", CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return *c = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
