#define _GNU_SOURCE
/* libnvidia-ml.so.1 for lab hosts: answers NVML calls from a topology file.
 *
 * The file ($DYNCTL_LAB_GPUS, else /etc/dynctl-lab/gpus.tsv; format in hostlab/gpus.py) is read again
 * at every call, so a test can change a GPU under a running program. Names, structures and return
 * codes are those of nvml.h as nvidia-ml-py 13 uses them. A function that is not here is reported by
 * the caller as "function not found", as with an old driver.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define API __attribute__((visibility("default")))
#define MAX_GPUS 32
#define MAX_PROCESSES 256
#define MAX_LINKS 2048
#define MIB (1024ULL * 1024ULL)

typedef int ret_t;
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25
};

struct gpu {
    unsigned index, numa, util, temperature, nvlinks, power_mw, power_limit_mw, ecc_errors;
    unsigned long long memory_mib, reserved_mib, used_mib;
    double nvlink_gb_s;
    char uuid[80], name[96], bus_id[32], cpus[256], mig[16], state[16];
};
struct process { unsigned gpu, pid; unsigned long long memory_mib; };
struct pair { char a[16], b[16], kind[8], pcie[8]; };
struct machine {
    int num_gpus, num_processes, num_links;
    struct gpu gpus[MAX_GPUS];
    struct process processes[MAX_PROCESSES];
    struct pair links[MAX_LINKS];
    char driver[80], cuda[16], fault[16];
};

/* A handle is &handles[i]: stable over re-reads, and told from a stray pointer by its range. */
static char handles[MAX_GPUS];
static int users;

static const char *value_of(char **fields, int count, const char *key) {
    size_t length = strlen(key);
    for (int i = 0; i < count; i++)
        if (!strncmp(fields[i], key, length) && fields[i][length] == '=') return fields[i] + length + 1;
    return "";
}

#define TEXT(target, key) snprintf(target, sizeof target, "%s", value_of(fields, count, key))
#define NUMBER(key) strtoull(value_of(fields, count, key), NULL, 10)

static void read_record(struct machine *m, char **fields, int count) {
    const char *kind = fields[0];
    if (!strcmp(kind, "driver")) {
        TEXT(m->driver, "version");
        TEXT(m->cuda, "cuda");
        TEXT(m->fault, "fault");
    } else if (!strcmp(kind, "gpu") && m->num_gpus < MAX_GPUS) {
        struct gpu *g = &m->gpus[m->num_gpus++];
        g->index = NUMBER("index"); g->numa = NUMBER("numa"); g->util = NUMBER("util");
        g->temperature = NUMBER("temperature"); g->nvlinks = NUMBER("nvlinks");
        g->power_mw = NUMBER("power_mw"); g->power_limit_mw = NUMBER("power_limit_mw");
        g->ecc_errors = NUMBER("ecc_errors"); g->memory_mib = NUMBER("memory_mib");
        g->reserved_mib = NUMBER("reserved_mib"); g->used_mib = NUMBER("used_mib");
        g->nvlink_gb_s = strtod(value_of(fields, count, "nvlink_gb_s"), NULL);
        TEXT(g->uuid, "uuid"); TEXT(g->name, "name"); TEXT(g->bus_id, "bus_id");
        TEXT(g->cpus, "cpus"); TEXT(g->mig, "mig"); TEXT(g->state, "state");
    } else if (!strcmp(kind, "process") && m->num_processes < MAX_PROCESSES) {
        struct process *p = &m->processes[m->num_processes++];
        p->gpu = NUMBER("gpu"); p->pid = NUMBER("pid"); p->memory_mib = NUMBER("memory_mib");
    } else if (!strcmp(kind, "link") && m->num_links < MAX_LINKS) {
        struct pair *l = &m->links[m->num_links++];
        TEXT(l->a, "a"); TEXT(l->b, "b"); TEXT(l->kind, "kind"); TEXT(l->pcie, "pcie");
    }
}

static ret_t load(struct machine *m) {
    const char *path = getenv("DYNCTL_LAB_GPUS");
    FILE *file = fopen(path ? path : "/etc/dynctl-lab/gpus.tsv", "r");
    memset(m, 0, sizeof *m);
    if (!file) return DRIVER_NOT_LOADED;
    char line[4096];
    while (fgets(line, sizeof line, file)) {
        char *fields[64], *rest = line;
        int count = 0;
        line[strcspn(line, "\n")] = 0;
        for (char *word; count < 64 && (word = strsep(&rest, "\t"));) fields[count++] = word;
        if (count && fields[0][0] && fields[0][0] != '#') read_record(m, fields, count);
    }
    fclose(file);
    if (!strcmp(m->fault, "mismatch")) return LIB_RM_VERSION_MISMATCH;
    if (!strcmp(m->fault, "unloaded")) return DRIVER_NOT_LOADED;
    return SUCCESS;
}

