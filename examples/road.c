/* A whole client of the road in C: one session, a sequence of three tokens, one decode.
 *
 *     cc -std=c11 -O2 -Wall -Wextra -o /tmp/road examples/road.c -lm
 *     /tmp/road /tmp/attnd-$(id -u)/8080.sock
 *
 * It asks for the pool's geometry, makes a sequence, appends known k and v, attends a known q to
 * them, and compares o and lse with what it computes itself. docs/road.md describes every byte.
 * Little-endian machines only, like the wire.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* The frames. No compiler pads these: every field lies at a multiple of its size. */

enum { CALL = 1, ANSWER = 2, HELLO = 16, WELCOME = 17, STATE = 20, REFUSED = 21 };

struct header {
    uint16_t kind, flags;
    uint32_t payload_bytes;
};

struct call {
    uint64_t id;
    uint16_t route, reserved;
    uint32_t deadline_us;
    uint64_t request_offset, request_length, answer_offset, answer_capacity;
    uint8_t request_id[16];
};

struct answer {
    uint64_t id;
    uint16_t status, flags;
    uint32_t reserved;
    uint64_t image_length, needed;
    float stages_s[6]; /* queue, plan, copy in, kernel, copy out, encode */
};

_Static_assert(sizeof(struct header) == 8, "header");
_Static_assert(sizeof(struct call) == 64, "call");
_Static_assert(sizeof(struct answer) == 56, "answer");

/* One session. Requests are written to the arena's first half, answers come to its second. */

struct session {
    int sock;
    char *arena;
    uint64_t half; /* bytes */
    uint64_t last_id;
    char *welcome; /* JSON */
};

enum { NUM_TOKENS = 3, GROUP_SIZE = 2, ARENA_BYTES = 4 << 20, HEADER_ROOM = 4096 };

static _Noreturn void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(1);
}

static void write_all(int sock, const void *data, size_t size) {
    for (const char *at = data; size > 0;) {
        ssize_t sent = send(sock, at, size, MSG_NOSIGNAL);
        if (sent <= 0) fail("the engine closed the connection");
        at += sent;
        size -= (size_t)sent;
    }
}

static void read_all(int sock, void *data, size_t size) {
    for (char *at = data; size > 0;) {
        ssize_t got = recv(sock, at, size, 0);
        if (got <= 0) fail("the engine closed the connection");
        at += got;
        size -= (size_t)got;
    }
}

/* A payload with a 0 behind it, so that JSON can be searched as a string. */
static char *read_payload(int sock, struct header header) {
    char *payload = calloc(1, (size_t)header.payload_bytes + 1);
    if (!payload) fail("out of memory");
    read_all(sock, payload, header.payload_bytes);
    if (header.kind == REFUSED) fail("refused: %s", payload);
    return payload;
}

/* The first number after `key`. A real client has a JSON parser; this one knows what it asks for. */
static uint64_t number_after(const char *json, const char *key) {
    const char *at = strstr(json, key);
    if (!at) fail("no %s in %s", key, json);
    at += strlen(key);
    return strtoull(at + strcspn(at, "0123456789"), NULL, 10);
}

/* The first frame's header, and the arena's descriptor, which comes with its bytes. */
static int receive_descriptor(int sock, struct header *header) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec into = {header, sizeof *header};
    struct msghdr message = {
        .msg_iov = &into,
        .msg_iovlen = 1,
        .msg_control = control.bytes,
        .msg_controllen = sizeof control.bytes,
    };
    ssize_t got = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
    if (got <= 0) fail("the engine closed the connection");
    read_all(sock, (char *)header + got, sizeof *header - (size_t)got);

    int descriptor = -1;
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS)
        memcpy(&descriptor, CMSG_DATA(rights), sizeof descriptor);
    return descriptor;
}

static struct session connect_to(const char *path) {
    struct session session = {.sock = socket(AF_UNIX, SOCK_STREAM, 0)};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) fail("%s: too long for a socket's path", path);
    strcpy(address.sun_path, path);
    if (connect(session.sock, (struct sockaddr *)&address, sizeof address) != 0) {
        perror(path);
        exit(1);
    }

    char hello[128];
    int size = snprintf(hello, sizeof hello,
                        "{\"version\":1,\"name\":\"road.c\",\"arena_bytes\":%d}", ARENA_BYTES);
    struct header header = {HELLO, 0, (uint32_t)size};
    write_all(session.sock, &header, sizeof header);
    write_all(session.sock, hello, (size_t)size);

    int descriptor = receive_descriptor(session.sock, &header);
    session.welcome = read_payload(session.sock, header);
    if (header.kind != WELCOME || descriptor < 0) fail("no WELCOME: is this the engine's socket?");

    uint64_t arena_bytes = number_after(session.welcome, "\"arena_bytes\"");
    session.arena = mmap(NULL, arena_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (session.arena == MAP_FAILED) fail("the arena cannot be mapped");
    close(descriptor); /* only a client that grows its arena still needs it */
    session.half = arena_bytes / 2;
    return session;
}

