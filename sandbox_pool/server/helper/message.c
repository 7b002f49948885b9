/* Messages between server and helper: a 4-byte length, then "op\0key=value\0...\0" and raw bytes, in as many
 * packets as needed. Sequenced packets keep descriptors attached to the message they belong to. */
#include "slot.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PACKET 65536
#define MAX_MESSAGE (256u << 20)

static ssize_t receive_packet(int sock, void *data, size_t size, struct message *message) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {data, size};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                            .msg_controllen = sizeof control};
    ssize_t n;
    do n = recvmsg(sock, &header, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0) return n;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0, fd; i < count; i++) {
            memcpy(&fd, CMSG_DATA(c) + (size_t)i * sizeof fd, sizeof fd);
            if (message->n_fds < MAX_FDS) message->fds[message->n_fds++] = fd;
            else close(fd);
        }
    }
    return n;
}

static void find_raw(struct message *message) {
    message->raw = message->data + message->size;
    message->raw_size = 0;
    for (size_t i = 0; i + 1 < message->size; i++) {
        if (message->data[i] || message->data[i + 1]) continue;
        message->raw = message->data + i + 2;
        message->raw_size = message->size - i - 2;
        return;
    }
}

bool message_receive(int sock, struct message *message) {
    static char packet[PACKET];
    memset(message, 0, sizeof *message);
    ssize_t n = receive_packet(sock, packet, sizeof packet, message);
    if (n < 4) return false;
    uint32_t total;
    memcpy(&total, packet, 4);
    size_t got = (size_t)n - 4;
    if (total > MAX_MESSAGE || got > total) return false;
    message->data = malloc((size_t)total + 1);
    if (!message->data) return false;
    memcpy(message->data, packet + 4, got);
    while (got < total) {
        n = receive_packet(sock, message->data + got, total - got, message);
        if (n <= 0) return false;
        got += (size_t)n;
    }
    message->data[total] = '\0';
    message->size = total;
    find_raw(message);
    return true;
}

void message_free(struct message *message) {
    for (int i = 0; i < message->n_fds; i++)
        if (message->fds[i] >= 0) close(message->fds[i]);
    free(message->data);
    memset(message, 0, sizeof *message);
}

const char *message_op(const struct message *message) { return message->data; }

/* The value of `key` after `previous` (a value returned before), or the first one; NULL when there is none. */
const char *message_next(const struct message *message, const char *key, const char *previous) {
    size_t length = strlen(key);
    const char *field = previous ? previous : message->data;
    for (field += strlen(field) + 1; field < message->raw && *field; field += strlen(field) + 1)
        if (!strncmp(field, key, length) && field[length] == '=') return field + length + 1;
    return NULL;
}

const char *message_get(const struct message *message, const char *key) { return message_next(message, key, NULL); }

long message_number(const struct message *message, const char *key, long otherwise) {
    const char *text = message_get(message, key);
    return text ? strtol(text, NULL, 10) : otherwise;
}

static void append(struct writer *writer, const void *data, size_t size) {
    if (writer->size + size > writer->capacity) {
        size_t capacity = writer->capacity ? writer->capacity : 256;
        while (capacity < writer->size + size) capacity *= 2;
        char *grown = realloc(writer->data, capacity);
        if (!grown) _exit(71);
        writer->data = grown;
        writer->capacity = capacity;
    }
    memcpy(writer->data + writer->size, data, size);
    writer->size += size;
}

void writer_begin(struct writer *writer, const char *op) {
    memset(writer, 0, sizeof *writer);
    append(writer, "\0\0\0\0", 4);
    append(writer, op, strlen(op) + 1);
}

void writer_text(struct writer *writer, const char *key, const char *value) {
    append(writer, key, strlen(key));
    append(writer, "=", 1);
    append(writer, value, strlen(value) + 1);
}

void writer_number(struct writer *writer, const char *key, long long value) {
    char text[24];
    snprintf(text, sizeof text, "%lld", value);
    writer_text(writer, key, text);
}

void writer_raw_begin(struct writer *writer) { append(writer, "", 1); }

void writer_raw(struct writer *writer, const void *data, size_t size) { append(writer, data, size); }

static bool send_packet(int sock, const char *data, size_t size, const int *fds, int n_fds) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * MAX_FDS)];
        struct cmsghdr align;
    } control;
    struct iovec part = {(void *)data, size};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds > 0) {
        memset(&control, 0, sizeof control);
        header.msg_control = &control;
        header.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)n_fds);
    }
    ssize_t n;
    do n = sendmsg(sock, &header, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n >= 0;
}

/* Sends and frees; false when the other side is gone. */
bool writer_send(struct writer *writer, int sock, const int *fds, int n_fds) {
    uint32_t total = (uint32_t)(writer->size - 4);
    memcpy(writer->data, &total, 4);
    bool sent = true;
    for (size_t done = 0; sent && done < writer->size;) {
        size_t part = writer->size - done < PACKET ? writer->size - done : PACKET;
        sent = send_packet(sock, writer->data + done, part, fds, done ? 0 : n_fds);
        done += part;
    }
    free(writer->data);
    memset(writer, 0, sizeof *writer);
    return sent;
}

bool send_failure(int sock, const char *step, int error) {
    struct writer writer;
    writer_begin(&writer, "failed");
    writer_text(&writer, "step", step);
    writer_number(&writer, "errno", error);
    return writer_send(&writer, sock, NULL, 0);
}
