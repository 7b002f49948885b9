/* Starting a keeper's shell. What the shell shares with its keeper besides stdin, stdout and stderr are five
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
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#define MAX_ARGUMENTS 16

struct pipes {
    int script, out, err, input; /* the shell's ends */
};

static bool make_pipe(int *read_end, int *write_end) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC)) return false;
    *read_end = move_high(ends[0]);
    *write_end = move_high(ends[1]);
    return true;
}

static int memory_file(const char *name) { return move_high(memfd_create(name, MFD_CLOEXEC)); }

static const char *open_pty(struct job *job, struct pipes *shell, const struct message *request) {
    char name[64];
    int main_end = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (main_end < 0 || grantpt(main_end) || unlockpt(main_end) || ptsname_r(main_end, name, sizeof name))
        return "open a terminal";
    struct winsize size = {.ws_row = (unsigned short)message_number(request, "rows", 30),
                           .ws_col = (unsigned short)message_number(request, "cols", 120)};
    ioctl(main_end, TIOCSWINSZ, &size);
    int terminal = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal < 0) return "open a terminal";
    if (slot.run_uid > 0 && fchown(terminal, (uid_t)slot.run_uid, (gid_t)slot.run_uid)) return "own a terminal";
    job->out = job->input = move_high(main_end);
    shell->out = shell->input = move_high(terminal);
    return NULL;
}

static const char *open_channels(struct job *job, struct pipes *shell, const struct message *request) {
    bool background = message_number(request, "background", 0);
    job->out = job->err = job->input = -1;
    shell->err = shell->input = -1;
    if (!make_pipe(&shell->script, &job->script)) return "make a pipe";
    if (job->pty) {
        const char *failed = open_pty(job, shell, request);
        if (failed) return failed;
    } else if (!make_pipe(&job->out, &shell->out)) {
        return "make a pipe";
    }
    if (background && !job->pty && !make_pipe(&shell->input, &job->input)) return "make a pipe";
    if (!background && !make_pipe(&job->err, &shell->err)) return "make a pipe";
    if (shell->input < 0) shell->input = move_high(open("/dev/null", O_RDONLY | O_CLOEXEC));
    job->state = memory_file("state");
    job->stdin_file = memory_file("stdin");
    job->long_script = memory_file("script");
    return shell->input < 0 || job->state < 0 || job->stdin_file < 0 || job->long_script < 0 ? "open channels" : NULL;
}

static void collect(const struct message *request, const char *key, char **list, size_t limit) {
    size_t count = 0;
    for (const char *v = NULL; count + 1 < limit && (v = message_next(request, key, v));) list[count++] = (char *)v;
    list[count] = NULL;
}

static void connect_descriptors(const struct job *job, const struct pipes *shell) {
    dup2(shell->input, 0);
    dup2(shell->out, 1);
    dup2(shell->out, 2);
    dup2(shell->script, FD_SCRIPT);
    dup2(job->state, FD_STATE);
    dup2(job->stdin_file, FD_STDIN);
    dup2(job->long_script, FD_LONG);
    if (shell->err >= 0) dup2(shell->err, FD_STDERR);
}

static void run_shell(const struct job *job, const struct pipes *shell, const struct message *request) {
    char *arguments[MAX_ARGUMENTS], **environment = calloc(65536, sizeof *environment);
    if (!environment) _exit(71);
    collect(request, "arg", arguments, MAX_ARGUMENTS);
    collect(request, "env", environment, 65536);
    setsid();
    connect_descriptors(job, shell);
    if (job->pty) ioctl(0, TIOCSCTTY, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    const char *failed = become_command();
    if (!failed) execve(message_get(request, "program"), arguments, environment);
    dprintf(2, "cannot start the shell: %s: %s\n", failed ? failed : message_get(request, "program"), strerror(errno));
    _exit(127);
}

const char *start_shell(struct job *job, const struct message *request) {
    struct pipes shell;
    job->pty = message_number(request, "pty", 0);
    const char *failed = open_channels(job, &shell, request);
    if (failed) return failed;
    fcntl(job->out, F_SETFL, O_NONBLOCK | (job->pty ? O_RDWR : 0));
    if (job->err >= 0) fcntl(job->err, F_SETFL, O_NONBLOCK);
    if (request->raw_size && !write_all(job->state, request->raw, request->raw_size)) return "pass the state";
    job->shell = fork();
    if (job->shell == 0) run_shell(job, &shell, request);
    if (job->shell < 0) return "fork the shell";
    close(shell.script);
    close(shell.out);
    if (shell.err >= 0) close(shell.err);
    if (shell.input != shell.out) close(shell.input);
    return NULL;
}
