/* A CUDA driver library for a machine that has none, so that kvikio can be measured on host memory.
 *
 * kvikio asks the driver about every pointer it is given, also where the answer can only be "host memory", and
 * looks up all of its driver functions before the first question. Here the two that it calls give the answers of
 * a driver that has never seen the pointer; every other one reports CUDA_ERROR_NO_DEVICE. It is compiled into the
 * virtual environment and loaded only where no real libcuda.so.1 can be found.
 */

enum { SUCCESS = 0, NO_DEVICE = 100, ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_DEVICE_POINTER = 3 };

int cuDriverGetVersion(int *version) {
    *version = 12000;
    return SUCCESS;
}

/* Every attribute of an unknown pointer is 0; the two that are pointers are wider than the others. */
int cuPointerGetAttributes(unsigned count, const int *attributes, void **values, unsigned long pointer) {
    (void)pointer;
    for (unsigned index = 0; index < count; index++) {
        if (attributes[index] == ATTRIBUTE_CONTEXT || attributes[index] == ATTRIBUTE_DEVICE_POINTER) {
            *(void **)values[index] = 0;
        } else {
            *(unsigned *)values[index] = 0;
        }
    }
    return SUCCESS;
}

#define ABSENT(name) \
    int name(void) { return NO_DEVICE; }

ABSENT(cuCtxCreate_v4)
ABSENT(cuCtxDestroy_v2)
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetDevice)
ABSENT(cuCtxPopCurrent_v2)
ABSENT(cuCtxPushCurrent_v2)
ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetAttribute)
ABSENT(cuDeviceGetCount)
ABSENT(cuDevicePrimaryCtxRelease_v2)
ABSENT(cuDevicePrimaryCtxRetain)
ABSENT(cuEventCreate)
ABSENT(cuEventDestroy_v2)
ABSENT(cuEventQuery)
ABSENT(cuEventRecord)
ABSENT(cuEventSynchronize)
ABSENT(cuGetErrorName)
ABSENT(cuGetErrorString)
ABSENT(cuLaunchHostFunc)
ABSENT(cuMemFreeHost)
ABSENT(cuMemGetAddressRange_v2)
ABSENT(cuMemHostAlloc)
ABSENT(cuMemHostRegister_v2)
ABSENT(cuMemHostUnregister)
ABSENT(cuMemcpyAsync)
ABSENT(cuMemcpyDtoHAsync_v2)
ABSENT(cuMemcpyHtoDAsync_v2)
ABSENT(cuPointerGetAttribute)
ABSENT(cuStreamCreate)
ABSENT(cuStreamDestroy_v2)
ABSENT(cuStreamSynchronize)
