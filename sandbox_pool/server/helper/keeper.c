/* Owner of a shell: of a session that takes one command after the other, or of one background process. It starts the shell
 * ahead of time, hands it each command, keeps the output, enforces the deadline, and stays the subreaper of what commands
 * left running. What ends a command is the shell's report or the shell's end: nothing a command prints is interpreted.
 *
 * The server may lend the session to a client on the same machine: then commands come, and their results go, on a line of
 * the client's own. The server is told when the line was used, at most every QUIET_US, and when it has ended. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static struct job job;
static struct capture out, err;
static struct report report;
static struct processes earlier;  /* what was left by commands before the one that runs */
static int first_free;            /* the pipe that the next command writes to: what came before was left those below */
static int out_pipe, err_pipe;    /* of the command that runs; -1: the same as out, or none */
static long long started_us, deadline_us, alive_every_us, next_alive_us;
static bool running, leaving, timed_out, killed, detached;

#define QUIET_US 250000
#define SHORT_US 1000             /* output of commands shorter than this is read once, when they have ended */
static int own_children, shell_children;
static int ended_with;            /* the status of a command that the server asked for, while its state is written */
static bool saving;               /* a command has ended, and the shell writes its state */
static int asker;                 /* where the command that runs came from: the server's socket, or the line */
static bool line_over;            /* the line takes no more commands: the server wants it back, or the client is gone */
static bool recalled;             /* and the server waits to hear of it */
static bool told_running, kept;   /* what the server was told last; whether a state was saved */
static bool used;                 /* whether a command was run */
static long long told_us;
static char *place;               /* the session's directory */

static bool on_line(void) { return running && asker == job.line; }

/* How the session is doing, for the server: `recalled` when it is the answer to its question. */
static void tell_server(bool answer) {
    struct writer writer;
    writer_begin(&writer, "line");
    writer_number(&writer, "lent", job.line >= 0);
    writer_number(&writer, "recalled", answer);
    writer_number(&writer, "running", on_line());
    writer_number(&writer, "shell", job.shell != 0);
    writer_number(&writer, "saved", kept);
    writer_raw_begin(&writer);
    if (place) writer_raw(&writer, place, strlen(place));
    told_running = on_line();
    told_us = now_us();
    if (!writer_send(&writer, job.sock, NULL, 0)) detached = true;
}

static void end_line(void) {
    close(job.line);
    job.line = -1;
    tell_server(recalled);
    line_over = recalled = false;
}

static void keep_place(void) {
    if (!report.directory || !*report.directory) return;
    free(place);
    place = report.directory;
    report.directory = NULL;
}

static void receive_line(void);

/* The line takes no more. A command that the client has sent already is run: it cannot know that the line is over. */
static void finish_line(void) {
    line_over = true;
    shutdown(job.line, SHUT_RD);
    while (job.line >= 0 && !on_line()) receive_line();
}

/* The result is on its way to the client. */
static void line_command_ended(void) {
    asker = job.sock;
    if (saving) return;
    if (line_over || !job.shell) finish_line();
    else if (told_running || now_us() - told_us >= QUIET_US) tell_server(false);
}

/* Reads at most `limit` bytes of what is there now; what no command wants any more is dropped. */
static void drain(int pipe, size_t limit) {
    static char buffer[65536];
    int *fd = &job.pipes[pipe];
    while (*fd >= 0 && limit > 0) {
        ssize_t n = read(*fd, buffer, limit < sizeof buffer ? limit : sizeof buffer);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            if (*fd == job.input) job.input = -1;
            close(*fd);
            *fd = -1;
            return;
        }
        if (job.background) background_log(buffer, (size_t)n);
        else if (running && pipe == out_pipe) capture_add(&out, buffer, (size_t)n);
        else if (running && pipe == err_pipe) capture_add(&err, buffer, (size_t)n);
        limit -= (size_t)n;
    }
}

