/* Output of a command: everything up to the cap, then head and tail with exact counts, the whole of it in a log file
 * inside the slot. Characters are counted as Python's decoder counts them, a bad sequence as one replacement. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOG_LIMIT (4ull << 30)

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* A character has at most 4 bytes, so 4 bytes per allowed character always hold what will be shown. */
void capture_begin(struct capture *capture, size_t max_chars, const char *log_path) {
    memset(capture, 0, sizeof *capture);
    capture->max_chars = max_chars;
    capture->log_fd = -1;
    snprintf(capture->log_path, sizeof capture->log_path, "%s", log_path);
}

static void expect(struct capture *c, int pending, unsigned char low, unsigned char high) {
    c->pending = pending;
    c->low = low;
    c->high = high;
}

static void start_character(struct capture *c, unsigned char byte) {
    c->total_chars++;
    if (byte >= 0xC2 && byte <= 0xDF) expect(c, 1, 0x80, 0xBF);
    else if (byte == 0xE0) expect(c, 2, 0xA0, 0xBF);
    else if (byte == 0xED) expect(c, 2, 0x80, 0x9F);
    else if (byte >= 0xE1 && byte <= 0xEF) expect(c, 2, 0x80, 0xBF);
    else if (byte == 0xF0) expect(c, 3, 0x90, 0xBF);
    else if (byte >= 0xF1 && byte <= 0xF3) expect(c, 3, 0x80, 0xBF);
    else if (byte == 0xF4) expect(c, 3, 0x80, 0x8F);
    else c->pending = 0;
}

static void count_characters(struct capture *c, const unsigned char *data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if (c->pending == 0) {
            if (data[i] < 0x80) c->total_chars++;
            else start_character(c, data[i]);
        } else if (data[i] >= c->low && data[i] <= c->high) {
            expect(c, c->pending - 1, 0x80, 0xBF);
        } else {
            start_character(c, data[i]);
        }
    }
}

/* The log is opened with the rights of the slot's user: it may have put a link in our way. */
static void open_log(struct capture *c) {
    char directory[sizeof c->log_path];
    snprintf(directory, sizeof directory, "%s", c->log_path);
    *strrchr(directory, '/') = '\0';
    if (slot.run_uid > 0) {
        setfsgid((gid_t)slot.run_gid);
        setfsuid((uid_t)slot.run_uid);
    }
    make_directories(directory, 0755);
    c->log_fd = open(c->log_path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (slot.run_uid > 0) {
        setfsuid(geteuid());
        setfsgid(getegid());
    }
}

static void log_bytes(struct capture *c, const char *data, size_t size) {
    if (c->log_fd < 0) return;
    if (c->total_bytes < LOG_LIMIT && write_all(c->log_fd, data, size)) return;
    close(c->log_fd); /* the slot's disk is full: what fitted stays */
    c->log_fd = -1;
}

static void tail_add(struct capture *c, const char *data, size_t size) {
    if (size > c->tail_capacity) {
        data += size - c->tail_capacity;
        size = c->tail_capacity;
    }
    size_t at = (c->tail_start + c->tail_size) % c->tail_capacity;
    size_t first = smaller(size, c->tail_capacity - at);
    memcpy(c->tail + at, data, first);
    memcpy(c->tail, data + first, size - first);
    size_t over = c->tail_size + size > c->tail_capacity ? c->tail_size + size - c->tail_capacity : 0;
    c->tail_start = (c->tail_start + over) % c->tail_capacity;
    c->tail_size += size - over;
}

static void begin_truncation(struct capture *c) {
    size_t head_chars = c->max_chars * 2 / 5;
    c->truncated = true;
    c->tail_capacity = 4 * (c->max_chars - head_chars) + 4;
    c->tail = malloc(c->tail_capacity);
    if (!c->tail) _exit(71);
    open_log(c);
    log_bytes(c, c->head, c->head_size);
    /* All of the kept bytes go to both ends: the server cuts by characters and needs the overlap when bytes are few. */
    tail_add(c, c->head, c->head_size);
    c->head_size = smaller(c->head_size, 4 * head_chars);
}

static void head_add(struct capture *c, const char *data, size_t size) {
    if (c->head_size + size > c->head_capacity) {
        size_t capacity = c->head_capacity ? c->head_capacity : 1024;
        while (capacity < c->head_size + size) capacity *= 2;
        c->head = realloc(c->head, capacity);
        if (!c->head) _exit(71);
        c->head_capacity = capacity;
    }
    memcpy(c->head + c->head_size, data, size);
    c->head_size += size;
}

void capture_add(struct capture *c, const char *data, size_t size) {
    count_characters(c, (const unsigned char *)data, size);
    c->total_bytes += size;
    if (!c->truncated) {
        head_add(c, data, size);
        if (c->total_chars > c->max_chars) begin_truncation(c);
        return;
    }
    log_bytes(c, data, size);
    tail_add(c, data, size);
}

/* Makes the tail contiguous, for sending. */
void capture_end(struct capture *c) {
    if (c->log_fd >= 0) close(c->log_fd);
    c->log_fd = -1;
    if (c->tail_start == 0) return;
    char *straight = malloc(c->tail_size + 1);
    if (!straight) _exit(71);
    size_t first = smaller(c->tail_size, c->tail_capacity - c->tail_start);
    memcpy(straight, c->tail + c->tail_start, first);
    memcpy(straight + first, c->tail, c->tail_size - first);
    free(c->tail);
    c->tail = straight;
    c->tail_start = 0;
}

void capture_free(struct capture *c) {
    free(c->head);
    free(c->tail);
    memset(c, 0, sizeof *c);
    c->log_fd = -1;
}

void ring_add(struct ring *ring, const char *data, size_t size) {
    if (!ring->data && !(ring->data = malloc(ring->capacity))) _exit(71);
    uint64_t end = ring->total + size;
    if (size > ring->capacity) {
        data += size - ring->capacity;
        size = ring->capacity;
    }
    size_t at = (size_t)((end - size) % ring->capacity);
    size_t first = smaller(size, ring->capacity - at);
    memcpy(ring->data + at, data, first);
    memcpy(ring->data, data + first, size - first);
    ring->total = end;
}
