/* Starting a keeper's shell. What the shell shares with its keeper besides stdin, stdout and stderr are three
 * descriptors with fixed high numbers, out of the way of whatever a command does with the usual ones. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

/* The shell's ends. Wake pipe and script come from the server, which wakes the shell without us. */
struct ends {
    int wake, script, in, out, err, listener[2];
};

static bool make_pipe(int *read_end, int *write_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return false;
    /* Programs open /dev/stdout again, which asks for the rights of its owner. */
    if (slot.run_uid > 0 && (fchown(ends[0], (uid_t)slot.run_uid, (gid_t)slot.run_gid) ||
                             fchown(ends[1], (uid_t)slot.run_uid, (gid_t)slot.run_gid)))
        return false;
    *read_end = move_high(ends[0]);
    *write_end = move_high(ends[1]);
    return true;
}

static int memory_file(const char *name) { return move_high(memfd_create(name, MFD_CLOEXEC)); }

static const char *open_pty(struct job *job, struct ends *shell, const struct message *request) {
    char name[64];
    int main_end = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (main_end < 0 || grantpt(main_end) || unlockpt(main_end) || ptsname_r(main_end, name, sizeof name))
        return "open a terminal";
    struct winsize size = {.ws_row = (unsigned short)message_number(request, "rows", 30),
                           .ws_col = (unsigned short)message_number(request, "cols", 120)};
    ioctl(main_end, TIOCSWINSZ, &size);
    int terminal = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal < 0) return "open a terminal";
    if (slot.run_uid > 0 && fchown(terminal, (uid_t)slot.run_uid, (gid_t)slot.run_gid)) return "own a terminal";
    job->out = job->input = move_high(main_end);
    shell->in = shell->out = shell->err = move_high(terminal);
    return NULL;
}

/* stdin given in advance is a file: it needs nobody to feed it, and the command cannot block on us. */
static int stdin_file(const struct message *request, size_t state_size) {
    int fd = memory_file("stdin");
    if (fd < 0 || !write_all(fd, request->raw + state_size, request->raw_size - state_size)) return -1;
    lseek(fd, 0, SEEK_SET);
    return fd;
}

static const char *open_standard(struct job *job, struct ends *shell, const struct message *request, size_t state_size) {
    if (job->pty) return open_pty(job, shell, request);
    if (!make_pipe(&job->out, &shell->out)) return "make a pipe";
    shell->err = shell->out;
    if (message_number(request, "separate", 0) && !make_pipe(&job->err, &shell->err)) return "make a pipe";
    if (message_number(request, "background", 0)) {
        if (!make_pipe(&shell->in, &job->input)) return "make a pipe";
    } else if (message_number(request, "stdin", 0)) {
        shell->in = stdin_file(request, state_size);
    } else {
        shell->in = move_high(open("/dev/null", O_RDONLY | O_CLOEXEC));
    }
    return shell->in < 0 ? "open stdin" : NULL;
}

static const char *open_channels(struct job *job, struct ends *shell, const struct message *request) {
    size_t state_size = (size_t)message_number(request, "state_size", 0);
    job->out = job->err = job->input = -1;
    if (state_size > request->raw_size) state_size = request->raw_size;
    const char *failed = open_standard(job, shell, request, state_size);
    if (failed) return failed;
    job->state = memory_file("state");
    if (job->state < 0) return "make a memory file";
    /* What comes before is in the environment already. */
    size_t from = (size_t)message_number(request, "restore_from", 0);
    if (from > state_size) from = state_size;
    return write_all(job->state, request->raw + from, state_size - from) ? NULL : "pass the state";
}

static char **collect(const struct message *request, const char *key) {
    size_t count = 1;
    for (const char *v = NULL; (v = message_next(request, key, v));) count++;
    char **list = malloc(count * sizeof *list), **next = list;
    if (!list) _exit(71);
    for (const char *v = NULL; (v = message_next(request, key, v));) *next++ = (char *)v;
    *next = NULL;
    return list;
}

static bool pass_listener(int through, int listener) {
    struct writer writer;
    writer_begin(&writer, "listener");
    return writer_send(&writer, through, &listener, 1);
}

static int take_listener(int through) {
    struct message passed;
    int listener = message_receive(through, &passed) && passed.n_fds == 1 ? move_high(passed.fds[0]) : -1;
    passed.n_fds = 0;
    message_free(&passed);
    return listener;
}

/* Runs between vfork and exec: nothing here may touch memory that the keeper goes on using. */
static void run_shell(const struct job *job, const struct ends *shell, const char *program, char **arguments,
                      char **environment) {
    sigset_t none;
    setsid();
    dup2(shell->in, 0);
    dup2(shell->out, 1);
    dup2(shell->err, 2);
    dup2(shell->wake, FD_WAKE);
    dup2(job->state, FD_STATE);
    dup2(shell->script, FD_SCRIPT);
    if (job->pty) ioctl(0, TIOCSCTTY, 0);
    write_text_file("/proc/self/oom_score_adj", "500"); /* before keeper and init, whatever their rights were */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    int listener = -1;
    const char *failed = become_command(&listener);
    if (!failed && listener >= 0 && !pass_listener(shell->listener[1], listener)) failed = "pass the listener";
    if (!failed) execve(program, arguments, environment);
    dprintf(2, "cannot start the shell: %s: %s\n", failed ? failed : program, strerror(errno));
    _exit(127);
}

const char *start_shell(struct job *job, const struct message *request) {
    struct ends shell = {request->fds[1], request->fds[2], -1, -1, -1, {-1, -1}};
    if (request->n_fds < 3) return "receive the script's descriptors";
    job->pty = message_number(request, "pty", 0);
    const char *failed = open_channels(job, &shell, request), *program = message_get(request, "program");
    if (failed) return failed;
    fcntl(job->out, F_SETFL, O_NONBLOCK | (job->pty ? O_RDWR : 0));
    if (job->err >= 0) fcntl(job->err, F_SETFL, O_NONBLOCK);
    char **arguments = collect(request, "arg"), **environment = collect(request, "env");
    job->listener = -1;
    if (slot.no_inet && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, shell.listener)) return "socketpair";
    job->shell = vfork();
    if (job->shell == 0) run_shell(job, &shell, program, arguments, environment);
    if (job->shell < 0) return "fork the shell";
    if (slot.no_inet) {
        close(shell.listener[1]);
        job->listener = take_listener(shell.listener[0]);
        close(shell.listener[0]);
    }
    free(arguments);
    free(environment);
    close(shell.in);
    if (!job->pty) close(shell.out);
    if (shell.err != shell.out) close(shell.err);
    return NULL;
}
