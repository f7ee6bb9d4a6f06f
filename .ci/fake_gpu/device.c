/* libcudart.so.13: GPUs whose memory is the host's, and whose streams are queues that one thread of the process works off.

   No kernel computes anything, but for two that matter to the order of things (see "Kernels"): numbers are the CPU's
   (kernels.cpp). The host waits as CUDA's does: it spins, in native code. What torch wants and is not here is a stand-in
   that says cudaErrorNotSupported (build.py). */
#include "gpus.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NOT_READY = 600,
    ASSERT = 710,
    NOT_SUPPORTED = 801
};

/* ------------------------------------------------------------------ Errors */

static _Atomic int sticky;    /* what has broken the context: each call says it from then on */
static __thread int last;     /* what cudaGetLastError says once */

static int failed(int error) { return last = error; }

void fake_fault(void) { sticky = ASSERT; }

int cudaPeekAtLastError(void) { return sticky ? sticky : last; }
int cudaGetLastError(void) {
    int error = cudaPeekAtLastError();
    last = SUCCESS;
    return error;
}

static const struct {
    int error;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {ASSERT, "cudaErrorAssert", "device-side assert triggered"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
};
static int row(int error) {
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return i;
    return 1;
}
const char *cudaGetErrorName(int error) { return errors[row(error)].name; }
const char *cudaGetErrorString(int error) { return errors[row(error)].text; }

/* ------------------------------------------------------------------ GPUs */

static int visible[MAX_GPUS], visible_count = -1;
static __thread int current;

/* CUDA reads CUDA_VISIBLE_DEVICES once: numbers or beginnings of UUIDs, up to the first that is not there; with one twice
   there is none. Of MIG instances it takes one. */
static void read_visible(void) {
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    int count = 0;
    for (int gpu = 0; !wanted && gpu < gpus(); gpu++)
        visible[count++] = gpu;
    while (wanted && *wanted && count < MAX_GPUS) {
        char *end, uuid[96];
        size_t length = strcspn(wanted, ",");
        long found = -1;
        if (!strncmp(wanted, "MIG-", 4))
            found = 0;
        else if (!strncmp(wanted, "GPU-", 4))
            for (int gpu = 0; gpu < gpus(); gpu++) {
                write_uuid(uuid, sizeof uuid, gpu);
                if (!strncmp(uuid, wanted, length))
                    found = gpu;
            }
        else if ((found = strtol(wanted, &end, 10), end == wanted))
            found = -1;
        if (found < 0 || found >= gpus())
            break;
        for (int i = 0; i < count; i++)
            if (visible[i] == found) {
                visible_count = 0;
                return;
            }
        visible[count++] = found;
        wanted += length + (wanted[length] == ',');
    }
    visible_count = setting("FAKE_GPU_MIG", 0) && count > 1 ? 1 : count;
}

int cudaGetDeviceCount(int *count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_visible);
    *count = visible_count;
    return *count ? SUCCESS : failed(NO_DEVICE);
}

static int valid(int device) {
    int count;
    cudaGetDeviceCount(&count);
    return device >= 0 && device < count;
}

/* The machine's number of a visible device. */
int fake_gpu_of(int device) { return valid(device) ? visible[device] : 0; }

/* This process's share in the current GPU; it has a context from then on. */
static Holder *context_on(int device) {
    static _Atomic int owner;
    static Holder *_Atomic own[MAX_GPUS];
    static pthread_mutex_t claim = PTHREAD_MUTEX_INITIALIZER;
    int gpu = fake_gpu_of(device), pid = getpid();
    pthread_mutex_lock(&claim);
    if (owner != pid) { /* a fork's child has none */
        memset(own, 0, sizeof own);
        owner = pid;
    }
    for (Holder *one = holders(); !own[gpu] && one < holders() + MAX_HOLDERS; one++) {
        int before = one->pid;
        if ((!before || !lives(before)) && atomic_compare_exchange_strong(&one->pid, &before, pid)) {
            one->gpu = gpu;
            one->bytes = CONTEXT;
            one->busy = 0;
            own[gpu] = one;
        }
    }
    pthread_mutex_unlock(&claim);
    return own[gpu];
}

