/* Owner of one command. It starts the shell ahead of time, hands it the command when that arrives, keeps the output,
 * enforces the deadline, and stays the subreaper of what the command left running. Status, working directory and state
 * come from wait and from a memory file: nothing a command prints is ever interpreted. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static struct job job;
static struct capture out, err;
static char *initial_state;
static size_t initial_state_size;
static long long started_us, deadline_us, alive_every_us, next_alive_us;
static bool background, running, finished, timed_out, killed, detached;

static void keep(struct capture *capture, const char *data, size_t size) {
    if (background) background_log(data, size);
    else if (!finished) capture_add(capture, data, size);
}

/* Reads at most `limit` bytes of what is there now. False once the other side is closed. */
static bool drain(int *fd, struct capture *capture, size_t limit) {
    static char buffer[65536];
    while (*fd >= 0 && limit > 0) {
        ssize_t n = read(*fd, buffer, limit < sizeof buffer ? limit : sizeof buffer);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (n <= 0) {
            if (*fd == job.input) job.input = -1;
            close(*fd);
            *fd = -1;
            return false;
        }
        keep(capture, buffer, (size_t)n);
        limit -= (size_t)n;
    }
    return true;
}

/* The shell is gone. What it wrote is in the pipes already; a child that goes on writing must not delay the result. */
static void drain_last(int *fd, struct capture *capture) {
    int available = 0;
    if (*fd >= 0 && ioctl(*fd, FIONREAD, &available) == 0 && available > 0) drain(fd, capture, (size_t)available);
}

static void write_capture(struct writer *writer, const char *name, const struct capture *c) {
    char key[32];
    snprintf(key, sizeof key, "%s_head", name);
    writer_number(writer, key, (long long)c->head_size);
    snprintf(key, sizeof key, "%s_tail", name);
    writer_number(writer, key, c->truncated ? (long long)c->tail_size : -1);
    snprintf(key, sizeof key, "%s_chars", name);
    writer_number(writer, key, (long long)c->total_chars);
}

/* A command can write into this file, and the server reads it: a larger state is not kept, its directories are. */
#define STATE_LIMIT ((size_t)256 << 10)
#define DIRECTORIES_LIMIT ((size_t)64 << 10)

/* State saved by the shell starts with its directories, each ended by NUL; a shell that did not get so far saved none. */
static char *read_state(size_t *size) {
    *size = 0;
    char *text = malloc(STATE_LIMIT + DIRECTORIES_LIMIT);
    if (!text) return NULL;
    ssize_t n = pread(job.state, text, STATE_LIMIT + DIRECTORIES_LIMIT, 0);
    if (n <= 0 || !memchr(text, '\0', (size_t)n < DIRECTORIES_LIMIT ? (size_t)n : DIRECTORIES_LIMIT)) {
        free(text);
        return NULL;
    }
    *size = (size_t)n;
    return text;
}

static size_t directories_size(const char *state, size_t size) {
    const char *first = memchr(state, '\0', size);
    size_t left = size - (size_t)(first + 1 - state);
    const char *second = left ? memchr(first + 1, '\0', left) : NULL;
    size_t used = second ? (size_t)(second + 1 - state) : size;
    return used < DIRECTORIES_LIMIT ? used : (size_t)(first + 1 - state);
}

static void report_exec(int status) {
    struct writer writer;
    size_t state_size;
    char *state = read_state(&state_size);
    capture_end(&out);
    capture_end(&err);
    size_t directories = state ? directories_size(state, state_size) : 0;
    bool dropped = state && state_size - directories > STATE_LIMIT;
    bool same = state && state_size - directories == initial_state_size &&
                !memcmp(state + directories, initial_state, initial_state_size);
    if (same || dropped) state_size = directories;
    writer_begin(&writer, "exit");
    writer_number(&writer, "status", status);
    writer_number(&writer, "ran", running);
    writer_number(&writer, "timed_out", timed_out);
    writer_number(&writer, "killed", killed);
    writer_number(&writer, "us", now_us() - started_us);
    write_capture(&writer, "out", &out);
    write_capture(&writer, "err", &err);
    writer_number(&writer, "directories", (long long)directories);
    writer_number(&writer, "state_dropped", dropped);
    writer_number(&writer, "state", same || dropped || !state ? -1 : (long long)(state_size - directories));
    writer_raw_begin(&writer);
    writer_raw(&writer, out.head, out.head_size);
    writer_raw(&writer, out.tail, out.tail_size);
    writer_raw(&writer, err.head, err.head_size);
    writer_raw(&writer, err.tail, err.tail_size);
    writer_raw(&writer, state, state_size);
    if (!writer_send(&writer, job.sock, NULL, 0)) detached = true;
    free(state);
}

static void report_background(int status) {
    struct writer writer;
    writer_begin(&writer, "exit");
    writer_number(&writer, "status", status);
    writer_number(&writer, "killed", killed);
    writer_number(&writer, "us", now_us() - started_us);
    if (!writer_send(&writer, job.sock, NULL, 0)) detached = true;
}

static void shell_ended(int status) {
    drain_last(&job.out, &out);
    drain_last(&job.err, &err);
    if (background) report_background(status);
    else report_exec(status);
    finished = true;
}

/* Reaps; true when nothing is left below this keeper. */
static bool reap(void) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid == 0) return false;
        if (pid < 0) return errno == ECHILD;
        if (pid == job.shell && !finished) shell_ended(status);
    }
}

static void kill_tree(void) {
    kill_descendants(getpid());
    for (int pass = 0; pass < 5000 && !reap(); pass++) usleep(200);
}