/* The command has ended. What it wrote is in the pipes already; a child that goes on writing must not delay the result. */
static void drain_last(int pipe) {
    int available = 0;
    if (pipe >= 0 && job.pipes[pipe] >= 0 && ioctl(job.pipes[pipe], FIONREAD, &available) == 0 && available > 0)
        drain(pipe, (size_t)available);
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

static void report_exec(int status, bool saved, bool begun) {
    struct writer writer;
    const char *directory = report.directory ? report.directory : "";
    capture_end(&out);
    capture_end(&err);
    writer_begin(&writer, "exit");
    writer_number(&writer, "status", status);
    writer_number(&writer, "begun", begun);
    writer_number(&writer, "shell", job.shell != 0);
    writer_number(&writer, "saved", saved);
    writer_number(&writer, "timed_out", timed_out);
    writer_number(&writer, "killed", killed);
    writer_number(&writer, "us", now_us() - started_us);
    write_capture(&writer, "out", &out);
    write_capture(&writer, "err", &err);
    writer_raw_begin(&writer);
    writer_raw(&writer, out.head, out.head_size);
    writer_raw(&writer, out.tail, out.tail_size);
    writer_raw(&writer, err.head, err.head_size);
    writer_raw(&writer, err.tail, err.tail_size);
    writer_raw(&writer, directory, strlen(directory));
    bool lent = on_line();
    keep_place();
    if (!writer_send(&writer, asker, NULL, 0)) {
        if (lent) line_over = true;
        else detached = true;
    }
    capture_free(&out);
    capture_free(&err);
    free(report.directory);
    report.directory = NULL;
    running = false;
    if (lent) line_command_ended();
}

static void report_background(int status) {
    struct writer writer;
    writer_begin(&writer, "exit");
    writer_number(&writer, "status", status);
    writer_number(&writer, "killed", killed);
    writer_number(&writer, "us", now_us() - started_us);
    if (!writer_send(&writer, job.sock, NULL, 0)) detached = true;
}

static void send_gone(void) {
    struct writer writer;
    writer_begin(&writer, "gone");
    if (!writer_send(&writer, job.sock, NULL, 0)) detached = true;
}

/* Takes over what the shell wrote. The server hears of the first state: from now on the session goes on from this one. */
static bool keep_state(void) {
    bool saved = save_state(&job), first = saved && !kept;
    kept |= saved;
    if (first && job.line >= 0) tell_server(false);
    return saved;
}

/* What the shell says of the command that runs. */
static void take_report(void) {
    if (report.status == ENDS) leaving = true;
    if (report.status < 0 || saving) return;
    saving = true;
    ended_with = report.status << 8;
}

static void shell_ended(int status) {
    job.shell = 0;
    if (job.background) {
        drain_last(0);
        report_background(status);
    } else if (running) {
        bool begun = shell_took_command(&job);
        while (read_report(&job, &report)) take_report();
        bool saved = (leaving || saving) && keep_state();
        drain_last(out_pipe);
        drain_last(err_pipe);
        status = saving ? ended_with : status;
        saving = false;
        report_exec(status, saved, begun);
    } else {
        if (saving) keep_state();
        saving = false;
        send_gone(); /* nobody waits for it, but somebody may be about to ask it for something */
        if (job.line >= 0) finish_line();
    }
}

/* Reaps; true when nothing is left below this keeper. A session's shell that a command has stopped is ended, because
 * nobody is there to let it go on, and whoever calls next would wait for it. */
static bool reap(void) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG | WUNTRACED);
        if (pid == 0) return false;
        if (pid < 0) return errno == ECHILD;
        if (pid != job.shell) continue;
        if (!WIFSTOPPED(status)) shell_ended(status);
        else if (!job.background) kill(pid, SIGKILL);
    }
}