int cudaSetDevice(int device) {
    if (!valid(device))
        return failed(INVALID_DEVICE);
    context_on(current = device);
    return sticky;
}
int cudaGetDevice(int *device) {
    *device = current;
    return SUCCESS;
}
int cudaDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}
int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* cudaDeviceProp of CUDA 13, as far as torch reads it. */
typedef union {
    char size[1008];
    struct {
        char name[256];
        unsigned char uuid[16], unread[16];
        size_t memory, shared_memory_of_block;
        int registers_of_block, warp;
        size_t pitch;
        int threads_of_block, block[3], grid[3];
        size_t constant_memory;
        int major, minor;
        size_t alignments[2];
        int processors;
    };
    struct {
        char before_bus[568];
        int bus, bus_device, domain;
        char before_cache[16];
        int cache, persisting_cache, threads_of_processor;
        char before_shared_memory[16];
        size_t shared_memory_of_processor;
        int registers_of_processor;
        char before_optional[36];
        size_t shared_memory_optional;
    };
} Properties;
_Static_assert(offsetof(Properties, processors) == 384, "cudaDeviceProp");
_Static_assert(offsetof(Properties, cache) == 596, "cudaDeviceProp");
_Static_assert(offsetof(Properties, shared_memory_of_processor) == 624, "cudaDeviceProp");
_Static_assert(offsetof(Properties, shared_memory_optional) == 672, "cudaDeviceProp");

int cudaGetDeviceProperties(Properties *told, int device) {
    if (!valid(device))
        return failed(INVALID_DEVICE);
    char uuid[96];
    memset(told, 0, sizeof *told);
    strcpy(told->name, "Fake GPU");
    write_uuid(uuid, sizeof uuid, fake_gpu_of(device));
    const char *digit = uuid + strlen("GPU-");
    for (int i = 0; i < 16; i++, digit += 2) {
        digit += *digit == '-';
        sscanf(digit, "%2hhx", &told->uuid[i]);
    }
    told->memory = total_memory();
    told->shared_memory_of_block = told->shared_memory_of_processor = told->shared_memory_optional = 48 << 10;
    told->registers_of_block = told->registers_of_processor = 65536;
    told->warp = 32;
    told->threads_of_block = told->threads_of_processor = 1024;
    for (int i = 0; i < 3; i++)
        told->block[i] = 1024, told->grid[i] = 65535;
    told->major = 9;
    told->processors = 100;
    told->cache = 32 << 20;
    told->bus = FIRST_BUS + fake_gpu_of(device);
    return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {{1, 1024}, {8, 48 << 10}, {10, 32}, {12, 65536}, {16, 100}, {39, 1024},
                                   {75, 9},   {76, 0},       {81, 48 << 10}, {97, 48 << 10}};
    *value = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute)
            *value = known[i][1];
    return SUCCESS;
}
int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02X:00.0", FIRST_BUS + fake_gpu_of(device));
    return SUCCESS;
}
int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return SUCCESS;
}

/* ------------------------------------------------------------------ Streams */

enum { QUEUE = 1024 }; /* operations that a stream takes before the host has to wait */

typedef struct Operation {
    struct Operation *next;
    int (*advance)(void *); /* is asked again and again, until it says that it is done */
    void *argument;
} Operation;

typedef struct Stream {
    struct Stream *next;
    int device, priority;
    Operation *first, *newest;
    _Atomic unsigned long pushed, done; /* operations, so far */
} Stream;

static Stream legacy[MAX_GPUS];
static Stream *_Atomic streams; /* all with which something was done; none is ever freed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t more = PTHREAD_COND_INITIALIZER;
static unsigned long waiting; /* operations of all streams */

