/* A stand-in for libnvidia-ml.so.1 that shows emulated GPUs (perseus.emulation.gpu) to users of NVML.
 *
 * PERSEUS_NVML_STUB names a folder. Every emulated GPU's file in it is a device, in the order of the files'
 * names. Device state lives in that file and nowhere else: the trainer that executes work on the emulated GPU
 * and the process that sets its clocks through this library see the same GPU. Every access takes the file's
 * lock and advances the state to now; `advance` repeats perseus.emulation.dynamics.GpuState.advance, and a
 * test compares the two.
 *
 * The locks themselves, which NVML knows and an emulated GPU does not, are beside it in `.NAME.locks`. Like a
 * real GPU in persistence mode, it keeps its locks when their setter dies. Its compute processes are
 * those that the emulated GPU lists in `.NAME.processes`, if they still run.
 *
 * The file `.nvml` in the folder, if it exists, controls the library while it runs; one instruction a line:
 *
 *     error FUNCTION CODE AFTER TIMES    FUNCTION fails with CODE from its call AFTER + 1 on, TIMES times
 *                                        (0: for good); each process counts since the file last changed
 *     delay FUNCTION SECONDS             FUNCTION takes this much longer
 *     property NAME VALUE                architecture, mig_mode, persistence_mode, second_memory_clock_mhz,
 *                                        workload_power_profiles (0: the GPU knows none), frozen_counter
 *                                        (1: the energy counter stands still), module_power_w (what the energy
 *                                        counter counts beyond the GPU)
 *
 * The first nvmlInit looks for devices, and so does the first after the last nvmlShutdown. The latency
 * of a clock set and the period of the energy counter are those of the emulated GPU.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Numbers of nvml.h. */
typedef int nvmlReturn_t;
enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
};
enum { FIELD_POWER_INSTANT = 186, VALUE_UNSIGNED_INT = 1, CLOCK_MEMORY = 2 };

typedef struct {
    uint32_t field_id, scope_id;
    int64_t timestamp, latency_us;
    uint32_t value_type;
    nvmlReturn_t status;
    union { double d; uint32_t ui; uint64_t ull; } value;
} field_value;

typedef struct {
    uint32_t pid;
    uint64_t used_memory;
    uint32_t gpu_instance_id, compute_instance_id;
} process_info;

typedef struct {
    uint32_t version, known[8], requested[8], enforced[8];
} current_profiles;

enum { MAX_DEVICES = 64, MAX_CLOCKS = 512, MAX_TEXT = 96, HEADER_BYTES = 16, MEMORY_CLOCK_MHZ = 1593 };

/* --- The emulated GPU -------------------------------------------------------------------------------------- */

typedef struct {
    char uuid[MAX_TEXT], name[MAX_TEXT];
    int64_t clocks_mhz[MAX_CLOCKS]; /* descending */
    int clock_count;
    double static_power_w, memory_power_w, core_power_w;
    double knee_clock_mhz, knee_voltage_ratio, blocking_activity;
    double set_latency_s, counter_period_s;
} model_t;

/* GpuState as perseus.emulation.gpu writes it: eight bytes a field. */
typedef struct {
    double at_s, counter_origin_s;
    int64_t clock_mhz;
    double energy_j, counter_j;
    int64_t pending_clock_mhz;
    double pending_at_s, compute_s, memory_s, activity, remaining, slowdown;
    int64_t clock_event_reasons, cap_mhz, cap_reasons;
    double power_limit_w;
    int64_t power_profiles_mask;
} state_t;

/* The locks as requested; 0 for none. */
typedef struct {
    int32_t graphics_min_mhz, graphics_max_mhz, memory_min_mhz, memory_max_mhz;
} locks_t;

static double power_at_w(const model_t *model, double activity, int64_t clock_mhz)
{
    double highest_mhz = (double)model->clocks_mhz[0];
    double above_knee_mhz = fmax(0.0, (double)clock_mhz - model->knee_clock_mhz);
    double ratio = model->knee_voltage_ratio
        + (1 - model->knee_voltage_ratio) * above_knee_mhz / (highest_mhz - model->knee_clock_mhz);
    double core_w = model->core_power_w * (double)clock_mhz / highest_mhz * (ratio * ratio);
    return model->static_power_w + activity * (model->memory_power_w + core_w);
}

