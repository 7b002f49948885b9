/* What slots see of the host's own root, as an overlay that the zygote keeps for all lives of a slot.
 *
 * An overlay reads its layers with the rights of whoever mounted it. This one is mounted by a stranger to the host: a user
 * id that owns nothing, without the capabilities that pass over modes. So what a stranger may not read stays unreadable in
 * the slot, although id-mapping makes root's files the slot's own there.
 *
 * The layers are a folder (`view`, made by isolation/host_view.py) and the host's root. The slot's root is `view/slot`,
 * which the host's root does not have: only its subfolders that carry a redirect lead to the host. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STRANGER 65533
#define MS_RDONLY_NOSUID_NODEV (1 | 2 | 4)
#define MNT_DETACH 2
#define MS_PRIVATE_REC (16384 | 1 << 18)

int mount(const char *, const char *, const char *, unsigned long, const void *);
int umount2(const char *, int);

static int attach(const char *path, const char *name, int userns) {
    int tree = clone_layer(path, userns);
    if (tree < 0 || (mkdir(name, 0755) && errno != EEXIST)) return errno;
    int error = syscall(SYS_move_mount, tree, "", AT_FDCWD, name, 4 /* MOVE_MOUNT_F_EMPTY_PATH */) ? errno : 0;
    close(tree);
    return error;
}

/* setfsuid takes the capabilities away that pass over modes, and leaves the one to mount. */
static int mount_as_stranger(const char *options, const char *target) {
    pid_t pid = fork();
    if (pid == 0) {
        if (setgroups(0, NULL)) _exit(errno);
        setfsgid(STRANGER);
        setfsuid(STRANGER);
        _exit(mount("overlay", target, "overlay", MS_RDONLY_NOSUID_NODEV, options) ? errno : 0);
    }
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return errno;
    return WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
}

static int build_view(long key, int userns) {
    char view[32], host[32], target[32], options[128];
    snprintf(target, sizeof target, "v%ld", key);
    snprintf(view, sizeof view, "m%ld", key);
    snprintf(host, sizeof host, "h%ld", key);
    int error = attach("view", view, userns);
    if (!error) error = attach("/", host, userns);
    snprintf(options, sizeof options, "lowerdir=%s:%s,redirect_dir=follow", view, host);
    if (!error && mkdir(target, 0755) && errno != EEXIST) error = errno;
    if (!error) error = mount_as_stranger(options, target);
    umount2(view, MNT_DETACH); /* the overlay holds its layers itself */
    umount2(host, MNT_DETACH);
    return error;
}

static int open_view(const char *directory, long key, int userns) {
    char path[4096];
    snprintf(path, sizeof path, "%s/v%ld/slot", directory, key);
    int error = access(path, F_OK) ? build_view(key, userns) : 0;
    errno = error;
    return error ? -1 : clone_layer(path, -1); /* its ids are those of the slot already */
}

/* Views have a process with a mount namespace of its own: every slot begins with a copy of all mounts where it is cloned,
 * and there are as many views as slots. */
static void keep_views(int sock, const char *directory) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    set_process_name("slot-views");
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_PRIVATE_REC, NULL) || chdir(directory)) _exit(71);
    for (struct message request; message_receive(sock, &request); message_free(&request)) {
        struct writer writer;
        int tree = open_view(directory, message_number(&request, "key", 0), request.n_fds ? request.fds[0] : -1);
        int error = tree < 0 ? errno : 0;
        writer_begin(&writer, "view");
        writer_number(&writer, "errno", error);
        writer_send(&writer, sock, &tree, tree >= 0);
        if (tree >= 0) close(tree);
    }
    _exit(0);
}

static int start_keeper_of_views(const char *directory) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return -1;
    pid_t pid = fork();
    if (pid == 0) {
        int sock = move_high(ends[1]);
        syscall(SYS_close_range, 3, sock - 1, 0); /* above all the sockets of others, whose end must be heard of */
        keep_views(sock, directory);
    }
    close(ends[1]);
    if (pid > 0) return ends[0];
    close(ends[0]);
    return -1;
}

/* A mount of the view for slots whose ids begin at `key`, which is made when it is first asked for; -1 with errno. */
int host_view(const char *directory, long key, int userns) {
    static int views = -1;
    struct message answer = {0};
    struct writer writer;
    if (views < 0 && (views = start_keeper_of_views(directory)) < 0) return -1;
    writer_begin(&writer, "view");
    writer_number(&writer, "key", key);
    int tree = -1, error = EPIPE;
    if (writer_send(&writer, views, &userns, userns >= 0) && message_receive(views, &answer)) {
        error = (int)message_number(&answer, "errno", 0);
        if (answer.n_fds == 1) tree = answer.fds[0], answer.n_fds = 0;
        message_free(&answer);
    }
    errno = error;
    return tree;
}