static Stream *stream_of(void *handle) {
    if ((uintptr_t)handle > 2)
        return handle;
    legacy[current].device = current; /* NULL, 1 and 2 are CUDA's names of a device's default stream */
    return &legacy[current];
}

static void *work(void *unused) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!waiting)
            pthread_cond_wait(&more, &lock);
        pthread_mutex_unlock(&lock);
        int moved = 0;
        for (Stream *stream = streams; stream; stream = stream->next) {
            Operation *operation = stream->done < stream->pushed ? stream->first : NULL;
            if (!operation || !operation->advance(operation->argument))
                continue;
            moved = 1;
            pthread_mutex_lock(&lock);
            stream->first = operation->next;
            stream->done++;
            waiting--;
            context_on(stream->device)->busy--;
            pthread_mutex_unlock(&lock);
            free(operation);
        }
        if (!moved)
            usleep(50);
    }
    return NULL;
}

/* Queue an operation; NCCL's, too. Returns its number in the stream. */
unsigned long fake_push(void *handle, int (*advance)(void *), void *argument) {
    static int started;
    Stream *stream = stream_of(handle);
    while (stream->pushed - stream->done >= QUEUE && !sticky)
        sched_yield(); /* a full queue holds up the host, as CUDA's does */
    Operation *operation = malloc(sizeof *operation);
    *operation = (Operation){NULL, advance, argument};
    context_on(stream->device)->busy++;
    pthread_mutex_lock(&lock);
    if (!stream->pushed) {
        stream->next = streams;
        streams = stream;
    }
    if (stream->done == stream->pushed)
        stream->first = operation;
    else
        stream->newest->next = operation;
    stream->newest = operation;
    unsigned long number = ++stream->pushed;
    waiting++;
    if (!started) {
        pthread_t thread;
        started = !pthread_create(&thread, NULL, work, NULL);
    }
    pthread_cond_signal(&more);
    pthread_mutex_unlock(&lock);
    return number;
}

static int spin(Stream *stream, unsigned long number) {
    while (stream->done < number && !sticky)
        sched_yield();
    return sticky;
}

int cudaStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    *stream = calloc(1, sizeof **stream);
    (*stream)->device = current;
    (*stream)->priority = priority;
    context_on(current);
    return sticky;
}
int cudaStreamCreateWithFlags(Stream **stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
int cudaStreamCreate(Stream **stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
int cudaStreamDestroy(void *stream) { return sticky; }
int cudaStreamGetPriority(void *stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return sticky;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return sticky;
}
int cudaStreamQuery(void *handle) {
    Stream *stream = stream_of(handle);
    return sticky ? sticky : stream->done < stream->pushed ? NOT_READY : SUCCESS;
}
int cudaStreamSynchronize(void *handle) { return spin(stream_of(handle), stream_of(handle)->pushed); }
int cudaDeviceSynchronize(void) {
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == current)
            spin(stream, stream->pushed);
    return sticky;
}

/* Nothing is ever captured in a graph. */
int cudaStreamIsCapturing(void *stream, int *status) {
    *status = 0;
    return sticky;
}
int cudaStreamGetCaptureInfo(void *stream, int *status, ...) { return cudaStreamIsCapturing(stream, status); }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return sticky; }

typedef struct {
    void (*function)(void *);
    void *argument;
} HostCall;
static int advance_host_call(void *argument) {
    HostCall *call = argument;
    call->function(call->argument);
    free(call);
    return 1;
}
int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    HostCall *call = malloc(sizeof *call);
    *call = (HostCall){function, argument};
    fake_push(stream, advance_host_call, call);
    return sticky;
}

/* ------------------------------------------------------------------ Events */

typedef struct {
    _Atomic int references; /* the user's, and one for each record that its stream has not reached */
    Stream *stream;         /* none before the first record */
    unsigned long number;   /* the record is reached when the stream has done so many */
    double time;            /* seconds */
} Event;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