/* Kills the shell and what its command started, and nothing that was there before. */
static void kill_command(void) {
    kill_descendants(getpid(), job.background ? NULL : &earlier);
    for (int pass = 0; pass < 5000 && !reap() && job.shell; pass++) usleep(200);
}

/* Whether the shell is not alone below this keeper. */
static bool anything_left(void) { return has_children(own_children, job.shell) || has_children(shell_children, 0); }

/* A process that a command left behind writes on into its pipes, so that no later command may have them; once nothing is
 * left, all are free again. Without a free one the shell is given up: the next one has new pipes, and the same state. */
static void choose_pipes(void) {
    if (!anything_left()) {
        first_free = 0;
    } else {
        struct processes all = processes_below(getpid(), NULL), new = processes_below(getpid(), &earlier);
        if (all.count <= 1) first_free = 0; /* the shell is among them */
        else if (new.count > 1) first_free = (err_pipe > out_pipe ? err_pipe : out_pipe) + 1;
        free(all.list);
        free(new.list);
    }
    free(earlier.list);
    earlier = (struct processes){NULL, 0};
    if (first_free + 1 < PIPES) return;
    kill(job.shell, SIGKILL);
    waitpid(job.shell, NULL, 0);
    job.shell = 0;
}

/* The state is written: the shell is ready for the next command, if it has a pipe for it. */
static void state_written(void) {
    bool saved = keep_state();
    saving = false;
    choose_pipes();
    if (running) report_exec(ended_with, saved, true);
    else if (job.line >= 0) line_command_ended();
}

/* A client has its result at once. The server gets it when the state is written, because it may ask for that next. */
static void hear_report(void) {
    while (read_report(&job, &report)) {
        if (report.status == SAVED && saving) state_written();
        if (report.status == SAVED || !running || saving) continue;
        take_report();
        drain_last(out_pipe);
        drain_last(err_pipe);
        if (saving && on_line()) report_exec(ended_with, false, true);
    }
}

/* What runs already, without the shell itself. */
static void remember_earlier(void) {
    if (!anything_left()) return;
    earlier = processes_below(getpid(), NULL);
    for (size_t i = 0; i < earlier.count; i++)
        if (earlier.list[i].pid == job.shell) {
            earlier.list[i] = earlier.list[--earlier.count];
            return;
        }
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
    timed_out = killed = leaving = false;
    if (!job.background) {
        remember_earlier();
        out_pipe = first_free;
        err_pipe = message_number(request, "separate", 0) ? first_free + 1 : -1;
        drain(out_pipe, 1 << 20);
        if (err_pipe >= 0) drain(err_pipe, 1 << 20);
    }
    running = used = true;
    if (write_script(&job, request, out_pipe, err_pipe < 0 ? out_pipe : err_pipe)) return;
    kill(job.shell, SIGKILL); /* no memory left for the command: its shell's end is told, and that it was not begun */
}

/* By /proc, because prlimit is for a process itself alone (seccomp.c). */
static bool read_text(const char *path, char *text, size_t room) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? -1 : read(file, text, room - 1);
    if (file >= 0) close(file);
    text[got > 0 ? got : 0] = 0;
    return got > 0;
}

/* Whether a command changed what the kernel holds of a process: its limits, its priority, where it may run. */
static bool shell_is_ordinary(void) {
    cpu_set_t its, ours;
    CPU_ZERO(&its);
    CPU_ZERO(&ours);
    char its_limits[4096], our_limits[4096], path[32];
    snprintf(path, sizeof path, "/proc/%d/limits", job.shell);
    if (!read_text(path, its_limits, sizeof its_limits) || !read_text("/proc/self/limits", our_limits, sizeof our_limits)) return false;
    if (strcmp(its_limits, our_limits)) return false;
    return getpriority(PRIO_PROCESS, (id_t)job.shell) == getpriority(PRIO_PROCESS, 0) &&
           sched_getaffinity(job.shell, sizeof its, &its) == 0 && sched_getaffinity(0, sizeof ours, &ours) == 0 &&
           CPU_EQUAL(&its, &ours);
}

