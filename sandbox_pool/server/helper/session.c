/* How a keeper and its shell speak. The keeper puts a command into a memory file and wakes the shell through a pipe; the
 * shell says on a socket that the command has ended. What it says counts only behind the word that came with this very
 * command, so that no earlier command can speak for it, and only from the shell itself: a program that the command
 * started can read the word in /proc, but the kernel tells who wrote, and nobody can open a socket there. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define REPORT_LIMIT 65536

static char word[33];           /* of the command that runs */
static char heard[REPORT_LIMIT]; /* what came since, as far as it can still become a report */
static size_t n_heard;

/* The whole of one memory file into another. */
bool copy_file(int from, int to) {
    struct stat info;
    off_t at = 0;
    if (fstat(from, &info) || ftruncate(to, 0) || lseek(to, 0, SEEK_SET)) return false;
    while (at < info.st_size)
        if (sendfile(to, from, &at, (size_t)(info.st_size - at)) <= 0) return false;
    return true;
}

static bool new_word(void) {
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != sizeof random) return false;
    for (size_t i = 0; i < sizeof random; i++) sprintf(word + 2 * i, "%02x", random[i]);
    return true;
}

static void add_quoted(struct writer *text, const char *value, size_t size) {
    writer_raw(text, "'", 1);
    for (size_t i = 0; i < size; i++) {
        if (value[i] == '\'') writer_raw(text, "'\\''", 4);
        else writer_raw(text, value + i, 1);
    }
    writer_raw(text, "'", 1);
}

static void add_text(struct writer *text, const char *value) { writer_raw(text, value, strlen(value)); }

/* A directory and variables for one command go around it. The server checked the names. */
static void add_command(struct writer *text, const struct message *request, const char *command, size_t size) {
    const char *directory = message_get(request, "cwd"), *variable = message_get(request, "set");
    if (directory) {
        add_text(text, "\\builtin cd -- ");
        add_quoted(text, directory, strlen(directory));
        add_text(text, " || (\\builtin exit 126) && OLDPWD=${__hermes_old-${OLDPWD-}} && \\builtin unset __hermes_old && ");
    }
    for (; variable; variable = message_next(request, "set", variable)) {
        size_t name = strcspn(variable, "=");
        writer_raw(text, variable, name + 1);
        add_quoted(text, variable + name + 1, strlen(variable + name + 1));
        writer_raw(text, " ", 1);
    }
    if (directory || message_get(request, "set")) {
        add_text(text, "\\eval "); /* not through `builtin`, which passes variables on to the first command in it only */
        add_quoted(text, command, size);
    } else {
        writer_raw(text, command, size);
    }
}

/* Hands the shell its command: `out` and `err` are numbers of its pipes. */
bool write_script(struct job *job, const struct message *request, int out, int err) {
    struct writer text = {0};
    /* What add_command() relies on; `cd -` goes where the session was, not where one command was sent. */
    static const char before[] = "; \\unset -f eval; __hermes_old=${OLDPWD-}";
    char first[128], given[32];
    size_t size = (size_t)message_number(request, "command", (long)request->raw_size);
    bool fed = message_number(request, "stdin", 0);
    snprintf(given, sizeof given, "/proc/self/fd/%d", FD_INPUT);
    if (size > request->raw_size || !new_word()) return false;
    n_heard = 0;
    if (fed) {
        if (ftruncate(job->stdin_data, 0) || lseek(job->stdin_data, 0, SEEK_SET)) return false;
        if (!write_all(job->stdin_data, request->raw + size, request->raw_size - size)) return false;
        lseek(job->stdin_data, 0, SEEK_SET);
    }
    snprintf(first, sizeof first, "\\exec <%s >&%d 2>&%d%s", fed ? given : "/dev/null", FD_OUT + out, FD_OUT + err,
             message_get(request, "set") || message_get(request, "cwd") ? before : "");
    writer_raw(&text, first, strlen(first) + 1);
    add_command(&text, request, request->raw, size);
    writer_raw(&text, "", 1);
    writer_raw(&text, word, sizeof word);
    bool written = ftruncate(job->script, 0) == 0 && lseek(job->script, 0, SEEK_SET) == 0 &&
                   write_all(job->script, text.data, text.size) && lseek(job->script, 0, SEEK_SET) == 0;
    free(text.data);
    return written && write_all(job->wake, "\n", 1);
}

bool shell_took_command(const struct job *job) {
    int left = 0;
    return ioctl(job->waking, FIONREAD, &left) == 0 && left == 0;
}

/* `word NUL status NUL directory NUL` anywhere in what was heard. */
static bool find_report(struct report *report) {
    char *found = memmem(heard, n_heard, word, sizeof word);
    if (!found) return false;
    char *status = found + sizeof word, *end = heard + n_heard;
    char *directory = memchr(status, '\0', (size_t)(end - status));
    if (!directory || !memchr(directory + 1, '\0', (size_t)(end - directory - 1))) return false;
    char *rest = (char *)memchr(directory + 1, '\0', (size_t)(end - directory - 1)) + 1;
    report->status = !strcmp(status, "exit") ? ENDS : !strcmp(status, "saved") ? SAVED : atoi(status) & 0xff;
    if (report->status != SAVED) {
        free(report->directory);
        report->directory = strdup(directory + 1);
    }
    n_heard = (size_t)(end - rest);
    memmove(heard, rest, n_heard);
    return true;
}

/* Reads as `read` does, what the shell itself wrote; what others wrote is dropped. The kernel never joins the two. */
static ssize_t receive_report(struct job *job, char *data, size_t size) {
    union {
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
        struct cmsghdr align;
    } control;
    for (;;) {
        struct iovec part = {data, size};
        struct msghdr header = {
            .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t n = recvmsg(job->report, &header, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) { /* nobody has the other end: it would be ready to be read for ever */
            close(job->report);
            job->report = -1;
        }
        if (n <= 0) return n;
        struct cmsghdr *c = CMSG_FIRSTHDR(&header);
        struct ucred writer = {0};
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS) memcpy(&writer, CMSG_DATA(c), sizeof writer);
        if (writer.pid == job->reporter) return n;
    }
}

/* Reads what is there; true when the shell reported something of this command. */
bool read_report(struct job *job, struct report *report) {
    while (!find_report(report)) {
        if (n_heard == sizeof heard) { /* noise: only its end can be the beginning of a report */
            memmove(heard, heard + sizeof heard / 2, sizeof heard / 2);
            n_heard = sizeof heard / 2;
        }
        ssize_t n = receive_report(job, heard + n_heard, sizeof heard - n_heard);
        if (n <= 0) return false;
        n_heard += (size_t)n;
    }
    return true;
}

/* Takes over what the shell wrote, if it got to the end. */
bool save_state(const struct job *job) {
    static const char end[] = "#end\n";
    char last[sizeof end - 1];
    struct stat info;
    if (fstat(job->state, &info) || info.st_size < (off_t)sizeof last) return false;
    if (pread(job->state, last, sizeof last, info.st_size - (off_t)sizeof last) != (ssize_t)sizeof last) return false;
    return !memcmp(last, end, sizeof last) && copy_file(job->state, job->saved);
}