int cudaEventDestroy(Event *event) {
    if (!--event->references)
        free(event);
    return sticky;
}
static int advance_record(void *argument) {
    Event *event = argument;
    event->time = now();
    cudaEventDestroy(event);
    return 1;
}
int cudaEventCreateWithFlags(Event **event, unsigned flags) {
    *event = calloc(1, sizeof **event);
    (*event)->references = 1;
    return sticky;
}
int cudaEventCreate(Event **event) { return cudaEventCreateWithFlags(event, 0); }
int cudaEventRecord(Event *event, void *handle) {
    event->stream = stream_of(handle);
    if (event->stream->done < event->stream->pushed) {
        event->references++;
        event->number = fake_push(handle, advance_record, event);
    } else {
        event->number = event->stream->done;
        event->time = now();
    }
    context_on(current);
    return sticky;
}
int cudaEventRecordWithFlags(Event *event, void *stream, unsigned flags) { return cudaEventRecord(event, stream); }
static int pending(const Event *event) { return event->stream && event->stream->done < event->number; }
int cudaEventQuery(Event *event) { return sticky ? sticky : pending(event) ? NOT_READY : SUCCESS; }
int cudaEventSynchronize(Event *event) { return event->stream ? spin(event->stream, event->number) : sticky; }
int cudaEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    if (!start->stream || !end->stream)
        return failed(INVALID_VALUE);
    *milliseconds = (end->time - start->time) * 1e3;
    return sticky ? sticky : pending(start) || pending(end) ? NOT_READY : SUCCESS;
}

typedef struct {
    Stream *stream;
    unsigned long number;
} Record;
static int advance_wait(void *argument) {
    Record *record = argument;
    if (record->stream->done < record->number)
        return 0;
    free(record);
    return 1;
}
int cudaStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    if (pending(event) && event->stream != stream_of(stream)) {
        Record *record = malloc(sizeof *record);
        *record = (Record){event->stream, event->number};
        fake_push(stream, advance_wait, record);
    }
    return sticky;
}

/* ------------------------------------------------------------------ Memory */

typedef struct Block {
    struct Block *next;
    char *start;
    size_t size;
    int device; /* -1: pinned memory of the host */
} Block;
static Block *blocks;
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

static int allocate(void **address, size_t size, int device) {
    Holder *context = context_on(current);
    if (sticky)
        return sticky;
    size = (size + 511) / 512 * 512;
    if (device >= 0 && used_memory(fake_gpu_of(device)) + size > total_memory())
        return failed(OUT_OF_MEMORY);
    if (!(*address = aligned_alloc(512, size)))
        return failed(OUT_OF_MEMORY);
    Block *block = malloc(sizeof *block);
    *block = (Block){NULL, *address, size, device};
    if (device >= 0)
        context->bytes += size;
    pthread_mutex_lock(&blocks_lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&blocks_lock);
    return SUCCESS;
}
static int release(void *address) {
    pthread_mutex_lock(&blocks_lock);
    Block **place = &blocks;
    while (*place && (*place)->start != address)
        place = &(*place)->next;
    Block *block = *place;
    if (block)
        *place = block->next;
    pthread_mutex_unlock(&blocks_lock);
    if (block) {
        if (block->device >= 0)
            context_on(block->device)->bytes -= block->size;
        free(block->start);
        free(block);
    }
    return sticky;
}
int cudaMalloc(void **address, size_t size) { return allocate(address, size, current); }
int cudaFree(void *address) {
    cudaDeviceSynchronize(); /* as CUDA's does */
    return release(address);
}
int cudaHostAlloc(void **address, size_t size, unsigned flags) { return allocate(address, size, -1); }
int cudaFreeHost(void *address) { return release(address); }
int cudaHostRegister(void *address, size_t size, unsigned flags) { return sticky; }
int cudaHostUnregister(void *address) { return sticky; }
int cudaMemGetInfo(size_t *unused, size_t *total) {
    context_on(current);
    size_t used = used_memory(fake_gpu_of(current));
    *total = total_memory();
    *unused = used < *total ? *total - used : 0;
    return sticky;
}
typedef struct {
    int type, device;
    void *on_device, *on_host;
    long reserved[8];
} Attributes;
int cudaPointerGetAttributes(Attributes *told, char *address) {
    memset(told, 0, sizeof *told);
    pthread_mutex_lock(&blocks_lock);
    for (Block *block = blocks; block; block = block->next)
        if (address >= block->start && address < block->start + block->size) {
            told->type = block->device < 0 ? 1 : 2;
            told->device = block->device < 0 ? 0 : block->device;
            told->on_device = address;
            told->on_host = block->device < 0 ? address : NULL;
        }
    pthread_mutex_unlock(&blocks_lock);
    return SUCCESS;
}