static int64_t reached_mhz(const state_t *state)
{
    return state->cap_mhz && state->cap_mhz < state->clock_mhz ? state->cap_mhz : state->clock_mhz;
}

static double power_w(const model_t *model, const state_t *state)
{
    double activity = state->remaining > 0 ? state->activity : model->blocking_activity;
    return power_at_w(model, activity, reached_mhz(state));
}

static double remaining_s(const model_t *model, const state_t *state)
{
    if (state->remaining <= 0)
        return 0.0;
    double stretch = (double)model->clocks_mhz[0] / (double)reached_mhz(state);
    return state->remaining * (state->compute_s * stretch + state->memory_s) * state->slowdown;
}

static void accrue(const model_t *model, state_t *state, double until_s)
{
    while (state->at_s < until_s) {
        double step_to_s = until_s;
        double end_s = state->at_s + remaining_s(model, state);
        int busy = state->remaining > 0;
        if (state->pending_clock_mhz)
            step_to_s = fmin(step_to_s, fmax(state->pending_at_s, state->at_s));
        if (busy)
            step_to_s = fmin(step_to_s, end_s);
        state->energy_j += power_w(model, state) * (step_to_s - state->at_s);
        if (busy)
            state->remaining = step_to_s >= end_s
                ? 0.0
                : state->remaining * (end_s - step_to_s) / (end_s - state->at_s);
        state->at_s = step_to_s;
        if (state->pending_clock_mhz && state->at_s >= state->pending_at_s) {
            state->clock_mhz = state->pending_clock_mhz;
            state->pending_clock_mhz = 0;
        }
    }
}

/* The quotient alone may be rounded below the tick at now_s. */
static double last_tick_s(const model_t *model, const state_t *state, double now_s)
{
    double ticks = floor((now_s - state->counter_origin_s) / model->counter_period_s) + 1;
    while (state->counter_origin_s + ticks * model->counter_period_s > now_s)
        ticks -= 1;
    return state->counter_origin_s + ticks * model->counter_period_s;
}

static void advance(const model_t *model, state_t *state, double now_s)
{
    double tick_s = last_tick_s(model, state, now_s);
    if (state->at_s < tick_s) {
        accrue(model, state, tick_s);
        state->counter_j = state->energy_j;
    }
    accrue(model, state, now_s);
}

/* The identity is JSON as Python's json.dumps writes it, with every key once; this reads nothing else. */
static const char *value_of(const char *json, const char *key)
{
    char quoted[MAX_TEXT];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *found = strstr(json, quoted);
    return found ? found + strlen(quoted) : "";
}

static double number_of(const char *json, const char *key) { return strtod(value_of(json, key), NULL); }

static void text_of(const char *json, const char *key, char *text)
{
    sscanf(value_of(json, key), "\"%95[^\"]", text);
}

static void read_model(const char *json, model_t *model)
{
    memset(model, 0, sizeof *model);
    text_of(json, "uuid", model->uuid);
    text_of(json, "name", model->name);
    const char *clock = value_of(json, "clocks_mhz");
    while ((*clock == '[' || *clock == ',') && model->clock_count < MAX_CLOCKS) {
        char *end;
        model->clocks_mhz[model->clock_count++] = strtoll(clock + 1, &end, 10);
        clock = end;
    }
    model->static_power_w = number_of(json, "static_power_w");
    model->memory_power_w = number_of(json, "memory_power_w");
    model->core_power_w = number_of(json, "core_power_w");
    model->knee_clock_mhz = number_of(json, "knee_clock_mhz");
    model->knee_voltage_ratio = number_of(json, "knee_voltage_ratio");
    model->blocking_activity = number_of(json, "blocking_activity");
    model->set_latency_s = number_of(json, "set_latency_s");
    model->counter_period_s = number_of(json, "counter_period_s");
}

