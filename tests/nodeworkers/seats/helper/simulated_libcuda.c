/* A libcuda.so.1 for tests of CudaDriver, without a GPU: it knows pids 100 to 199, and writes down what it is called
 * with. What a process is, and what its calls answer, stands in its pid: see test_cuda_driver.py. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, ILLEGAL_STATE = 401, NOT_READY = 600 };

typedef struct { unsigned int timeout_ms, reserved0; uint64_t reserved1[7]; } LockArgs;
typedef struct { unsigned char old[16], new[16]; } Pair;
typedef struct { Pair *pairs; unsigned int count; unsigned char rest[52]; } RestoreArgs;
_Static_assert(sizeof(LockArgs) == 64 && sizeof(RestoreArgs) == 64, "as cuda.h has them");

static void tell(const char *text) {
    FILE *log = fopen(getenv("SIMULATED_LIBCUDA_LOG"), "a");
    fprintf(log, "%s\n", text);
    fclose(log);
}

static int is_zero(const void *bytes, size_t count) {
    for (size_t at = 0; at < count; at++) if (((const unsigned char *)bytes)[at]) return 0;
    return 1;
}

int cuInit(unsigned int flags) { tell("init"); return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }

/* 100+n is in state n; 110 runs without a context. */
int cuCheckpointProcessGetState(int pid, int *state) {
    if (pid < 100 || pid > 199) return INVALID_VALUE;
    *state = pid == 110 ? 0 : pid % 10;
    return SUCCESS;
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    if (pid == 110) return INVALID_VALUE;
    *tid = pid;
    return SUCCESS;
}

/* 120: time over; 130: takes half a second. */
int cuCheckpointProcessLock(int pid, LockArgs *args) {
    char line[100];
    if (pid == 130) usleep(500000);
    snprintf(line, sizeof line, "lock %d %u %s", pid, args->timeout_ms,
             args->reserved0 == 0 && is_zero(args->reserved1, 56) ? "zeroed" : "dirty");
    tell(line);
    return pid == 120 ? NOT_READY : SUCCESS;
}

int cuCheckpointProcessCheckpoint(int pid, void *args) {
    char line[100];
    snprintf(line, sizeof line, "checkpoint %d %s", pid, args == NULL || is_zero(args, 64) ? "zeroed" : "dirty");
    tell(line);
    return pid == 140 ? ILLEGAL_STATE : SUCCESS;
}

int cuCheckpointProcessRestore(int pid, RestoreArgs *args) {
    char line[400];
    int at = snprintf(line, sizeof line, "restore %d %u %s", pid, args->count, is_zero(args->rest, 52) ? "zeroed" : "dirty");
    for (unsigned int pair = 0; pair < args->count; pair++)
        at += snprintf(line + at, sizeof line - at, " %02x%02x>%02x%02x", args->pairs[pair].old[0],
                       args->pairs[pair].old[15], args->pairs[pair].new[0], args->pairs[pair].new[15]);
    tell(line);
    return SUCCESS;
}

int cuCheckpointProcessUnlock(int pid, void *args) {
    char line[100];
    snprintf(line, sizeof line, "unlock %d %s", pid, args == NULL || is_zero(args, 64) ? "zeroed" : "dirty");
    tell(line);
    return SUCCESS;
}

int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
    static const struct { const char *name; void *call; } calls[] = {
        {"cuInit", cuInit},
        {"cuDriverGetVersion", cuDriverGetVersion},
        {"cuCheckpointProcessGetState", cuCheckpointProcessGetState},
        {"cuCheckpointProcessGetRestoreThreadId", cuCheckpointProcessGetRestoreThreadId},
        {"cuCheckpointProcessLock", cuCheckpointProcessLock},
        {"cuCheckpointProcessCheckpoint", cuCheckpointProcessCheckpoint},
        {"cuCheckpointProcessRestore", cuCheckpointProcessRestore},
        {"cuCheckpointProcessUnlock", cuCheckpointProcessUnlock},
        {"cuGetProcAddress", cuGetProcAddress_v2},
    };
    *found = NULL;
    for (size_t at = 0; at < sizeof calls / sizeof *calls; at++)
        if (!strcmp(name, calls[at].name)) *found = calls[at].call;
    if (status) *status = *found ? 0 : 1;
    return *found ? SUCCESS : 500;
}

int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
