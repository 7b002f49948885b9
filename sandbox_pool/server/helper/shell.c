/* Starting a keeper's shell. What the shell shares with its keeper besides stdin, stdout and stderr are descriptors with
 * fixed high numbers, out of the way of whatever a command does with the usual ones. */
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
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

/* The shell's ends. */
struct ends {
    int in, out, err, report, pipes[PIPES], listener[2];
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

/* Not a pipe: programs that a command starts could open that again in /proc, and wake the shell or speak for it. */
static bool make_channel(int *ours, int *theirs) {
    int ends[2], tell_writer = 1;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return false;
    *ours = move_high(ends[0]);
    *theirs = move_high(ends[1]);
    return setsockopt(*ours, SOL_SOCKET, SO_PASSCRED, &tell_writer, sizeof tell_writer) == 0;
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
    job->pipes[0] = job->input = move_high(main_end);
    shell->in = shell->out = shell->err = move_high(terminal);
    return NULL;
}

static const char *open_process(struct job *job, struct ends *shell, const struct message *request) {
    if (job->pty) return open_pty(job, shell, request);
    if (!make_pipe(&job->pipes[0], &shell->out) || !make_pipe(&shell->in, &job->input)) return "make a pipe";
    shell->err = shell->out;
    return NULL;
}

/* A session's shell gives each command its own. */
static const char *open_session(struct job *job, struct ends *shell) {
    shell->in = shell->out = shell->err = move_high(open("/dev/null", O_RDWR | O_CLOEXEC));
    if (shell->in < 0) return "open /dev/null";
    for (int i = 0; i < PIPES; i++)
        if (!make_pipe(&job->pipes[i], &shell->pipes[i])) return "make a pipe";
    return NULL;
}

static const char *open_channels(struct job *job, struct ends *shell, const struct message *request) {
    for (int i = 0; i < PIPES; i++) job->pipes[i] = shell->pipes[i] = -1;
    job->input = -1;
    const char *failed = job->background ? open_process(job, shell, request) : open_session(job, shell);
    if (failed) return failed;
    if (!make_channel(&job->wake, &job->waking) || !make_channel(&job->report, &shell->report)) return "make a socket";
    job->state = memory_file("state");
    job->script = memory_file("script");
    job->stdin_data = memory_file("stdin");
    if (job->state < 0 || job->script < 0 || job->stdin_data < 0) return "make a memory file";
    return states.from < 0 || copy_file(states.from, job->state) ? NULL : "pass the state";
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

/* A state brings its own environment: what was unset must not come back. */
static char **shell_environment(const struct message *request) {
    char **list = collect(request, "env");
    if (states.from < 0) return list;
    char **next = list;
    for (char **entry = list; *entry; entry++)
        if (!strncmp(*entry, "__hermes=", 9)) *next++ = *entry;
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

struct start {
    const struct job *job;
    const struct ends *shell;
    const char *program;
    char **arguments, **environment;
    volatile bool traced;
};

/* Shares the keeper's memory until its exec: nothing here may touch what the keeper goes on using, but `traced`. */
static int run_shell(void *given) {
    struct start *start = given;
    const struct job *job = start->job;
    const struct ends *shell = start->shell;
    sigset_t none;
    setsid();
    dup2(shell->in, 0);
    dup2(shell->out, 1);
    dup2(shell->err, 2);
    dup2(job->waking, FD_WAKE);
    dup2(shell->report, FD_REPORT);
    dup2(job->state, FD_STATE);
    dup2(job->script, FD_SCRIPT);
    dup2(job->stdin_data, FD_INPUT);
    for (int i = 0; i < PIPES; i++)
        if (shell->pipes[i] >= 0) dup2(shell->pipes[i], FD_OUT + i);
    if (job->pty) ioctl(0, TIOCSCTTY, 0);
    write_text_file("/proc/self/oom_score_adj", "500"); /* before keeper and init, whatever their rights were */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    int listener = -1;
    const char *failed = become_command(&listener);
    if (!failed && listener >= 0 && !pass_listener(shell->listener[1], listener)) failed = "pass the listener";
    if (!failed && leave_group()) execve(start->program, start->arguments, start->environment);
    enter_group(); /* there is no other one, or only ours may run the program */
    start->traced = !failed && offer_to_be_hidden();
    if (!failed) execve(start->program, start->arguments, start->environment);
    dprintf(2, "cannot start the shell: %s: %s\n", failed ? failed : start->program, strerror(errno));
    _exit(127);
}

/* Until the other end of `started` is closed, by the exec or by the shell's end. A command may stop the shell before its
 * exec, and nobody would let it go on: it is ended. */
static void await_exec(const struct job *job, int started) {
    struct pollfd polled[2] = {{started, POLLIN, 0}, {job->signals, POLLIN, 0}};
    while (poll(polled, 2, -1) < 0 || !polled[0].revents) {
        drain_signals(job->signals);
        siginfo_t stopped = {0};
        if (waitid(P_PID, (id_t)job->shell, &stopped, WSTOPPED | WNOHANG) == 0 && stopped.si_pid) kill(job->shell, SIGKILL);
    }
}

/* Like vfork, whose caller cannot notice that the other one is stopped. */
static pid_t fork_shell(struct job *job, struct start *start) {
    static char stack[65536] __attribute__((aligned(16)));
    int started, ours;
    if (!make_pipe(&started, &ours)) return -1;
    job->shell = clone(run_shell, stack + sizeof stack, CLONE_VM | SIGCHLD, start);
    if (job->shell < 0 && errno == EINVAL) /* QEMU's user mode has no other process with our memory, only a vfork */
        job->shell = clone(run_shell, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, start);
    close(ours);
    if (job->shell > 0) await_exec(job, started);
    close(started);
    return job->shell;
}

static void close_ends(const struct ends *shell) {
    close(shell->in);
    if (shell->out != shell->in) close(shell->out);
    close(shell->report);
    for (int i = 0; i < PIPES; i++)
        if (shell->pipes[i] >= 0) close(shell->pipes[i]);
}

const char *start_shell(struct job *job, const struct message *request) {
    struct ends shell = {.in = -1, .out = -1, .err = -1, .report = -1, .listener = {-1, -1}};
    const char *failed = open_channels(job, &shell, request), *program = message_get(request, "program");
    if (failed) return failed;
    for (int i = 0; i < PIPES; i++)
        if (job->pipes[i] >= 0) fcntl(job->pipes[i], F_SETFL, O_NONBLOCK | (job->pty ? O_RDWR : 0));
    fcntl(job->report, F_SETFL, O_NONBLOCK);
    char **arguments = collect(request, "arg"), **environment = shell_environment(request);
    job->listener = -1;
    if (slot.no_inet && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, shell.listener)) return "socketpair";
    struct start start = {job, &shell, program, arguments, environment, false};
    if (fork_shell(job, &start) < 0) return "fork the shell";
    if (start.traced) hide_traced(job->shell);
    job->reporter = job->shell;
    if (slot.no_inet) {
        close(shell.listener[1]);
        job->listener = take_listener(shell.listener[0]);
        close(shell.listener[0]);
    }
    free(arguments);
    free(environment);
    close_ends(&shell);
    return NULL;
}
