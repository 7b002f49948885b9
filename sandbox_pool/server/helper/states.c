/* What the shells of a slot leave for the next one, by the number of the job that wrote it. Only the slot's own shells read
 * it, unless the server asks for one to keep it with a snapshot. */
#include "slot.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define SENT_LIMIT ((size_t)256 << 10)

struct state {
    long id;
    int file;
};
static struct state *kept;
static size_t n_kept;
struct states states = {-1, -1};

static int find_state(long id) {
    for (size_t i = 0; i < n_kept; i++)
        if (kept[i].id == id) return kept[i].file;
    return -1;
}

static int add_state(long id) {
    struct state *grown = realloc(kept, (n_kept + 1) * sizeof *kept);
    int file = memfd_create("state", MFD_CLOEXEC);
    if (!grown || file < 0) return -1;
    kept = grown;
    kept[n_kept++] = (struct state){id, file};
    return file;
}

/* For the job about to be forked: a new file that it saves into, and the one it starts from. */
bool open_states(const struct message *request) {
    states.from = find_state(message_number(request, "from", 0));
    states.saved = message_number(request, "background", 0) ? -1 : add_state(message_number(request, "id", 0));
    return states.saved >= 0 || message_number(request, "background", 0);
}

void store_state(const struct message *request) {
    int file = add_state(message_number(request, "id", 0));
    if (file >= 0) write_all(file, request->raw, request->raw_size);
}

void forget_state(const struct message *request) {
    long id = message_number(request, "id", 0);
    for (size_t i = 0; i < n_kept; i++)
        if (kept[i].id == id) {
            close(kept[i].file);
            kept[i] = kept[--n_kept];
            return;
        }
}

void send_state(int control, const struct message *request) {
    int file = find_state(message_number(request, "id", 0));
    char *text = malloc(SENT_LIMIT + 1);
    ssize_t n = text && file >= 0 ? pread(file, text, SENT_LIMIT + 1, 0) : 0;
    struct writer writer;
    writer_begin(&writer, "state");
    writer_number(&writer, "whole", n >= 0 && (size_t)n <= SENT_LIMIT);
    writer_raw_begin(&writer);
    if (n > 0 && (size_t)n <= SENT_LIMIT) writer_raw(&writer, text, (size_t)n);
    writer_send(&writer, control, NULL, 0);
    free(text);
}
