/* What only a background process has: a rolling log that can be read from any offset, and a stdin that is fed. */
#include "slot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOG_CAPACITY (256 << 10)

static struct ring ring = {.capacity = LOG_CAPACITY};
static char *unsent; /* bytes the process has not read from its stdin yet */
static bool close_input_when_sent;
size_t background_unsent;

void background_log(const char *data, size_t size) { ring_add(&ring, data, size); }

void background_send_log(const struct job *job, const struct message *request) {
    uint64_t oldest = ring.total > ring.capacity ? ring.total - ring.capacity : 0;
    uint64_t asked = (uint64_t)message_number(request, "offset", 0);
    uint64_t from = asked < oldest ? oldest : asked > ring.total ? ring.total : asked;
    uint64_t size = ring.total - from;
    long limit = message_number(request, "limit", -1);
    if (limit >= 0 && size > (uint64_t)limit) size = (uint64_t)limit;
    struct writer writer;
    writer_begin(&writer, "log");
    writer_number(&writer, "id", message_number(request, "id", 0));
    writer_number(&writer, "offset", (long long)from);
    writer_number(&writer, "dropped", asked < from ? (long long)(from - asked) : 0);
    writer_raw_begin(&writer);
    for (uint64_t done = 0; done < size;) {
        size_t at = (size_t)((from + done) % ring.capacity);
        size_t part = ring.capacity - at < size - done ? ring.capacity - at : (size_t)(size - done);
        writer_raw(&writer, ring.data + at, part);
        done += part;
    }
    writer_send(&writer, job->sock, NULL, 0);
}

static void close_input(struct job *job) {
    if (job->input < 0) return;
    if (job->pty) {
        char end = 4; /* what a terminal sends for end of file */
        (void)!write(job->input, &end, 1);
        return;
    }
    close(job->input);
    job->input = -1;
}

void background_send_input(struct job *job) {
    while (background_unsent > 0 && job->input >= 0) {
        ssize_t n = write(job->input, unsent, background_unsent);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            background_unsent = 0;
            break;
        }
        background_unsent -= (size_t)n;
        memmove(unsent, unsent + n, background_unsent);
    }
    if (background_unsent == 0 && close_input_when_sent) close_input(job);
}

void background_add_input(struct job *job, const struct message *request) {
    if (job->input < 0) return;
    unsent = realloc(unsent, background_unsent + request->raw_size + 1);
    if (!unsent) _exit(71);
    memcpy(unsent + background_unsent, request->raw, request->raw_size);
    background_unsent += request->raw_size;
    if (message_number(request, "eof", 0)) close_input_when_sent = true;
    background_send_input(job);
}
