/* A stand-in for libnvidia-ml.so.1: the answers of the C library alone, from the folder in NVML_RECORDING.
 *
 * `recording` has lines "KEY VALUE": `count`, `driver`, `device.N.WHAT`, `mig.UUID N INSTANCE`. What is not in it is not
 * supported; `device.N.error CODE` answers everything about a device with that code. `events` is a FIFO with lines
 * "DEVICE TYPE DATA INSTANCE", one an event, or "error CODE", which the next wait returns.
 * With -DWITHOUT_EVENTS and -DWITHOUT_REMAPPING it is an older library, which lacks these functions.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, DRIVER_NOT_LOADED = 9, TIMEOUT = 10 };
enum { DEVICE = 0x1000, MIG = 0x100000, MAX_DEVICES = 16 };

typedef void *device_t;
typedef struct { device_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;
typedef struct {
    uint32_t field, scope; int64_t timestamp, latency; int32_t type, result; union { double d; uint32_t u; uint64_t ull; } value;
} field_t;

static int users = 0;
static unsigned long long registered[MAX_DEVICES];

static const char *file(const char *name) {
    static __thread char path[4096];
    const char *folder = getenv("NVML_RECORDING");
    if (!folder) return NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static int text(const char *key, char *value, size_t size) {
    char line[512];
    const char *path = file("recording");
    FILE *from = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    int found = 0;
    while (from && !found && fgets(line, sizeof line, from))
        if (!strncmp(line, key, length) && line[length] == ' ') {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    if (from) fclose(from);
    return found;
}

static int number(const char *key, unsigned long long *value) {
    char found[64];
    if (!text(key, found, sizeof found)) return 0;
    *value = strtoull(found, NULL, 0);
    return 1;
}

static int index_of(device_t device) { return (int)((uintptr_t)device - DEVICE); }

static int of_device(device_t device, const char *what, unsigned long long *value) {
    char key[128];
    unsigned long long error;
    snprintf(key, sizeof key, "device.%d.error", index_of(device));
    if (number(key, &error)) return (int)error;
    snprintf(key, sizeof key, "device.%d.%s", index_of(device), what);
    return number(key, value) ? SUCCESS : NOT_SUPPORTED;
}

static int text_of_device(device_t device, const char *what, char *value, unsigned size) {
    char key[128];
    unsigned long long none;
    int code = of_device(device, "none", &none);
    if (code != NOT_SUPPORTED) return code;
    snprintf(key, sizeof key, "device.%d.%s", index_of(device), what);
    return text(key, value, size) ? SUCCESS : NOT_SUPPORTED;
}

static int small(device_t device, const char *what, unsigned *value) {
    unsigned long long found = 0;
    int code = of_device(device, what, &found);
    *value = (unsigned)found;
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!file("recording") || access(file("recording"), R_OK)) return DRIVER_NOT_LOADED;
    if (users++ == 0) memset(registered, 0, sizeof registered);
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { if (users > 0) users--; return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "recorded"; }
int nvmlSystemGetDriverVersion(char *value, unsigned size) { return text("driver", value, size) ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    unsigned long long found = 0;
    number("count", &found);
    *count = (unsigned)found;
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device) {
    unsigned long long none;
    *device = (device_t)(uintptr_t)(DEVICE + index);
    int code = of_device(*device, "none", &none);
    return code == NOT_SUPPORTED ? SUCCESS : code;
}
int nvmlDeviceGetUUID(device_t device, char *value, unsigned size) { return text_of_device(device, "uuid", value, size); }
int nvmlDeviceGetName(device_t device, char *value, unsigned size) { return text_of_device(device, "name", value, size); }
int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *value) {
    (void)sensor;
    return small(device, "temperature", value);
}
int nvmlDeviceGetUtilizationRates(device_t device, unsigned *rates) {
    rates[1] = 0;
    return small(device, "utilisation", rates);
}
int nvmlDeviceGetMemoryInfo(device_t device, unsigned long long *bytes) {
    int code = of_device(device, "memory", &bytes[0]);
    if (code == SUCCESS) code = of_device(device, "memory_used", &bytes[2]);
    bytes[1] = bytes[0] - bytes[2];
    return code;
}
int nvmlDeviceGetTemperatureThreshold(device_t device, int threshold, unsigned *value) {
    (void)threshold;
    return small(device, "slowdown", value);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *value) {
    return of_device(device, "clocks", value);
}
int nvmlDeviceGetTotalEccErrors(device_t device, int kind, int period, unsigned long long *value) {
    (void)kind, (void)period;
    return of_device(device, "ecc", value);
}
int nvmlDeviceGetFieldValues(device_t device, int count, field_t *values) {
    char what[32];
    unsigned long long found = 0;
    int code = of_device(device, "none", &found);
    if (code != NOT_SUPPORTED) return code;
    for (int i = 0; i < count; i++) {
        snprintf(what, sizeof what, "field.%u", values[i].field);
        values[i].result = of_device(device, what, &found);
        values[i].type = 3; /* unsigned long long */
        values[i].value.ull = found;
    }
    return SUCCESS;
}