static void run_command(const struct message *request) {
    size_t max_chars = (size_t)message_number(request, "max_chars", 50000);
    long timeout_ms = message_number(request, "timeout_ms", 0);
    const char *log = message_get(request, "log");
    char path[sizeof out.log_path];
    snprintf(path, sizeof path - 8, "%s", log ? log : "/tmp/hermes-exec/log");
    capture_begin(&out, max_chars, path);
    strcat(path, ".stderr");
    capture_begin(&err, max_chars, path);
    started_us = now_us();
    deadline_us = timeout_ms > 0 ? started_us + timeout_ms * 1000LL : 0;
    alive_every_us = message_number(request, "alive_ms", 10000) * 1000LL;
    next_alive_us = started_us + alive_every_us;
    running = true;
}

static void handle(const struct message *request) {
    const char *op = message_op(request);
    if (!strcmp(op, "run") && !running) run_command(request);
    else if (!strcmp(op, "kill")) {
        killed = !finished;
        kill_tree();
    } else if (!strcmp(op, "signal") && !finished) {
        kill(-job.shell, (int)message_number(request, "number", SIGTERM));
    } else if (!strcmp(op, "log")) background_send_log(&job, request);
    else if (!strcmp(op, "input")) background_add_input(&job, request);
    else if (!strcmp(op, "resize") && job.pty) {
        struct winsize size = {.ws_row = (unsigned short)message_number(request, "rows", 30),
                               .ws_col = (unsigned short)message_number(request, "cols", 120)};
        ioctl(job.out, TIOCSWINSZ, &size);
    }
}

/* The server closed its end. Before the command has ended that means that it is no longer wanted. */
static void server_gone(void) {
    detached = true;
    if (!finished) kill_tree();
    if (background) _exit(0);
}

static void receive_request(void) {
    struct message request;
    if (message_receive(job.sock, &request)) {
        handle(&request);
        message_free(&request);
    } else {
        server_gone();
    }
}

/* The server says `run` before it wakes the shell, so it must be heard before anything the shell did: also when it came
 * while poll() was looking at the other descriptors already. */
static bool run_is_waiting(void) {
    struct pollfd server = {job.sock, POLLIN, 0};
    return !running && !finished && !detached && poll(&server, 1, 0) > 0;
}

static int poll_timeout(void) {
    if (!running || finished) return -1;
    long long next = next_alive_us;
    if (deadline_us && deadline_us < next) next = deadline_us;
    long long left = next - now_us();
    return left <= 0 ? 0 : (int)((left + 999) / 1000);
}

static void tick(void) {
    long long now = now_us();
    if (!running || finished) return;
    if (deadline_us && now >= deadline_us) {
        timed_out = true;
        kill_tree();
    } else if (now >= next_alive_us) {
        struct writer writer;
        writer_begin(&writer, "alive");
        writer_number(&writer, "us", now - started_us);
        writer_send(&writer, job.sock, NULL, 0);
        next_alive_us += alive_every_us;
    }
}

static void loop(int signals) {
    for (bool empty = false;;) {
        /* A finished command stays as long as something it started does; a finished process as long as its log is wanted. */
        if (finished && empty && (detached || !background)) _exit(0);
        struct pollfd polled[] = {{detached ? -1 : job.sock, POLLIN, 0},
                                  {signals, POLLIN, 0},
                                  {job.out, POLLIN | (job.pty && background_unsent ? POLLOUT : 0), 0},
                                  {job.err, POLLIN, 0},
                                  {background_unsent && !job.pty ? job.input : -1, POLLOUT, 0},
                                  {job.listener, POLLIN, 0}};
        if (poll(polled, 6, poll_timeout()) < 0 && errno != EINTR) _exit(1);
        if (polled[0].revents || run_is_waiting()) receive_request();
        if (polled[2].revents & (POLLIN | POLLHUP | POLLERR)) drain(&job.out, &out, 1 << 20);
        if (polled[3].revents) drain(&job.err, &err, 1 << 20);
        if (polled[4].revents || polled[2].revents & POLLOUT) background_send_input(&job);
        if (polled[5].revents & POLLIN) answer_connect(job.listener);
        else if (polled[5].revents) {
            close(job.listener);
            job.listener = -1;
        }
        if (polled[1].revents) {
            struct signalfd_siginfo info;
            while (read(signals, &info, sizeof info) > 0) {}
        }
        tick();
        empty = reap();
    }
}

static void keep_initial_state(const struct message *request) {
    initial_state_size = (size_t)message_number(request, "state_size", 0);
    if (initial_state_size > request->raw_size) _exit(71);
    initial_state = malloc(initial_state_size + 1);
    if (!initial_state) _exit(71);
    memcpy(initial_state, request->raw, initial_state_size);
}

void keeper_main(int sock, struct message *request) {
    job.sock = move_high(sock);
    request->fds[0] = -1; /* it has moved */
    for (int i = 1; i < request->n_fds; i++) request->fds[i] = move_high(request->fds[i]);
    set_process_name("slot-keeper");
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    int signals = move_high(signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK));
    background = message_number(request, "background", 0);
    keep_initial_state(request);
    errno = 0;
    const char *failed = start_shell(&job, request);
    if (failed) {
        send_failure(job.sock, failed, errno);
        _exit(71);
    }
    if (background) {
        struct writer writer;
        writer_begin(&writer, "started");
        writer_number(&writer, "pid", job.shell);
        writer_send(&writer, job.sock, NULL, 0);
    }
    message_free(request);
    if (job.input >= 0) fcntl(job.input, F_SETFL, fcntl(job.input, F_GETFL) | O_NONBLOCK);
    loop(signals);
}
