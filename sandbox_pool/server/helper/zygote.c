/* Host side: makes slots on request by clone without exec, reaps them, and never touches what they hold. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct slot_config slot;

static void read_mounts(const struct message *request) {
    const char *from = NULL, *to = NULL, *mode = NULL;
    while (slot.n_mounts < MAX_MOUNTS && (from = message_next(request, "mount_from", from))) {
        to = message_next(request, "mount_to", to);
        mode = message_next(request, "mount_mode", mode);
        if (!to || !mode) return;
        slot.mounts[slot.n_mounts++] = (struct slot_mount){from, to, !strcmp(mode, "rw")};
    }
}

static void read_config(const struct message *request) {
    memset(&slot, 0, sizeof slot);
    slot.hostname = message_get(request, "hostname");
    slot.workdir = message_get(request, "workdir");
    slot.home = message_get(request, "home");
    slot.root = message_get(request, "root");
    slot.upper_size = message_get(request, "upper_size");
    slot.view = message_get(request, "view");
    slot.user = message_get(request, "user");
    slot.name_servers = message_get(request, "name_servers");
    slot.high_ids = message_get(request, "high_ids");
    slot.image = message_number(request, "image", 0);
    slot.fork = message_number(request, "fork", 0);
    for (const char *v = NULL; slot.n_layers < MAX_LAYERS && (v = message_next(request, "layer", v));)
        slot.layers[slot.n_layers++] = v;
    for (const char *v = NULL; slot.n_parts < MAX_PARTS && (v = message_next(request, "part", v));)
        slot.parts[slot.n_parts++] = v;
    for (const char *v = NULL; slot.n_cgroups < MAX_CGROUPS && (v = message_next(request, "cgroup", v));)
        slot.cgroups[slot.n_cgroups++] = v;
    read_mounts(request);
    slot.namespaces = message_number(request, "namespaces", 0);
    slot.user_ns = message_number(request, "user_ns", 0);
    slot.net_ns = message_number(request, "net_ns", 0);
    slot.idmap = message_number(request, "idmap", 0);
    slot.seccomp = message_number(request, "seccomp", 0);
    slot.landlock = message_number(request, "landlock", 0);
    slot.no_inet = message_number(request, "no_inet", 0);
    slot.uid_base = message_number(request, "uid_base", 0);
    slot.uid_count = message_number(request, "uid_count", 1);
    slot.run_uid = slot.run_gid = message_number(request, "run_uid", 0);
    slot.max_processes = message_number(request, "max_processes", 0);
    slot.mark = message_number(request, "mark", 0);
    slot.max_memory_bytes = message_number(request, "max_memory_bytes", 0);
}

/* A range of ids that begins at our own 0 is two of the namespace around us (images/user_ids.py): the user's own id, and
 * those of /etc/subuid. The kernel takes none that crosses from one to the other. */
static void print_id_map(char *map, size_t size, long first) {
    const char *more = slot.high_ids ? slot.high_ids : "";
    if (first == 0 && slot.uid_count > 1) snprintf(map, size, "0 0 1\n1 1 %ld\n", slot.uid_count - 1);
    else snprintf(map, size, "0 %ld %ld\n%s", first, slot.uid_count, more);
}

static int write_id_maps(pid_t pid) {
    static char map[16384]; /* 300 lines of high ids, too */
    char path[64];
    bool privileged = geteuid() == 0;
    snprintf(path, sizeof path, "/proc/%d/setgroups", pid);
    /* An ordinary user may map its own gid only after giving up setgroups in the namespace. */
    int error = privileged ? 0 : write_text_file(path, "deny");
    if (error) return error;
    print_id_map(map, sizeof map, privileged ? slot.uid_base : (long)geteuid());
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if ((error = write_text_file(path, map))) return error;
    print_id_map(map, sizeof map, privileged ? slot.uid_base : (long)getegid());
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    return write_text_file(path, map);
}

/* The last one to be killed when the slot's memory is full, not the first; allowed to root only. Its children inherit
 * it, and a shell gives it up. Not -1000: a process that may never be killed hangs when it is the only one left. */
static void protect_from_oom(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
    write_text_file(path, "-999");
}

static int join_cgroups(pid_t pid) {
    char text[24];
    snprintf(text, sizeof text, "%d", pid);
    for (int i = 0; i < slot.n_cgroups; i++) {
        int error = write_text_file(slot.cgroups[i], text);
        if (error) return error;
    }
    return 0;
}

/* Read-only layers shown with the slot's own user ids: root's files are root's inside, and give no right outside. */
static int clone_layers(int userns, int *fds, int *n_fds) {
    for (int i = 0; i < slot.n_layers; i++) {
        int fd = clone_layer(slot.layers[i], userns);
        if (fd < 0) return errno;
        fds[(*n_fds)++] = fd;
    }
    return 0;
}

/* The lowest layer of a slot without an image: the host's root, as much of it as slots may see. */
static int clone_view(int userns, int *fds, int *n_fds) {
    int fd = slot.n_layers < MAX_LAYERS ? host_view(slot.view, slot.uid_base, userns) : (errno = E2BIG, -1);
    if (fd < 0) return errno;
    slot.layers[slot.n_layers++] = slot.view;
    fds[(*n_fds)++] = fd;
    return 0;
}