/* Whether nothing would be missed if the shell ended now: no process, and no descriptor that a command opened in it. */
static bool shell_is_bare(void) {
    char path[32];
    snprintf(path, sizeof path, "/proc/%d/fd", job.shell);
    int given = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool bare = given >= 0 && count_entries(given) == 3 + FD_OUT + PIPES - FD_WAKE && !anything_left() && shell_is_ordinary();
    if (given >= 0) close(given);
    return bare;
}

/* The slot is not used, and others need the memory: its next command starts in a new shell, from the state of this one. */
static void rest(void) {
    if (running || !job.shell || (used && !kept) || !shell_is_bare()) {
        struct writer writer;
        writer_begin(&writer, "awake");
        if (!writer_send(&writer, job.sock, NULL, 0)) detached = true;
        return;
    }
    kill(job.shell, SIGKILL);
    waitpid(job.shell, NULL, 0);
    _exit(0);
}

static void recall_line(void) {
    if (job.line < 0) return; /* the server has been told */
    recalled = true;
    finish_line();
    if (on_line()) tell_server(true);
}

static void handle(struct message *request) {
    const char *op = message_op(request);
    if (!strcmp(op, "run") && !running && !saving && job.shell) {
        asker = job.sock;
        run_command(request);
    } else if (!strcmp(op, "lend") && request->n_fds == 1 && job.line < 0) {
        job.line = move_high(request->fds[0]);
        request->fds[0] = -1;
        told_us = now_us();
    } else if (!strcmp(op, "recall")) recall_line();
    else if (!strcmp(op, "rest")) rest();
    else if (!strcmp(op, "kill")) {
        killed = job.shell != 0;
        kill_command();
    } else if (!strcmp(op, "signal") && job.shell) {
        kill(-job.shell, (int)message_number(request, "number", SIGTERM));
    } else if (!strcmp(op, "log")) background_send_log(&job, request);
    else if (!strcmp(op, "input")) background_add_input(&job, request);
    else if (!strcmp(op, "resize") && job.pty) {
        struct winsize size = {.ws_row = (unsigned short)message_number(request, "rows", 30),
                               .ws_col = (unsigned short)message_number(request, "cols", 120)};
        ioctl(job.pipes[0], TIOCSWINSZ, &size);
    }
}

/* The server closed its end: a command that runs is no longer wanted. What earlier ones left goes on without their shell. */
static void server_gone(void) {
    detached = true;
    if (job.line >= 0) { /* and a client hears from the server why: that its command is killed here is no result of it */
        close(job.line);
        job.line = -1;
        asker = job.sock;
    }
    if (running || (job.background && job.shell)) kill_command();
    else if (job.shell) kill(job.shell, SIGKILL);
    if (job.background) _exit(0);
}

/* The shell ended while it waited: the client asks the server instead. */
static void refuse_command(void) {
    struct writer writer;
    writer_begin(&writer, "exit");
    writer_number(&writer, "begun", 0);
    writer_send(&writer, job.line, NULL, 0);
}

