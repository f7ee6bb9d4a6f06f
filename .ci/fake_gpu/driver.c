/* libcuda.so.1, as far as torch asks it: the rest of it are stand-ins, which say that they are not supported. */
#include "gpus.h"

int fake_gpu_of(int device); /* device.c */

int cuInit(unsigned flags) { return 0; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuGetErrorString(int error, const char **text) {
    *text = error == 801 ? "operation not supported" : "an error of the fake GPU";
    return 0;
}

int cuCtxGetCurrent(void **context) {
    *context = NULL;
    return 0;
}

/* Has this process used the GPU? torch starts backward's threads on those that it has. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 0;
    for (Holder *one = NULL; (one = next_holder(fake_gpu_of(device), one));)
        *active |= one->pid == getpid();
    return 0;
}