/* MIG: the handle of an instance has the index of its device and its number. */
int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *device) {
    char key[128], value[64];
    unsigned index, instance;
    snprintf(key, sizeof key, "mig.%s", uuid);
    if (!text(key, value, sizeof value) || sscanf(value, "%u %u", &index, &instance) != 2) return NOT_FOUND;
    *device = (device_t)(uintptr_t)(MIG + index * 16 + instance);
    return SUCCESS;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device_t part, device_t *whole) {
    *whole = (device_t)(uintptr_t)(DEVICE + ((uintptr_t)part - MIG) / 16);
    return SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(device_t part, unsigned *instance) {
    *instance = (unsigned)(((uintptr_t)part - MIG) % 16);
    return SUCCESS;
}

#ifndef WITHOUT_REMAPPING
int nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *value) {
    return of_device(device, "clocks", value);
}
int nvmlDeviceGetRemappedRows(device_t device, unsigned *corrected, unsigned *rows, unsigned *pending, unsigned *failure) {
    *corrected = 0;
    int code = small(device, "rows", rows);
    if (code == SUCCESS) code = small(device, "remap_pending", pending);
    return code == SUCCESS ? small(device, "remap_failure", failure) : code;
}
#endif

#ifndef WITHOUT_EVENTS
static int events = -1;

int nvmlEventSetCreate(void **set) {
    if (events < 0) events = open(file("events"), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    *set = &events;
    return events < 0 ? NOT_SUPPORTED : SUCCESS;
}
int nvmlEventSetFree(void *set) {
    (void)set; /* stays open: a FIFO that nobody has open loses what is in it */
    return SUCCESS;
}
int nvmlDeviceGetSupportedEventTypes(device_t device, unsigned long long *types) {
    int code = of_device(device, "event_types", types);
    if (code == NOT_SUPPORTED) *types = ~0ULL, code = SUCCESS;
    return code;
}
int nvmlDeviceRegisterEvents(device_t device, unsigned long long types, void *set) {
    unsigned long long none;
    int code = of_device(device, "none", &none);
    (void)set;
    if (code != NOT_SUPPORTED) return code;
    registered[index_of(device)] |= types;
    return SUCCESS;
}
static long now_ms(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000 + at.tv_nsec / 1000000;
}
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned timeout_ms) {
    long until = now_ms() + timeout_ms;
    (void)set;
    for (;;) {
        char line[128];
        size_t length = 0;
        struct pollfd ready = {events, POLLIN, 0};
        long left = until - now_ms();
        if (poll(&ready, 1, left > 0 ? (int)left : 0) <= 0) return TIMEOUT;
        while (length < sizeof line - 1 && read(events, line + length, 1) == 1 && line[length] != '\n') length++;
        line[length] = 0;
        unsigned error, device, instance;
        unsigned long long type, data;
        if (sscanf(line, "error %u", &error) == 1) return (int)error;
        if (sscanf(line, "%u %llu %llu %u", &device, &type, &data, &instance) != 4) return 999;
        if (device >= MAX_DEVICES || !(registered[device] & type)) continue;
        *event = (event_t){(device_t)(uintptr_t)(DEVICE + device), type, data, instance, instance};
        return SUCCESS;
    }
}
#endif