/* Not part of NVML: for the test that compares this physics with the original. */
void perseus_stub_advance(const char *identity_json, state_t *state, double now_s)
{
    model_t model;
    read_model(identity_json, &model);
    advance(&model, state, now_s);
}

/* --- Devices ----------------------------------------------------------------------------------------------- */

typedef struct {
    int file;
    char *content; /* the mapped file */
    size_t size;
    char *state; /* its last bytes, unaligned */
    locks_t *locks;
    char processes_path[4096];
    model_t model;
} device_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* excludes our own threads; flock excludes other processes */
static device_t devices[MAX_DEVICES];
static unsigned device_count;
static int user_count; /* calls of nvmlInit without nvmlShutdown */

static double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void sleep_s(double duration_s)
{
    struct timespec left = {(time_t)duration_s, (long)((duration_s - floor(duration_s)) * 1e9)};
    while (nanosleep(&left, &left) != 0) {
    }
}

static state_t begin(device_t *device)
{
    state_t state;
    pthread_mutex_lock(&mutex);
    flock(device->file, LOCK_EX);
    memcpy(&state, device->state, sizeof state);
    advance(&device->model, &state, monotonic_s());
    return state;
}

static void end(device_t *device, const state_t *state)
{
    memcpy(device->state, state, sizeof *state);
    flock(device->file, LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

static state_t now(device_t *device)
{
    state_t state = begin(device);
    end(device, &state);
    return state;
}

/* Returns after the set latency, when the clock is in force, as NVML does. */
static void set_clock(device_t *device, int64_t clock_mhz, int32_t min_mhz, int32_t max_mhz)
{
    state_t state = begin(device);
    state.pending_clock_mhz = clock_mhz;
    state.pending_at_s = state.at_s + device->model.set_latency_s;
    device->locks->graphics_min_mhz = min_mhz;
    device->locks->graphics_max_mhz = max_mhz;
    end(device, &state);
    sleep_s(device->model.set_latency_s);
}

static void set_memory_lock(device_t *device, int32_t min_mhz, int32_t max_mhz)
{
    state_t state = begin(device);
    device->locks->memory_min_mhz = min_mhz;
    device->locks->memory_max_mhz = max_mhz;
    end(device, &state);
}

static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static int open_device(const char *folder, const char *name, device_t *device)
{
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return 0;
    char *content = MAP_FAILED;
    if (fstat(file, &status) == 0 && status.st_size > (off_t)(HEADER_BYTES + sizeof(state_t)))
        content = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (content == MAP_FAILED || memcmp(content, "PRSUSGPU", 8) != 0) {
        close(file);
        return 0; /* some other file */
    }
    size_t identity_bytes = (size_t)status.st_size - HEADER_BYTES - sizeof(state_t);
    char *identity = strndup(content + HEADER_BYTES, identity_bytes);
    read_model(identity, &device->model);
    free(identity);
    snprintf(device->processes_path, sizeof device->processes_path, "%s/.%s.processes", folder, name);
    snprintf(path, sizeof path, "%s/.%s.locks", folder, name);
    int locks = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (locks < 0 || ftruncate(locks, sizeof(locks_t)) != 0)
        return 0;
    device->locks = mmap(NULL, sizeof(locks_t), PROT_READ | PROT_WRITE, MAP_SHARED, locks, 0);
    close(locks);
    device->file = file;
    device->content = content;
    device->size = (size_t)status.st_size;
    device->state = content + device->size - sizeof(state_t);
    return device->locks != MAP_FAILED;
}

static void close_devices(void)
{
    for (unsigned i = 0; i < device_count; i++) {
        munmap(devices[i].content, devices[i].size);
        munmap(devices[i].locks, sizeof(locks_t));
        close(devices[i].file);
    }
    device_count = 0;
}

static nvmlReturn_t open_devices(void)
{
    const char *folder = getenv("PERSEUS_NVML_STUB");
    struct dirent **entries;
    int count = folder ? scandir(folder, &entries, is_visible, alphasort) : -1;
    if (count < 0)
        return DRIVER_NOT_LOADED;
    for (int i = 0; i < count; i++) {
        if (device_count < MAX_DEVICES && open_device(folder, entries[i]->d_name, &devices[device_count]))
            device_count++;
        free(entries[i]);
    }
    free(entries);
    return SUCCESS;
}

/* --- Instructions to the library --------------------------------------------------------------------------- */

enum { MAX_INSTRUCTIONS = 64 };

typedef struct {
    char kind[16], name[64];
    double value; /* an error's code, a delay, a property's value */
    int after, times, call_count;
} instruction_t;

static instruction_t instructions[MAX_INSTRUCTIONS];
static int instruction_count;
static struct timespec instructed_at;

static void read_instructions(void)
{
    char path[4096], line[256];
    struct stat status;
    const char *folder = getenv("PERSEUS_NVML_STUB");
    snprintf(path, sizeof path, "%s/.nvml", folder ? folder : "");
    if (stat(path, &status) != 0) {
        instruction_count = 0;
        return;
    }
    if (status.st_mtim.tv_sec == instructed_at.tv_sec && status.st_mtim.tv_nsec == instructed_at.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file)
        return;
    instructed_at = status.st_mtim;
    instruction_count = 0;
    while (instruction_count < MAX_INSTRUCTIONS && fgets(line, sizeof line, file)) {
        instruction_t *it = &instructions[instruction_count];
        memset(it, 0, sizeof *it);
        if (sscanf(line, "%15s %63s %lf %d %d", it->kind, it->name, &it->value, &it->after, &it->times) >= 3)
            instruction_count++;
    }
    fclose(file);
}

static unsigned property(const char *name, unsigned otherwise)
{
    unsigned value = otherwise;
    pthread_mutex_lock(&mutex);
    read_instructions();
    for (int i = 0; i < instruction_count; i++)
        if (strcmp(instructions[i].kind, "property") == 0 && strcmp(instructions[i].name, name) == 0)
            value = (unsigned)instructions[i].value;
    pthread_mutex_unlock(&mutex);
    return value;
}

static nvmlReturn_t instructed(const char *function)
{
    nvmlReturn_t result = SUCCESS;
    double delay_s = 0;
    pthread_mutex_lock(&mutex);
    read_instructions();
    for (int i = 0; i < instruction_count; i++) {
        instruction_t *it = &instructions[i];
        if (strcmp(it->name, function) != 0)
            continue;
        if (strcmp(it->kind, "delay") == 0)
            delay_s = it->value;
        if (strcmp(it->kind, "error") == 0) {
            int call = it->call_count++;
            if (call >= it->after && (it->times == 0 || call < it->after + it->times))
                result = (nvmlReturn_t)it->value;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (delay_s > 0)
        sleep_s(delay_s);
    return result;
}

/* Every function begins with this, under its name in pynvml, which omits version suffixes. */
#define CALL(function)                                                                                       \
    do {                                                                                                     \
        if (user_count == 0)                                                                                 \
            return UNINITIALIZED;                                                                            \
        nvmlReturn_t result_ = instructed(function);                                                         \
        if (result_ != SUCCESS)                                                                              \
            return result_;                                                                                  \
    } while (0)

/* --- NVML -------------------------------------------------------------------------------------------------- */

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    nvmlReturn_t result = instructed("nvmlInit");
    pthread_mutex_lock(&mutex);
    if (result == SUCCESS && device_count == 0)
        result = open_devices();
    if (result == SUCCESS)
        user_count++;
    pthread_mutex_unlock(&mutex);
    return result;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void)
{
    CALL("nvmlShutdown");
    pthread_mutex_lock(&mutex);
    if (--user_count == 0)
        close_devices();
    pthread_mutex_unlock(&mutex);
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static __thread char text[64];
    snprintf(text, sizeof text, "NVML stub error %d", result);
    return text;
}

static nvmlReturn_t copy_text(const char *text, char *buffer, unsigned length)
{
    if (strlen(text) >= length)
        return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *buffer, unsigned length)
{
    CALL("nvmlSystemGetDriverVersion");
    return copy_text("emulated", buffer, length);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *buffer, unsigned length)
{
    CALL("nvmlSystemGetNVMLVersion");
    return copy_text("emulated", buffer, length);
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    CALL("nvmlDeviceGetCount");
    *count = device_count;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t **device)
{
    CALL("nvmlDeviceGetHandleByIndex");
    if (index >= device_count)
        return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, device_t **device)
{
    CALL("nvmlDeviceGetHandleByUUID");
    for (unsigned i = 0; i < device_count; i++)
        if (strcmp(devices[i].model.uuid, uuid) == 0) {
            *device = &devices[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(device_t *device, unsigned *index)
{
    CALL("nvmlDeviceGetIndex");
    *index = (unsigned)(device - devices);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(device_t *device, unsigned *minor)
{
    CALL("nvmlDeviceGetMinorNumber");
    *minor = (unsigned)(device - devices);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(device_t *device, unsigned *count, process_info *found)
{
    CALL("nvmlDeviceGetComputeRunningProcesses");
    unsigned room = found ? *count : 0, available = 0;
    FILE *file = fopen(device->processes_path, "r");
    int pid;
    while (file && fscanf(file, "%d", &pid) == 1) {
        if (kill(pid, 0) != 0 && errno == ESRCH)
            continue;
        if (available < room)
            found[available] = (process_info){.pid = (uint32_t)pid};
        available++;
    }
    if (file)
        fclose(file);
    *count = available;
    return room < available ? INSUFFICIENT_SIZE : SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(device_t *device, char *buffer, unsigned length)
{
    CALL("nvmlDeviceGetUUID");
    return copy_text(device->model.uuid, buffer, length);
}

nvmlReturn_t nvmlDeviceGetName(device_t *device, char *buffer, unsigned length)
{
    CALL("nvmlDeviceGetName");
    return copy_text(device->model.name, buffer, length);
}

nvmlReturn_t nvmlDeviceGetArchitecture(device_t *device, unsigned *architecture)
{
    CALL("nvmlDeviceGetArchitecture");
    (void)device;
    *architecture = property("architecture", 7); /* Ampere */
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(device_t *device, int *major, int *minor)
{
    CALL("nvmlDeviceGetCudaComputeCapability");
    *major = 8;
    *minor = strstr(device->model.name, "A40") ? 6 : 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(device_t *device, unsigned *current, unsigned *pending)
{
    CALL("nvmlDeviceGetMigMode");
    (void)device;
    *current = *pending = property("mig_mode", 0);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(device_t *device, unsigned *mode)
{
    CALL("nvmlDeviceGetPersistenceMode");
    (void)device;
    *mode = property("persistence_mode", 1);
    return SUCCESS;
}

static nvmlReturn_t copy_clocks(const int64_t *clocks_mhz, unsigned available, unsigned *count, unsigned *found)
{
    unsigned room = found ? *count : 0;
    *count = available;
    if (room < available)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < available; i++)
        found[i] = (unsigned)clocks_mhz[i];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(device_t *device, unsigned *count, unsigned *clocks_mhz)
{
    CALL("nvmlDeviceGetSupportedMemoryClocks");
    (void)device;
    int64_t available_mhz[] = {MEMORY_CLOCK_MHZ, property("second_memory_clock_mhz", 0)};
    return copy_clocks(available_mhz, available_mhz[1] ? 2 : 1, count, clocks_mhz);
}

nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(
    device_t *device, unsigned memory_clock_mhz, unsigned *count, unsigned *clocks_mhz)
{
    CALL("nvmlDeviceGetSupportedGraphicsClocks");
    if (memory_clock_mhz != MEMORY_CLOCK_MHZ)
        return NOT_FOUND;
    return copy_clocks(device->model.clocks_mhz, (unsigned)device->model.clock_count, count, clocks_mhz);
}

nvmlReturn_t nvmlDeviceSetGpuLockedClocks(device_t *device, unsigned min_mhz, unsigned max_mhz)
{
    CALL("nvmlDeviceSetGpuLockedClocks");
    const model_t *model = &device->model;
    for (int i = 0; i < model->clock_count; i++) /* the highest clock within the limits */
        if (model->clocks_mhz[i] <= max_mhz) {
            if (model->clocks_mhz[i] < min_mhz)
                break;
            set_clock(device, model->clocks_mhz[i], (int32_t)min_mhz, (int32_t)max_mhz);
            return SUCCESS;
        }
    return INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceResetGpuLockedClocks(device_t *device)
{
    CALL("nvmlDeviceResetGpuLockedClocks");
    set_clock(device, device->model.clocks_mhz[0], 0, 0);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMemoryLockedClocks(device_t *device, unsigned min_mhz, unsigned max_mhz)
{
    CALL("nvmlDeviceSetMemoryLockedClocks");
    set_memory_lock(device, (int32_t)min_mhz, (int32_t)max_mhz);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceResetMemoryLockedClocks(device_t *device)
{
    CALL("nvmlDeviceResetMemoryLockedClocks");
    set_memory_lock(device, 0, 0);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(device_t *device, unsigned long long *energy_mj)
{
    CALL("nvmlDeviceGetTotalEnergyConsumption");
    state_t state = now(device);
    double module_j = property("module_power_w", 0) * last_tick_s(&device->model, &state, state.at_s);
    double counter_j = property("frozen_counter", 0) ? 1 : state.counter_j + module_j;
    *energy_mj = (unsigned long long)(counter_j * 1000);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(device_t *device, unsigned *power_mw)
{
    CALL("nvmlDeviceGetPowerUsage");
    state_t state = now(device);
    *power_mw = (unsigned)(power_w(&device->model, &state) * 1000);
    return SUCCESS;
}

/* By default the board's: the power of full activity at the highest clock. */
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(device_t *device, unsigned *limit_mw)
{
    CALL("nvmlDeviceGetEnforcedPowerLimit");
    const model_t *model = &device->model;
    double limit_w = now(device).power_limit_w;
    if (limit_w == 0)
        limit_w = model->static_power_w + model->memory_power_w + model->core_power_w;
    *limit_mw = (unsigned)(limit_w * 1000);
    return SUCCESS;
}

/* The clocks in force were requested, too. */
nvmlReturn_t nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(device_t *device, current_profiles *profiles)
{
    CALL("nvmlDeviceWorkloadPowerProfileGetCurrentProfiles");
    if (!property("workload_power_profiles", 1))
        return NOT_SUPPORTED;
    uint64_t mask = (uint64_t)now(device).power_profiles_mask;
    uint32_t version = profiles->version;
    memset(profiles, 0, sizeof *profiles);
    profiles->version = version;
    profiles->enforced[0] = profiles->requested[0] = (uint32_t)mask;
    profiles->enforced[1] = profiles->requested[1] = (uint32_t)(mask >> 32);
    return SUCCESS;
}

/* Supports the instant power; an average (field 185) is not supported, as on GPUs before Ampere. */
nvmlReturn_t nvmlDeviceGetFieldValues(device_t *device, int count, field_value *values)
{
    CALL("nvmlDeviceGetFieldValues");
    state_t state = now(device);
    for (int i = 0; i < count; i++) {
        values[i].status = values[i].field_id == FIELD_POWER_INSTANT ? SUCCESS : NOT_SUPPORTED;
        values[i].value_type = VALUE_UNSIGNED_INT;
        values[i].value.ui = (uint32_t)(power_w(&device->model, &state) * 1000);
    }
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(device_t *device, unsigned type, unsigned *clock_mhz)
{
    CALL("nvmlDeviceGetClockInfo");
    state_t state = now(device);
    *clock_mhz = type == CLOCK_MEMORY ? MEMORY_CLOCK_MHZ : (unsigned)reached_mhz(&state);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(device_t *device, unsigned long long *reasons)
{
    CALL("nvmlDeviceGetCurrentClocksEventReasons");
    state_t state = now(device);
    int64_t cap_reasons = reached_mhz(&state) < state.clock_mhz ? state.cap_reasons : 0;
    *reasons = (unsigned long long)(state.clock_event_reasons | cap_reasons);
    return SUCCESS;
}