/* Find the GPU behind a handle; every per-device call begins here. */
static ret_t find(void *handle, struct machine *m, struct gpu **gpu) {
    if (!users) return UNINITIALIZED;
    ret_t ret = load(m);
    if (ret) return ret;
    char *at = handle;
    if (at < handles || at >= handles + m->num_gpus) return INVALID_ARGUMENT;
    *gpu = &m->gpus[at - handles];
    return strcmp((*gpu)->state, "lost") ? SUCCESS : GPU_IS_LOST;
}

#define DEVICE(handle)          \
    struct machine m;           \
    struct gpu *g;              \
    ret_t ret = find(handle, &m, &g); \
    if (ret) return ret

static ret_t put(char *target, unsigned size, const char *text) {
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return SUCCESS;
}

/* Library and system */

API ret_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    struct machine m;
    ret_t ret = load(&m);
    if (!ret) users++;
    return ret;
}
API ret_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API ret_t nvmlInit(void) { return nvmlInitWithFlags(0); }
API ret_t nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}
API const char *nvmlErrorString(ret_t ret) {
    switch (ret) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    case LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}
API ret_t nvmlSystemGetDriverVersion(char *text, unsigned size) {
    struct machine m;
    if (!users) return UNINITIALIZED;
    ret_t ret = load(&m);
    return ret ? ret : put(text, size, m.driver);
}
API ret_t nvmlSystemGetNVMLVersion(char *text, unsigned size) {
    struct machine m;
    char version[96];
    ret_t ret = load(&m);
    if (ret) return ret;
    snprintf(version, sizeof version, "%.2s.%s", m.cuda, m.driver);
    return put(text, size, version);
}
API ret_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    struct machine m;
    int major = 0, minor = 0;
    ret_t ret = load(&m);
    if (ret) return ret;
    sscanf(m.cuda, "%d.%d", &major, &minor);
    *version = major * 1000 + minor * 10;
    return SUCCESS;
}
API ret_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
API ret_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size) {
    char path[64], text[1024] = "";
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    return put(name, size, text);
}

/* Devices */

API ret_t nvmlDeviceGetCount_v2(unsigned *count) {
    struct machine m;
    if (!users) return UNINITIALIZED;
    ret_t ret = load(&m);
    if (!ret) *count = m.num_gpus;
    return ret;
}
API ret_t nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
API ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    struct machine m;
    if (!users) return UNINITIALIZED;
    ret_t ret = load(&m);
    if (ret) return ret;
    if (index >= (unsigned)m.num_gpus) return INVALID_ARGUMENT;
    if (!strcmp(m.gpus[index].state, "lost")) return GPU_IS_LOST;
    *handle = &handles[index];
    return SUCCESS;
}
API ret_t nvmlDeviceGetHandleByIndex(unsigned index, void **handle) {
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}
static ret_t by_text(const char *text, void **handle, int is_uuid) {
    struct machine m;
    if (!users) return UNINITIALIZED;
    ret_t ret = load(&m);
    for (int i = 0; !ret && i < m.num_gpus; i++) {
        if (strcasecmp(text, is_uuid ? m.gpus[i].uuid : m.gpus[i].bus_id)) continue;
        *handle = &handles[i];
        return strcmp(m.gpus[i].state, "lost") ? SUCCESS : GPU_IS_LOST;
    }
    return ret ? ret : NOT_FOUND;
}
API ret_t nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { return by_text(uuid, handle, 1); }
API ret_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **handle) { return by_text(bus, handle, 0); }
API ret_t nvmlDeviceGetIndex(void *d, unsigned *out) { DEVICE(d); *out = g->index; return SUCCESS; }
API ret_t nvmlDeviceGetMinorNumber(void *d, unsigned *out) { DEVICE(d); *out = g->index; return SUCCESS; }
API ret_t nvmlDeviceGetName(void *d, char *text, unsigned size) { DEVICE(d); return put(text, size, g->name); }
API ret_t nvmlDeviceGetUUID(void *d, char *text, unsigned size) { DEVICE(d); return put(text, size, g->uuid); }
API ret_t nvmlDeviceGetSerial(void *d, char *text, unsigned size) {
    DEVICE(d);
    char serial[32];
    snprintf(serial, sizeof serial, "16500%08u", g->index);
    return put(text, size, serial);
}
API ret_t nvmlDeviceGetBrand(void *d, unsigned *out) { DEVICE(d); *out = 14; return SUCCESS; }
API ret_t nvmlDeviceGetArchitecture(void *d, unsigned *out) {
    DEVICE(d);
    *out = strstr(g->name, "H100") ? 9 : 8;
    return SUCCESS;
}
API ret_t nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
    DEVICE(d);
    *major = strstr(g->name, "H100") ? 9 : 8;
    *minor = *major == 9 ? 0 : 9;
    return SUCCESS;
}