typedef struct {
    char *target;
    const char *source; /* NULL: to fill with `value` */
    size_t size;
    int value;
    char staged[];
} Copy;
static int advance_copy(void *argument) {
    Copy *copy = argument;
    if (copy->source)
        memmove(copy->target, copy->source, copy->size);
    else
        memset(copy->target, copy->value, copy->size);
    free(copy);
    return 1;
}
/* Queued, unless nothing is before it. */
static int queue_copy(void *target, const void *source, size_t size, int value, int stage, void *stream) {
    Copy *copy = malloc(sizeof *copy + (stage ? size : 0));
    *copy = (Copy){target, source, size, value};
    if (stage)
        copy->source = memcpy(copy->staged, source, size);
    if (cudaStreamQuery(stream) == NOT_READY)
        fake_push(stream, advance_copy, copy);
    else
        advance_copy(copy);
    context_on(current);
    return sticky;
}
enum { TO_DEVICE = 1, ON_DEVICE = 3 };
int cudaMemcpyAsync(void *target, const void *source, size_t size, int kind, void *stream) {
    if (kind == TO_DEVICE || kind == ON_DEVICE) /* what comes from the host may change at once: CUDA stages it */
        return queue_copy(target, source, size, 0, kind == TO_DEVICE, stream);
    if (!cudaStreamSynchronize(stream))
        memmove(target, source, size);
    return sticky;
}
int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    cudaMemcpyAsync(target, source, size, kind, NULL);
    return cudaStreamSynchronize(NULL);
}
int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t size, void *stream) {
    return cudaMemcpyAsync(target, source, size, ON_DEVICE, stream);
}
int cudaMemcpy2DAsync(char *target, size_t to, const char *source, size_t from, size_t width, size_t height, int kind,
                      void *stream) {
    for (size_t i = 0; i < height; i++)
        cudaMemcpyAsync(target + i * to, source + i * from, width, kind, stream);
    return sticky;
}
int cudaMemsetAsync(void *target, int value, size_t size, void *stream) {
    return queue_copy(target, NULL, size, value, 0, stream);
}
int cudaMemset(void *target, int value, size_t size) { return cudaMemsetAsync(target, value, size, NULL); }

/* ------------------------------------------------------------------ Kernels */

typedef struct {
    unsigned x, y, z;
} Size;
typedef struct {
    Size grid, block;
    size_t shared;
    void *stream;
} Launch;

/* The kernels that do something, by the beginning of their names; the others are not registered. */
static struct {
    const void *function;
    int sleeps;  /* torch.cuda._sleep */
    size_t size; /* of what torch._assert_async looks at */
} kernels[64];
static int kernel_count;

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterFunction(void **handle, const void *function, char *unused, const char *name, ...) {
    static const struct {
        const char *type;
        size_t size;
    } types[] = {{"b", 1}, {"h", 1}, {"a", 1}, {"s", 2}, {"i", 4}, {"l", 8}, {"f", 4}, {"d", 8},
                 {"N3c104HalfE", 2}, {"N3c108BFloat16E", 2}, {"N3c107complexIfEE", 8}, {"N3c107complexIdEE", 16}};
    static const char asserts[] = "_assert_async_cuda_kernelI";
    int sleeps = strstr(name, "spin_kernelEl") != NULL;
    const char *assert = strstr(name, asserts);
    size_t size = 0;
    for (unsigned i = 0; assert && i < sizeof types / sizeof *types; i++)
        if (!strncmp(assert + strlen(asserts), types[i].type, strlen(types[i].type)))
            size = types[i].size;
    if ((sleeps || size) && kernel_count < 64) {
        kernels[kernel_count].function = function;
        kernels[kernel_count].sleeps = sleeps;
        kernels[kernel_count++].size = size;
    }
}

