/* libnvidia-ml.so.1: the GPUs, whatever CUDA_VISIBLE_DEVICES says, and the memory of their processes. */
#include "gpus.h"

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };

/* A handle is the GPU's number plus one. */
static int gpu_of(void *device) { return (int)(long)device - 1; }

int nvmlInit_v2(void) {
    const char *wanted = getenv("FAKE_NVML");
    return wanted && !strcmp(wanted, "fail") ? UNKNOWN : SUCCESS;
}
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) { return error == SUCCESS ? "Success" : "an error of the fake NVML"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.00");
    return SUCCESS;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = gpus();
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(long)(index + 1);
    return index < (unsigned)gpus() ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = gpu_of(device);
    return SUCCESS;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    snprintf(text, size, "Fake GPU");
    return SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    write_uuid(text, size, gpu_of(device));
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    for (int gpu = 0; gpu < gpus(); gpu++) {
        char text[96];
        write_uuid(text, sizeof text, gpu);
        if (!strcmp(text, uuid))
            return nvmlDeviceGetHandleByIndex_v2(gpu, device);
    }
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2)
        return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(bus - FIRST_BUS, device);
}

int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) {
    *now = *pending = setting("FAKE_GPU_MIG", 0) != 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    memory[0] = total_memory();
    memory[2] = used_memory(gpu_of(device));
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned percent[2]) {
    int busy = 0;
    for (Holder *one = NULL; (one = next_holder(gpu_of(device), one));)
        busy |= one->busy;
    percent[0] = busy ? 100 : 0;
    percent[1] = 0;
    return SUCCESS;
}

/* The first version's entries are a pid and its bytes; later versions' have the numbers of two MIG instances besides. */
static int processes(void *device, unsigned *count, unsigned long long *entries, int words) {
    unsigned room = *count;
    *count = 0;
    for (Holder *one = NULL; (one = next_holder(gpu_of(device), one)); ++*count)
        if (*count < room) {
            unsigned long long *entry = entries + *count * words;
            entry[0] = one->pid;
            entry[1] = one->bytes;
            if (words > 2)
                entry[2] = ~0ull; /* no instances */
        }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *entries) {
    return processes(device, count, entries, 2);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *entries) {
    return processes(device, count, entries, 3);
}

/* torch wants them to be there. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