/* Memory and load */

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
#define MEMORY_V2 ((unsigned)sizeof(struct memory_v2) | 2u << 24)

API ret_t nvmlDeviceGetMemoryInfo(void *d, struct memory *out) {
    DEVICE(d);
    out->total = g->memory_mib * MIB;
    out->used = (g->used_mib + g->reserved_mib) * MIB; /* v1 counts the driver's reserve as used */
    out->free = out->total - out->used;
    return SUCCESS;
}
API ret_t nvmlDeviceGetMemoryInfo_v2(void *d, struct memory_v2 *out) {
    DEVICE(d);
    if (out->version != MEMORY_V2) return ARGUMENT_VERSION_MISMATCH;
    out->total = g->memory_mib * MIB;
    out->reserved = g->reserved_mib * MIB;
    out->used = g->used_mib * MIB;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}
struct utilization { unsigned gpu, memory; };
API ret_t nvmlDeviceGetUtilizationRates(void *d, struct utilization *out) {
    DEVICE(d);
    if (!strcmp(g->mig, "enabled")) return NOT_SUPPORTED;
    out->gpu = g->util;
    out->memory = g->util / 2;
    return SUCCESS;
}
API ret_t nvmlDeviceGetPowerUsage(void *d, unsigned *out) { DEVICE(d); *out = g->power_mw; return SUCCESS; }
API ret_t nvmlDeviceGetEnforcedPowerLimit(void *d, unsigned *out) {
    DEVICE(d);
    *out = g->power_limit_mw;
    return SUCCESS;
}
API ret_t nvmlDeviceGetPowerManagementLimit(void *d, unsigned *out) {
    return nvmlDeviceGetEnforcedPowerLimit(d, out);
}
API ret_t nvmlDeviceGetTemperature(void *d, unsigned sensor, unsigned *out) {
    DEVICE(d);
    if (sensor) return INVALID_ARGUMENT;
    *out = g->temperature;
    return SUCCESS;
}
struct temperature { unsigned version, sensor; int temperature; };
API ret_t nvmlDeviceGetTemperatureV(void *d, struct temperature *out) {
    DEVICE(d);
    if (out->version != ((unsigned)sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    out->temperature = g->temperature;
    return SUCCESS;
}
API ret_t nvmlDeviceGetPersistenceMode(void *d, unsigned *out) { DEVICE(d); *out = 1; return SUCCESS; }
API ret_t nvmlDeviceGetComputeMode(void *d, unsigned *out) { DEVICE(d); *out = 0; return SUCCESS; }
API ret_t nvmlDeviceGetCurrentClocksEventReasons(void *d, unsigned long long *out) {
    DEVICE(d);
    *out = g->util ? 0 : 1; /* idle */
    return SUCCESS;
}
API ret_t nvmlDeviceGetCurrentClocksThrottleReasons(void *d, unsigned long long *out) {
    return nvmlDeviceGetCurrentClocksEventReasons(d, out);
}
API ret_t nvmlDeviceGetClockInfo(void *d, unsigned type, unsigned *out) {
    DEVICE(d);
    if (type > 3) return INVALID_ARGUMENT;
    *out = type == 2 ? 2619 : g->util ? 1980 : 345;
    return SUCCESS;
}
API ret_t nvmlDeviceGetMaxClockInfo(void *d, unsigned type, unsigned *out) {
    DEVICE(d);
    if (type > 3) return INVALID_ARGUMENT;
    *out = type == 2 ? 2619 : 1980;
    return SUCCESS;
}
API ret_t nvmlDeviceGetFanSpeed(void *d, unsigned *out) { (void)out; DEVICE(d); return NOT_SUPPORTED; }

/* Modes and faults */

API ret_t nvmlDeviceGetMigMode(void *d, unsigned *current, unsigned *pending) {
    DEVICE(d);
    if (!strcmp(g->mig, "na")) return NOT_SUPPORTED;
    *current = *pending = !strcmp(g->mig, "enabled");
    return SUCCESS;
}
API ret_t nvmlDeviceGetMaxMigDeviceCount(void *d, unsigned *out) {
    DEVICE(d);
    *out = strcmp(g->mig, "na") ? 7 : 0;
    return SUCCESS;
}
API ret_t nvmlDeviceGetEccMode(void *d, unsigned *current, unsigned *pending) {
    DEVICE(d);
    *current = *pending = 1;
    return SUCCESS;
}
API ret_t nvmlDeviceGetTotalEccErrors(void *d, unsigned type, unsigned counter, unsigned long long *out) {
    DEVICE(d);
    (void)counter;
    *out = type == 1 ? g->ecc_errors : 0; /* uncorrected ones */
    return SUCCESS;
}

/* Processes */

struct process_info { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };
static ret_t processes_of(void *d, unsigned *count, struct process_info *out) {
    DEVICE(d);
    unsigned room = *count, found = 0;
    for (int i = 0; i < m.num_processes; i++) {
        if (m.processes[i].gpu != g->index) continue;
        if (out && found < room)
            out[found] = (struct process_info){m.processes[i].pid, m.processes[i].memory_mib * MIB, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > (out ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}
API ret_t nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *count, struct process_info *out) {
    return processes_of(d, count, out);
}
API ret_t nvmlDeviceGetComputeRunningProcesses_v2(void *d, unsigned *count, struct process_info *out) {
    return processes_of(d, count, out);
}
API ret_t nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *count, struct process_info *out) {
    (void)out;
    DEVICE(d);
    *count = 0;
    return SUCCESS;
}
API ret_t nvmlDeviceGetGraphicsRunningProcesses_v2(void *d, unsigned *count, struct process_info *out) {
    return nvmlDeviceGetGraphicsRunningProcesses_v3(d, count, out);
}

/* Place: PCIe, NUMA, NVLink */

struct pci { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char bus_id[32]; };
API ret_t nvmlDeviceGetPciInfo_v3(void *d, struct pci *out) {
    DEVICE(d);
    memset(out, 0, sizeof *out);
    sscanf(g->bus_id, "%x:%x:%x", &out->domain, &out->bus, &out->device);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", g->bus_id);
    snprintf(out->legacy, sizeof out->legacy, "%s", g->bus_id + 4); /* the domain has four digits there */
    out->device_id = strstr(g->name, "H100") ? 0x233010DE : 0x26B910DE;
    return SUCCESS;
}
API ret_t nvmlDeviceGetPciInfo_v2(void *d, struct pci *out) { return nvmlDeviceGetPciInfo_v3(d, out); }
API ret_t nvmlDeviceGetPciInfo(void *d, struct pci *out) { return nvmlDeviceGetPciInfo_v3(d, out); }
API ret_t nvmlDeviceGetCurrPcieLinkGeneration(void *d, unsigned *out) { DEVICE(d); *out = 5; return SUCCESS; }
API ret_t nvmlDeviceGetMaxPcieLinkGeneration(void *d, unsigned *out) { DEVICE(d); *out = 5; return SUCCESS; }
API ret_t nvmlDeviceGetCurrPcieLinkWidth(void *d, unsigned *out) { DEVICE(d); *out = 16; return SUCCESS; }
API ret_t nvmlDeviceGetMaxPcieLinkWidth(void *d, unsigned *out) { DEVICE(d); *out = 16; return SUCCESS; }
API ret_t nvmlDeviceGetNumaNodeId(void *d, unsigned *out) { DEVICE(d); *out = g->numa; return SUCCESS; }
static void set_bits(unsigned long *words, unsigned size, const char *ranges) {
    memset(words, 0, size * sizeof *words);
    for (const char *at = ranges; *at;) {
        char *end;
        unsigned long first = strtoul(at, &end, 10), last = first;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        for (unsigned long bit = first; bit <= last && bit / 64 < size; bit++)
            words[bit / 64] |= 1UL << bit % 64;
        at = *end == ',' ? end + 1 : end;
        if (end == at && *at) return;
    }
}
API ret_t nvmlDeviceGetCpuAffinity(void *d, unsigned size, unsigned long *words) {
    DEVICE(d);
    set_bits(words, size, g->cpus);
    return SUCCESS;
}
API ret_t nvmlDeviceGetCpuAffinityWithinScope(void *d, unsigned size, unsigned long *words, unsigned scope) {
    (void)scope;
    return nvmlDeviceGetCpuAffinity(d, size, words);
}
API ret_t nvmlDeviceGetMemoryAffinity(void *d, unsigned size, unsigned long *words, unsigned scope) {
    (void)scope;
    DEVICE(d);
    memset(words, 0, size * sizeof *words);
    if (g->numa / 64 < size) words[g->numa / 64] |= 1UL << g->numa % 64;
    return SUCCESS;
}
API ret_t nvmlDeviceGetTopologyCommonAncestor(void *a, void *b, unsigned *out) {
    DEVICE(a);
    char *other = b, x[16], y[16];
    if (other < handles || other >= handles + m.num_gpus) return INVALID_ARGUMENT;
    if (a == b) { *out = 0; return SUCCESS; }
    snprintf(x, sizeof x, "GPU%u", g->index);
    snprintf(y, sizeof y, "GPU%u", m.gpus[other - handles].index);
    static const struct { const char *kind; unsigned level; } levels[] = {
        {"PIX", 10}, {"PXB", 20}, {"PHB", 30}, {"NODE", 40}, {"SYS", 50}};
    for (int i = 0; i < m.num_links; i++) {
        struct pair *l = &m.links[i];
        if (!((!strcmp(l->a, x) && !strcmp(l->b, y)) || (!strcmp(l->a, y) && !strcmp(l->b, x)))) continue;
        for (unsigned k = 0; k < sizeof levels / sizeof *levels; k++)
            if (!strcmp(l->pcie, levels[k].kind)) { *out = levels[k].level; return SUCCESS; }
    }
    return NOT_SUPPORTED;
}
API ret_t nvmlDeviceGetP2PStatus(void *a, void *b, unsigned index, unsigned *out) {
    unsigned level;
    ret_t ret = nvmlDeviceGetTopologyCommonAncestor(a, b, &level);
    if (!ret) *out = index > 3 ? 5 : 0;
    return ret;
}
API ret_t nvmlDeviceGetNvLinkState(void *d, unsigned link, unsigned *out) {
    DEVICE(d);
    if (!g->nvlinks) return NOT_SUPPORTED;
    if (link >= 18) return INVALID_ARGUMENT;
    *out = link < g->nvlinks;
    return SUCCESS;
}
API ret_t nvmlDeviceGetNvLinkVersion(void *d, unsigned link, unsigned *out) {
    DEVICE(d);
    if (link >= g->nvlinks) return NOT_SUPPORTED;
    *out = 6; /* 4.0, as on H100 */
    return SUCCESS;
}
API ret_t nvmlDeviceGetNvLinkCapability(void *d, unsigned link, unsigned capability, unsigned *out) {
    DEVICE(d);
    if (link >= g->nvlinks) return NOT_SUPPORTED;
    *out = capability < 6;
    return SUCCESS;
}
struct field_value {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned kind;
    ret_t result;
    union { unsigned number; unsigned long long room; } value;
};
API ret_t nvmlDeviceGetFieldValues(void *d, int count, struct field_value *values) {
    DEVICE(d);
    for (int i = 0; i < count; i++) {
        struct field_value *v = &values[i];
        int is_speed = v->field == 164 && v->scope < g->nvlinks; /* NVML_FI_DEV_NVLINK_GET_SPEED */
        v->kind = 1;                                             /* unsigned int */
        v->result = is_speed ? SUCCESS : NOT_SUPPORTED;
        if (is_speed) v->value.number = g->nvlink_gb_s * 1000 + 0.5;
    }
    return SUCCESS;
}
/* All links end at NVSwitches, as on HGX boards. */
API ret_t nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, unsigned *out) {
    DEVICE(d);
    if (link >= g->nvlinks) return NOT_SUPPORTED;
    *out = 2;
    return SUCCESS;
}
API ret_t nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, struct pci *out) {
    DEVICE(d);
    if (link >= g->nvlinks) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->bus = 7 + link % 4;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
    out->device_id = 0x22A310DE;
    return SUCCESS;
}
struct fabric_v2 { unsigned version; unsigned char cluster[16]; ret_t status; unsigned clique; unsigned char state; unsigned health; };
API ret_t nvmlDeviceGetGpuFabricInfoV(void *d, struct fabric_v2 *out) {
    DEVICE(d);
    if (out->version != ((unsigned)sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    memset(out->cluster, 0, sizeof out->cluster);
    out->status = SUCCESS;
    out->clique = 0;
    out->state = g->nvlinks ? 3 : 0; /* a board of its own: registered, in no larger fabric */
    out->health = 0;
    return SUCCESS;
}