/* Images: a length, a JSON header of that length, the tensors' bytes back to back. */

struct tensor {
    const char *name;
    uint64_t shape[3];
    const float *data;
};

static uint64_t num_bytes(const struct tensor *t) {
    return t->shape[0] * t->shape[1] * t->shape[2] * sizeof(float);
}

/* Copies text into a JSON string. */
static char *quote(char *to, const char *text) {
    for (; *text; text++) {
        if (*text == '"' || *text == '\\') *to++ = '\\';
        *to++ = *text;
    }
    return to;
}

/* Writes a request to the front of the arena; its length. */
static uint64_t write_image(struct session *session, const char *fields,
                            const struct tensor *tensors, int num_tensors) {
    char *json = session->arena + 8, *at = json;
    at += sprintf(at, "{\"__metadata__\":{\"request\":\"");
    at = quote(at, fields);
    at += sprintf(at, "\"}");
    uint64_t begin = 0;
    for (int i = 0; i < num_tensors; i++) {
        const struct tensor *t = &tensors[i];
        uint64_t end = begin + num_bytes(t);
        at += sprintf(at,
                      ",\"%s\":{\"dtype\":\"F32\",\"shape\":[%" PRIu64 ",%" PRIu64 ",%" PRIu64
                      "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                      t->name, t->shape[0], t->shape[1], t->shape[2], begin, end);
        begin = end;
    }
    *at++ = '}';
    while ((at - session->arena) % 64) *at++ = ' '; /* the tensors begin aligned */
    uint64_t header_bytes = (uint64_t)(at - json);
    if (header_bytes > HEADER_ROOM || 8 + header_bytes + begin > session->half)
        fail("the request does not fit: make ARENA_BYTES larger");
    memcpy(session->arena, &header_bytes, 8);
    for (int i = 0; i < num_tensors; i++) {
        memcpy(at, tensors[i].data, num_bytes(&tensors[i]));
        at += num_bytes(&tensors[i]);
    }
    return (uint64_t)(at - session->arena);
}

/* Where a tensor of an answer's image lies. */
static const float *tensor_of(const char *image, const char *header, const char *quoted_name) {
    uint64_t header_bytes;
    memcpy(&header_bytes, image, 8);
    const char *entry = strstr(header, quoted_name);
    if (!entry) fail("the answer has no %s", quoted_name);
    return (const float *)(image + 8 + header_bytes + number_after(entry, "data_offsets"));
}

/* Sends a call and waits for its answer, whose image is then at the arena's second half. The
 * image's header, as a string to be freed. */
static char *call(struct session *session, const char *quoted_route, const char *fields,
                  const struct tensor *tensors, int num_tensors) {
    struct {
        struct header header;
        struct call call;
    } frame = {{CALL, 0, sizeof frame.call}, {0}};
    frame.call.id = ++session->last_id;
    frame.call.route = (uint16_t)number_after(session->welcome, quoted_route);
    frame.call.request_offset = 0;
    frame.call.request_length = write_image(session, fields, tensors, num_tensors);
    frame.call.answer_offset = session->half;
    frame.call.answer_capacity = session->half;
    write_all(session->sock, &frame, sizeof frame);

    for (;;) {
        struct header header;
        read_all(session->sock, &header, sizeof header);
        char *payload = read_payload(session->sock, header);
        if (header.kind != ANSWER) { /* STATE: the engine tells when it drains */
            free(payload);
            continue;
        }
        struct answer answer;
        memcpy(&answer, payload, sizeof answer);
        if (answer.id != session->last_id) fail("an answer to a call that was not made");
        if (answer.status >= 300)
            fail("%s: %d %s", quoted_route, answer.status, payload + sizeof answer + 8);
        free(payload);

        const char *image = session->arena + session->half;
        uint64_t header_bytes = 0;
        if (answer.image_length >= 8) memcpy(&header_bytes, image, 8);
        char *text = calloc(1, header_bytes + 1);
        if (!text) fail("out of memory");
        if (header_bytes) memcpy(text, image + 8, header_bytes);
        return text;
    }
}

/* Multiples of a quarter between -1 and 1: exact in every dtype that a pool may have. */
static float known(uint64_t i, uint64_t step) {
    return (float)((int)(i * step % 9) - 4) / 4;
}

/* fmax alone would pass over NaN. */
static double worse(double worst, double difference) {
    return isnan(difference) ? INFINITY : fmax(worst, difference);
}

/* Compares o [heads, dim] and lse [heads] with softmax attention in double; the largest error. */
static double largest_error(const float *o, const float *lse, const float *q, const float *k,
                            const float *v, uint64_t num_kv_heads, uint64_t head_dim) {
    double worst = 0;
    for (uint64_t head = 0; head < num_kv_heads * GROUP_SIZE; head++) {
        double weights[NUM_TOKENS], sum = 0;
        for (int j = 0; j < NUM_TOKENS; j++) {
            uint64_t row = (uint64_t)j * num_kv_heads + head / GROUP_SIZE;
            double dot = 0;
            for (uint64_t d = 0; d < head_dim; d++)
                dot += (double)q[head * head_dim + d] * k[row * head_dim + d];
            sum += weights[j] = exp(dot / sqrt((double)head_dim));
        }
        worst = worse(worst, fabs(lse[head] - log(sum)));
        for (uint64_t d = 0; d < head_dim; d++) {
            double expected = 0;
            for (int j = 0; j < NUM_TOKENS; j++) {
                uint64_t row = (uint64_t)j * num_kv_heads + head / GROUP_SIZE;
                expected += weights[j] / sum * v[row * head_dim + d];
            }
            worst = worse(worst, fabs(o[head * head_dim + d] - expected));
        }
    }
    return worst;
}

int main(int argc, char **argv) {
    if (argc != 2) fail("usage: %s SOCKET", argv[0]);
    struct session session = connect_to(argv[1]);

    // ask for the pool's geometry
    char *info = call(&session, "\"info\"", "{}", NULL, 0);
    uint64_t num_kv_heads = number_after(info, "num_kv_heads");
    uint64_t head_dim = number_after(info, "head_dim");
    free(info);

    // make a sequence, and append three tokens to it
    char fields[256];
    sprintf(fields, "{\"sequences\":[{\"id\":\"road-c-%d\"}]}", (int)getpid());
    free(call(&session, "\"create_sequences\"", fields, NULL, 0));

    uint64_t row = num_kv_heads * head_dim;
    float *k = malloc(NUM_TOKENS * row * sizeof *k), *v = malloc(NUM_TOKENS * row * sizeof *v);
    float *q = malloc(GROUP_SIZE * row * sizeof *q);
    if (!k || !v || !q) fail("out of memory");
    for (uint64_t i = 0; i < NUM_TOKENS * row; i++) k[i] = known(i, 5), v[i] = known(i, 7);
    for (uint64_t i = 0; i < GROUP_SIZE * row; i++) q[i] = known(i, 2);

    struct tensor rows[] = {{"k", {NUM_TOKENS, num_kv_heads, head_dim}, k},
                            {"v", {NUM_TOKENS, num_kv_heads, head_dim}, v}};
    sprintf(fields, "{\"layer\":0,\"sequences\":[\"road-c-%d\"],\"append_indptr\":[0,%d]}",
            (int)getpid(), NUM_TOKENS);
    free(call(&session, "\"append\"", fields, rows, 2));

    // attend one query to them
    struct tensor query = {"q", {1, num_kv_heads * GROUP_SIZE, head_dim}, q};
    sprintf(fields, "{\"layer\":0,\"sequences\":[\"road-c-%d\"]}", (int)getpid());
    char *header = call(&session, "\"decode\"", fields, &query, 1);
    const char *image = session.arena + session.half;
    const float *o = tensor_of(image, header, "\"o\"");
    const float *lse = tensor_of(image, header, "\"lse\"");
    printf("o = %.5f %.5f %.5f ..., lse = %.5f\n", o[0], o[1], o[2], lse[0]);
    double error = largest_error(o, lse, q, k, v, num_kv_heads, head_dim);
    free(header);

    // delete the sequence, which otherwise lives until the service ends
    sprintf(fields, "{\"id\":\"road-c-%d\"}", (int)getpid());
    free(call(&session, "\"delete_sequence\"", fields, NULL, 0));

    printf("largest difference from its own computation: %.2g\n", error);
    return error < 1e-4 ? 0 : 1;
}
