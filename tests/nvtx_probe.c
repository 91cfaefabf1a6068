/* A tool that NVTX loads in place of a profiler (NVTX_INJECTION64_PATH): it writes what it hears as lines of JSON to the
 * file NVTX_PROBE_OUT. The declarations are the part of NVTX 3's binary interface that it needs. Built by test_trace.py,
 * with -DWITHOUT_PAYLOADS as a tool that does not know the payload extension. */

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CALLBACKS_TABLE = 1, MODULE_CORE2 = 5, PAYLOAD_MODULE = 2 };
enum { RANGE_START = 2, RANGE_END = 3, RANGE_PUSH = 4, RANGE_POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10,
       DOMAIN_CREATE = 12 };
enum { MESSAGE_ASCII = 1, MESSAGE_REGISTERED = 3 };
enum { SCHEMA_REGISTER = 0 };
#define PAYLOAD_EXTENDED ((int32_t)0xDFBD0009)
#define FIRST_SCHEMA ((uint64_t)1 << 24)

typedef void (*function)(void);

typedef struct {
    size_t struct_size;
    int (*module_functions)(int module, function ***out_table, unsigned *out_size);
} callbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, payload_count;
    union { uint64_t u; int64_t i; double d; } payload;
    int32_t message_type;
    union { const char *ascii; void *registered; } message;
} attributes;

typedef struct {
    uint64_t flags, type;
    const char *name, *description;
    uint64_t detail, offset;
    const void *semantics, *reserved;
} entry;

typedef struct {
    uint64_t fields;
    const char *name;
    uint64_t type, flags;
    const entry *entries;
    size_t count, static_size, alignment;
    uint64_t id;
    void *extension;
} schema_attributes;

typedef struct {
    uint64_t schema;
    size_t size;
    const void *bytes;
} payload_data;

typedef struct {
    size_t id, slots;
    intptr_t *functions;
} segment;

typedef struct {
    uint16_t version, struct_size, module, compatibility;
    size_t segment_count;
    segment *segments;
    intptr_t (*get_export)(uint32_t);
    const void *info;
} extension;

typedef struct {
    char name[32];
    uint64_t offset, size;
} field;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;
static char *domains[64], *strings[256], *categories[64];
static size_t domain_count, string_count;
static struct { size_t count, size; field fields[16]; } schemas[64];
static size_t schema_count;

static const char *domain_name(void *domain)
{
    return domain ? domains[(size_t)domain - 1] : "";
}

static void *domain_create(const char *name)
{
    pthread_mutex_lock(&lock);
    domains[domain_count++] = strdup(name);
    size_t made = domain_count;
    pthread_mutex_unlock(&lock);
    return (void *)made;
}

static void *register_string(void *domain, const char *text)
{
    (void)domain;
    pthread_mutex_lock(&lock);
    strings[string_count++] = strdup(text);
    size_t made = string_count;
    pthread_mutex_unlock(&lock);
    return (void *)made;
}

static void name_category(void *domain, uint32_t category, const char *name)
{
    (void)domain;
    categories[category] = strdup(name);
}

static void write_payload(const attributes *a)
{
    if (a->payload_type == 2)
        fprintf(out, ", \"payload\": %lld", (long long)a->payload.i);
    if (a->payload_type != PAYLOAD_EXTENDED)
        return;
    const payload_data *data = (const payload_data *)a->payload.u;
    if (data->schema < FIRST_SCHEMA || data->schema - FIRST_SCHEMA >= schema_count) {
        fprintf(out, ", \"payload\": null");
        return;
    }
    size_t s = data->schema - FIRST_SCHEMA;
    fprintf(out, ", \"payload\": {");
    for (size_t i = 0; i < schemas[s].count; i++) {
        const field *f = &schemas[s].fields[i];
        int64_t value = 0;
        if (f->size == 4)
            value = *(const int32_t *)((const char *)data->bytes + f->offset);
        else
            memcpy(&value, (const char *)data->bytes + f->offset, 8);
        fprintf(out, "%s\"%s\": %lld", i ? ", " : "", f->name, (long long)value);
    }
    fprintf(out, "}");
}

static void say(const char *what, void *domain, const attributes *a)
{
    pthread_mutex_lock(&lock);
    fprintf(out, "{\"op\": \"%s\", \"thread\": %ld, \"domain\": \"%s\"", what, (long)syscall(SYS_gettid),
            domain_name(domain));
    if (a) {
        const char *name = a->message_type == MESSAGE_REGISTERED ? strings[(size_t)a->message.registered - 1]
                           : a->message_type == MESSAGE_ASCII    ? a->message.ascii
                                                                 : "";
        fprintf(out, ", \"name\": \"%s\", \"category\": \"%s\"", name, a->category ? categories[a->category] : "");
        write_payload(a);
    }
    fprintf(out, "}\n");
    fflush(out);
    pthread_mutex_unlock(&lock);
}

static int range_push(void *domain, const attributes *a)
{
    say("push", domain, a);
    return 0;
}

static int range_pop(void *domain)
{
    say("pop", domain, NULL);
    return 0;
}

static uint64_t range_start(void *domain, const attributes *a)
{
    say("start", domain, a);
    return 1;
}

static void range_end(void *domain, uint64_t id)
{
    (void)id;
    say("end", domain, NULL);
}

int InitializeInjectionNvtx2(const void *(*get_table)(uint32_t))
{
    const callbacks *table = get_table(CALLBACKS_TABLE);
    function **functions;
    unsigned size;
    out = fopen(getenv("NVTX_PROBE_OUT"), "a");
    if (!out || !table || !table->module_functions(MODULE_CORE2, &functions, &size) || size <= DOMAIN_CREATE)
        return 0;
    *functions[RANGE_START] = (function)range_start;
    *functions[RANGE_END] = (function)range_end;
    *functions[RANGE_PUSH] = (function)range_push;
    *functions[RANGE_POP] = (function)range_pop;
    *functions[NAME_CATEGORY] = (function)name_category;
    *functions[REGISTER_STRING] = (function)register_string;
    *functions[DOMAIN_CREATE] = (function)domain_create;
    return 1;
}

#ifndef WITHOUT_PAYLOADS
static uint64_t register_schema(void *domain, const schema_attributes *a)
{
    (void)domain;
    pthread_mutex_lock(&lock);
    size_t s = schema_count++;
    schemas[s].count = a->count;
    schemas[s].size = a->static_size;
    for (size_t i = 0; i < a->count && i < 16; i++) {
        field *f = &schemas[s].fields[i];
        snprintf(f->name, sizeof f->name, "%s", a->entries[i].name ? a->entries[i].name : "");
        f->offset = a->entries[i].offset;
        uint64_t type = a->entries[i].type;
        f->size = type >= FIRST_SCHEMA ? schemas[type - FIRST_SCHEMA].size : 8;
    }
    pthread_mutex_unlock(&lock);
    return FIRST_SCHEMA + s;
}

int InitializeInjectionNvtxExtension(extension *module)
{
    if (module->module == PAYLOAD_MODULE && module->segment_count > 0)
        module->segments[0].functions[SCHEMA_REGISTER] = (intptr_t)register_schema;
    return 1;
}
#endif