/* What kernel<<<...>>>() passes to the function that nvcc has made of it. */
static __thread Launch launch;
unsigned __cudaPushCallConfiguration(Size grid, Size block, size_t shared, void *stream) {
    launch = (Launch){grid, block, shared, stream};
    return 0;
}
int __cudaPopCallConfiguration(Size *grid, Size *block, size_t *shared, void **stream) {
    *grid = launch.grid, *block = launch.block, *shared = launch.shared, *stream = launch.stream;
    return SUCCESS;
}

static int advance_sleep(void *argument) {
    double *sleep = argument; /* seconds, and since when */
    if (!sleep[1])
        sleep[1] = now();
    if (now() < sleep[1] + sleep[0])
        return 0;
    free(sleep);
    return 1;
}

typedef struct {
    const char *address;
    size_t size;
} Condition;
static int advance_assert(void *argument) {
    Condition *condition = argument;
    int holds = 0;
    for (size_t i = 0; i < condition->size; i++)
        holds |= condition->address[i];
    if (!holds)
        fake_fault();
    free(condition);
    return 1;
}

/* Each kernel is counted here, those that the CPU computes as well: the one with the number FAKE_GPU_ASSERT_AT fails. */
int fake_launch(void) {
    static _Atomic long launched;
    context_on(current);
    if (++launched == setting("FAKE_GPU_ASSERT_AT", 0))
        fake_fault();
    return sticky;
}

int cudaLaunchKernel(const void *function, Size grid, Size block, void **arguments, size_t shared, void *stream) {
    if (fake_launch())
        return sticky;
    for (int i = 0; i < kernel_count; i++)
        if (kernels[i].function == function && kernels[i].sleeps) {
            double *sleep = calloc(2, sizeof *sleep);
            sleep[0] = 1e-9 * *(int64_t *)arguments[0]; /* cycles of 1 GHz */
            fake_push(stream, advance_sleep, sleep);
        } else if (kernels[i].function == function) {
            Condition *condition = malloc(sizeof *condition);
            *condition = (Condition){*(char **)arguments[0], kernels[i].size};
            fake_push(stream, advance_assert, condition);
        }
    return sticky;
}
int __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return SUCCESS;
}
int __cudaLaunchKernel(const void *kernel, Size grid, Size block, void **arguments, size_t shared, void *stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
int cudaLaunchKernelExC(const Launch *how, const void *function, void **arguments) {
    return cudaLaunchKernel(function, how->grid, how->block, arguments, how->shared, how->stream);
}
int cudaFuncGetAttributes(int told[36], const void *function) {
    memset(told, 0, 36 * sizeof *told);
    told[6] = 1024; /* threads of a block */
    return SUCCESS;
}
int cudaFuncSetAttribute(void) { return SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, ...) {
    *blocks = 1;
    return SUCCESS;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, ...) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks);
}
int cudaProfilerStart(void) { return SUCCESS; }
int cudaProfilerStop(void) { return SUCCESS; }

/* ------------------------------------------------------------------ The driver, for those who ask the runtime for it */

static int not_supported(void) { return NOT_SUPPORTED; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    void *found = driver ? dlsym(driver, name) : NULL;
    *function = found ? found : (void *)not_supported;
    if (status)
        *status = 0;
    return SUCCESS;
}