static const char *open_layers(pid_t pid, int *fds, int *n_fds, int *error) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int userns = slot.idmap ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    const char *step = NULL;
    if ((*error = slot.idmap && userns < 0 ? errno : clone_layers(userns, fds, n_fds))) step = "clone a layer";
    if (!step && slot.view && (*error = clone_view(userns, fds, n_fds))) step = "show the host's root";
    for (int i = 0; !step && slot.idmap && i < slot.n_mounts; i++) {
        int fd = clone_mount(&slot.mounts[i], userns);
        if (fd < 0) *error = errno, step = "show a mount with the slot's own user ids";
        else fds[(*n_fds)++] = fd;
    }
    if (userns >= 0) close(userns);
    return step;
}

static void slot_child(int control, int go) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    struct message start;
    if (!message_receive(go, &start)) _exit(71);
    if (slot.user_ns && (syscall(SYS_setresgid, 0, 0, 0) || syscall(SYS_setresuid, 0, 0, 0))) {
        send_failure(control, "take id 0 of the user namespace", errno);
        _exit(71);
    }
    if (slot.namespaces) {
        errno = 0;
        int n_layers = start.n_fds - (slot.idmap ? slot.n_mounts : 0);
        const char *failed = build_root(start.fds, n_layers, slot.idmap ? start.fds + n_layers : NULL);
        if (failed) {
            send_failure(control, failed, errno);
            _exit(71);
        }
    }
    /* The layers stay mounted; their descriptors must not stay open in the slot. */
    message_free(&start);
    int fd = control == 3 ? 3 : dup3(control, 3, O_CLOEXEC);
    if (upper_fd >= 0) upper_fd = upper_fd == 4 ? 4 : dup3(upper_fd, 4, O_CLOEXEC);
    syscall(SYS_close_range, upper_fd >= 0 ? 5 : 4, ~0U, 0);
    init_main(fd);
}

static const char *prepare_child(pid_t pid, int go, int *error) {
    int fds[MAX_LAYERS + MAX_MOUNTS], n_fds = 0;
    const char *step = NULL;
    if (slot.user_ns && (*error = write_id_maps(pid))) step = "map user ids";
    if (!step && (*error = join_cgroups(pid))) step = "join cgroups";
    protect_from_oom(pid);
    if (!step && (slot.idmap || slot.view)) step = open_layers(pid, fds, &n_fds, error);
    if (!step) {
        struct writer writer;
        writer_begin(&writer, "go");
        writer_send(&writer, go, fds, n_fds);
    }
    for (int i = 0; i < n_fds; i++) close(fds[i]);
    return step;
}

static void create_slot(int control, struct message *request) {
    read_config(request);
    int go[2], error = 0;
    if (request->n_fds < 1 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, go)) {
        send_failure(control, "socketpair", errno);
        return;
    }
    unsigned long flags = SIGCHLD;
    if (slot.namespaces) flags |= CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS;
    if (slot.user_ns) flags |= CLONE_NEWUSER;
    if (slot.net_ns) flags |= CLONE_NEWNET;
    pid_t pid = (pid_t)syscall(SYS_clone, flags, NULL, NULL, NULL, NULL);
    if (pid == 0) {
        close(go[1]);
        close(control);
        slot_child(request->fds[0], go[0]);
        _exit(0);
    }
    const char *failed = pid < 0 ? "clone the namespaces" : NULL;
    if (failed) error = errno;
    close(go[0]);
    if (!failed) failed = prepare_child(pid, go[1], &error);
    close(go[1]); /* a child that was not let go dies of this */
    struct writer writer;
    writer_begin(&writer, failed ? "failed" : "created");
    writer_text(&writer, "slot", message_get(request, "slot"));
    writer_number(&writer, "pid", pid);
    if (failed) writer_text(&writer, "step", failed);
    writer_number(&writer, "errno", error);
    writer_send(&writer, control, NULL, 0);
}

static void report_dead(int control) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        struct writer writer;
        writer_begin(&writer, "dead");
        writer_number(&writer, "pid", pid);
        writer_number(&writer, "status", status);
        writer_send(&writer, control, NULL, 0);
    }
}

/* Host-side pack and unpack of snapshot layers, in a child so that the zygote stays responsive. */
static void start_worker(int control, struct message *request) {
    pid_t pid = fork();
    if (pid == 0) {
        close(control);
        if (request->n_fds > 0) worker_main(request->fds[0], request);
        _exit(0);
    }
}

static void handle(int control, struct message *request) {
    const char *op = message_op(request);
    if (!strcmp(op, "create")) create_slot(control, request);
    else if (!strcmp(op, "kill")) {
        /* Only a child that was not reaped yet can be meant: its number cannot have been given to another. */
        pid_t pid = (pid_t)message_number(request, "pid", 0);
        if (pid > 1 && waitid(P_PID, (id_t)pid, &(siginfo_t){0}, WEXITED | WNOHANG | WNOWAIT) == 0) kill(pid, SIGKILL);
    } else if (!strcmp(op, "file")) start_worker(control, request);
}

int zygote_main(int control) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* the id maps of our children are written through /proc */
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    int signals = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    struct pollfd polled[2] = {{control, POLLIN, 0}, {signals, POLLIN, 0}};
    for (;;) {
        if (poll(polled, 2, -1) < 0 && errno != EINTR) return 1;
        if (polled[1].revents) {
            drain_signals(signals);
            report_dead(control);
        }
        if (!polled[0].revents) continue;
        struct message request;
        if (!message_receive(control, &request)) return 0; /* the server is gone; PDEATHSIG takes the slots along */
        handle(control, &request);
        message_free(&request);
    }
}