static void receive_line(void) {
    struct message request;
    if (message_receive(job.line, &request)) {
        if (!strcmp(message_op(&request), "run") && !running && job.shell) {
            asker = job.line;
            run_command(&request);
        } else if (!strcmp(message_op(&request), "run") && !running) {
            refuse_command();
        } else if (!strcmp(message_op(&request), "kill") && on_line()) {
            killed = job.shell != 0;
            kill_command();
        }
    } else {
        line_over = true;
        if (!on_line()) end_line();
    }
    message_free(&request);
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

static bool is_short(void) { return running && !job.background && now_us() - started_us < SHORT_US; }

static int poll_timeout(void) {
    if (!running || job.background) return -1;
    long long next = next_alive_us;
    if (is_short()) return 1;
    if (deadline_us && deadline_us < next) next = deadline_us;
    if (on_line() && !told_running && started_us + QUIET_US < next) next = started_us + QUIET_US;
    long long left = next - now_us();
    return left <= 0 ? 0 : (int)((left + 999) / 1000);
}

static void tick(void) {
    long long now = now_us();
    if (!running || job.background) return;
    if (deadline_us && now >= deadline_us) {
        timed_out = true;
        kill_command();
    } else if (now >= next_alive_us) {
        struct writer writer;
        writer_begin(&writer, "alive");
        writer_number(&writer, "us", now - started_us);
        writer_send(&writer, asker, NULL, 0);
        next_alive_us += alive_every_us;
    } else if (on_line() && !told_running && now - started_us >= QUIET_US) {
        tell_server(false);
    }
}

static void loop(void) {
    enum { SERVER, SIGNALS, REPORT, INPUT, LISTENER, LINE, OUTPUT, ALL = OUTPUT + PIPES };
    for (bool empty = false;;) {
        /* Without its shell it stays as long as something that commands started does, or a process's log is wanted. */
        if (!job.shell && empty && (detached || !job.background)) _exit(0);
        /* While the shell writes its state nothing is taken on, but the server's end is heard of. */
        bool reads = !is_short();
        struct pollfd polled[ALL] = {[SERVER] = {detached ? -1 : job.sock, saving && !running ? 0 : POLLIN, 0},
                                     [SIGNALS] = {job.signals, POLLIN, 0},
                                     [REPORT] = {job.report, POLLIN, 0},
                                     [INPUT] = {background_unsent && !job.pty ? job.input : -1, POLLOUT, 0},
                                     [LISTENER] = {job.listener, POLLIN, 0},
                                     [LINE] = {line_over || saving ? -1 : job.line, POLLIN, 0}};
        for (int i = 0; i < PIPES; i++) polled[OUTPUT + i] = (struct pollfd){reads ? job.pipes[i] : -1, POLLIN, 0};
        if (job.pty && background_unsent) polled[OUTPUT].events |= POLLOUT;
        if (poll(polled, ALL, poll_timeout()) < 0 && errno != EINTR) _exit(1);
        for (int i = 0; i < PIPES; i++)
            if (polled[OUTPUT + i].revents & (POLLIN | POLLHUP | POLLERR)) drain(i, 1 << 20);
        if (polled[REPORT].revents) hear_report();
        if (polled[LINE].revents && job.line >= 0) receive_line();
        if (polled[SERVER].revents) receive_request();
        if (polled[INPUT].revents || polled[OUTPUT].revents & POLLOUT) background_send_input(&job);
        if (polled[LISTENER].revents & POLLIN) answer_connect(job.listener);
        else if (polled[LISTENER].revents) {
            close(job.listener);
            job.listener = -1;
        }
        if (polled[SIGNALS].revents) drain_signals(job.signals);
        tick();
        empty = reap();
    }
}

void keeper_main(int sock, struct message *request) {
    job.sock = asker = move_high(sock);
    job.line = -1;
    request->fds[0] = -1; /* it has moved */
    set_process_name("slot-keeper");
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    job.signals = move_high(signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK));
    job.background = message_number(request, "background", 0);
    job.pty = message_number(request, "pty", 0);
    job.saved = move_high(states.saved);
    errno = 0;
    const char *failed = start_shell(&job, request);
    if (failed) {
        send_failure(job.sock, failed, errno);
        _exit(71);
    }
    own_children = open_children(getpid());
    shell_children = open_children(job.shell);
    if (job.background) {
        struct writer writer;
        writer_begin(&writer, "started");
        writer_number(&writer, "pid", job.shell);
        writer_send(&writer, job.sock, NULL, 0);
    }
    message_free(request);
    if (job.input >= 0) fcntl(job.input, F_SETFL, fcntl(job.input, F_GETFL) | O_NONBLOCK);
    loop();
}
