/* Stands in for libcuda.so.1: one device with one stream, in real time. Work is a time that passes. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#define SUCCESS 0
#define NOT_READY 600

typedef struct {
    uint64_t passed_ns;
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t busy_until_ns, newest_event_ns;
static int query_code;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t next_ns(void) {
    uint64_t now = now_ns();
    return now > busy_until_ns ? now : busy_until_ns;
}

/* For tests: lets the stream work for a time; UINT64_MAX hangs it. */
void simulated_launch(uint64_t length_ns) {
    pthread_mutex_lock(&lock);
    busy_until_ns = length_ns == UINT64_MAX ? UINT64_MAX : next_ns() + length_ns;
    pthread_mutex_unlock(&lock);
}

/* When the event that was recorded last is passed. */
uint64_t simulated_newest_event(void) { return newest_event_ns; }

void simulated_fail(int code) { query_code = code; }

void simulated_reset(void) {
    busy_until_ns = 0;
    query_code = SUCCESS;
}

int cuInit(unsigned flags) { return (void)flags, SUCCESS; }
int cuGetErrorName(int code, const char **name) { return (void)code, *name = "CUDA_ERROR_SIMULATED", SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal == 0 ? SUCCESS : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return (void)device, *context = NULL, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { return (void)context, SUCCESS; }
int cuCtxPopCurrent_v2(void **context) { return *context = NULL, SUCCESS; }
int cuEventCreate(event **created, unsigned flags) { return (void)flags, *created = calloc(1, sizeof(event)), SUCCESS; }
int cuEventDestroy_v2(event *destroyed) { return free(destroyed), SUCCESS; }

int cuEventRecord(event *recorded, void *stream) {
    (void)stream;
    pthread_mutex_lock(&lock);
    newest_event_ns = recorded->passed_ns = next_ns();
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuEventQuery(event *asked) {
    return query_code != SUCCESS ? query_code : asked->passed_ns <= now_ns() ? SUCCESS : NOT_READY;
}

int cuEventElapsedTime(float *milliseconds, event *start, event *end) {
    *milliseconds = (float)((double)(int64_t)(end->passed_ns - start->passed_ns) / 1e6);
    return SUCCESS;
}
