/* First process of a slot. It forks a keeper per command and a worker per file request, and reaps; everything that can
 * block or take long happens in those. Its ready message proves that the slot starts empty. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

int count_mounts(void) {
    FILE *table = fopen("/proc/self/mountinfo", "re");
    if (!table) return -1;
    int lines = 0;
    for (int c; (c = getc(table)) != EOF;) lines += c == '\n';
    fclose(table);
    return lines;
}

static void report_ready(int control, size_t upper_entries, int mounts, const char *user) {
    struct writer writer;
    writer_begin(&writer, "ready");
    writer_number(&writer, "processes", slot.namespaces ? count_processes() : 1);
    writer_number(&writer, "upper_entries", (long long)upper_entries);
    writer_number(&writer, "mounts", mounts);
    if (slot.image) {
        writer_text(&writer, "user", user);
        writer_text(&writer, "home", slot.home);
    }
    writer_send(&writer, control, NULL, 0);
}

/* Keepers by the number the server gave them, and workers, which have none. */
struct helper {
    long id;
    pid_t pid;
};
static struct helper *helpers;
static size_t n_helpers;

static void remember_helper(long id, pid_t pid) {
    struct helper *grown = realloc(helpers, (n_helpers + 1) * sizeof *helpers);
    if (!grown) return;
    helpers = grown;
    helpers[n_helpers++] = (struct helper){id, pid};
}

static void forget_helper(pid_t pid) {
    for (size_t i = 0; i < n_helpers; i++)
        if (helpers[i].pid == pid) {
            helpers[i] = helpers[--n_helpers];
            return;
        }
}

static void drop_helper(pid_t pid) {
    kill_descendants(pid, NULL);
    kill(pid, SIGKILL);
}

/* For a keeper that did not end its command in time. */
static void drop_keeper(long id) {
    for (size_t i = 0; i < n_helpers; i++)
        if (helpers[i].id == id) {
            drop_helper(helpers[i].pid);
            return;
        }
}

/* A helper that a command has stopped would let whoever waits for it wait for ever. */
static void drop_stopped(pid_t pid) {
    for (size_t i = 0; i < n_helpers; i++)
        if (helpers[i].pid == pid) drop_helper(pid);
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;) {
        if (WIFSTOPPED(status)) drop_stopped(pid);
        else forget_helper(pid);
    }
}

/* Kills everything but the init. As PID 1 that is one call; elsewhere every descendant is found first. */
static int kill_all(void) {
    int killed = 0;
    if (!slot.namespaces) killed = kill_descendants(getpid(), NULL);
    else kill(-1, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) killed++;
    n_helpers = 0;
    return killed;
}

static void fork_helper(int control, struct message *request, bool keeper) {
    bool possible = request->n_fds > 0 && (!keeper || open_states(request));
    pid_t pid = possible ? fork() : -1;
    if (pid > 0) remember_helper(keeper ? message_number(request, "id", 0) : -1, pid);
    if (pid != 0) return; /* on failure the server sees its end of the socket close */
    close(control);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (keeper) keeper_main(request->fds[0], request);
    else worker_main(request->fds[0], request);
    _exit(0);
}

static void handle(int control, struct message *request) {
    const char *op = message_op(request);
    if (!strcmp(op, "job")) fork_helper(control, request, true);
    else if (!strcmp(op, "file")) fork_helper(control, request, false);
    else if (!strcmp(op, "store_state")) store_state(request);
    else if (!strcmp(op, "forget_state")) forget_state(request);
    else if (!strcmp(op, "send_state")) send_state(control, request);
    else if (!strcmp(op, "drop")) drop_keeper(message_number(request, "id", 0));
    else if (!strcmp(op, "kill_all")) {
        struct writer writer;
        int killed = kill_all();
        writer_begin(&writer, "killed");
        writer_number(&writer, "count", killed);
        writer_send(&writer, control, NULL, 0);
    }
}

/* The configuration points into the zygote's request, which this process must not keep alive piecemeal. */
static void keep_config(void) {
    slot.workdir = strdup(slot.workdir);
    slot.home = strdup(slot.home);
    slot.root = slot.root ? strdup(slot.root) : NULL;
    slot.user = slot.user ? strdup(slot.user) : NULL;
}

/* An image has the home its maker wanted, or none. A working directory that it lacks belongs to whoever works there.
   One that is no directory is the image's fault; in a fork it is the agent's doing, which must not cost the slot. */
static const char *make_folders(void) {
    struct stat info;
    bool there = access(slot.workdir, F_OK) == 0;
    make_directories(slot.workdir, 0755);
    if (!slot.image) make_directories(slot.home, 0700);
    else if (!there && slot.run_uid > 0 && chown(slot.workdir, (uid_t)slot.run_uid, (gid_t)slot.run_gid)) errno = 0;
    if (slot.fork) return NULL;
    if (stat(slot.workdir, &info)) return "make the working directory";
    errno = ENOTDIR;
    return S_ISDIR(info.st_mode) ? NULL : "enter the working directory";
}

void init_main(int control) {
    keep_config();
    set_process_name("slot-init");
    umask(022);
    size_t upper_entries = upper_fd >= 0 ? count_entries(upper_fd) - part_entries : 0;
    int mounts = count_mounts() - (int)bound_mounts;
    if (!slot.namespaces) {
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        /* Nothing ends a slot's processes with their init here: it outlives the server to kill them itself. The end of
         * the control socket tells it. */
        prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
    }
    const char *user = "root";
    errno = 0;
    const char *failed = slot.image ? find_user(&user) : NULL;
    if (!failed && slot.namespaces) failed = make_folders();
    if (!failed) failed = drop_init_privileges();
    if (failed) {
        send_failure(control, failed, errno);
        _exit(71);
    }
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    int signals = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    report_ready(control, upper_entries, mounts, user);
    struct pollfd polled[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
    for (;;) {
        if (poll(polled, 2, -1) < 0 && errno != EINTR) _exit(1);
        if (polled[1].revents) {
            drain_signals(signals);
            reap();
        }
        if (!polled[0].revents) continue;
        struct message request;
        if (!message_receive(control, &request)) {
            kill_all();
            _exit(0);
        }
        handle(control, &request);
        message_free(&request);
    }
}
