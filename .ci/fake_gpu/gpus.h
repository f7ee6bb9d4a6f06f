/* The fake machine: how many GPUs it has, and which process holds how much of their memory. CUDA's runtime, its driver and
   NVML each include this; what they have to agree on is in one file that all processes map. */
#pragma once
#include "shared.h"
#include <stdatomic.h>

enum { MAX_GPUS = 64, MAX_HOLDERS = 1024 };
enum { FIRST_BUS = 1 }; /* the first GPU's, of PCI */
static const size_t CONTEXT = 256ul << 20; /* bytes that a process takes by merely using a GPU */

/* A process's context on a GPU. */
typedef struct {
    _Atomic int pid, gpu;
    _Atomic size_t bytes;
    _Atomic int busy; /* operations that its streams have still to do */
} Holder;

static inline int gpus(void) {
    long wanted = setting("FAKE_GPUS", 2);
    return wanted < 0 ? 0 : wanted > MAX_GPUS ? MAX_GPUS : wanted;
}

static inline size_t total_memory(void) { return (size_t)setting("FAKE_GPU_MEMORY_MB", 16384) << 20; }

static inline Holder *holders(void) {
    static Holder *_Atomic all;
    if (!all)
        all = shared_memory("holders", MAX_HOLDERS * sizeof(Holder));
    return all;
}

/* A zombie holds nothing any more. */
static inline int lives(int pid) {
    char path[64], line[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    const char *read = fgets(line, sizeof line, file), *end = strrchr(line, ')');
    fclose(file);
    return read && end && end[2] != 'Z' && end[2] != 'X';
}

/* The holders of a GPU's memory, one after the other: start with NULL. */
static inline Holder *next_holder(int gpu, Holder *last) {
    for (Holder *one = last ? last + 1 : holders(); one < holders() + MAX_HOLDERS; one++)
        if (one->pid && one->gpu == gpu && lives(one->pid))
            return one;
    return NULL;
}

static inline size_t used_memory(int gpu) {
    size_t sum = 0;
    for (Holder *one = NULL; (one = next_holder(gpu, one));)
        sum += one->bytes;
    return sum;
}

static inline void write_uuid(char *text, size_t size, int gpu) {
    snprintf(text, size, "GPU-%08x-1111-2222-3333-444444444444", gpu + 1);
}
