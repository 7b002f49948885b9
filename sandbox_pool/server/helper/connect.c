/* connect() of commands that share the host's network namespace (landlock, without network). The kernel asks here, and
 * the connection is made here, to a socket below the slot's directory or to none. What was looked at is what is connected
 * to: nothing is read twice, so a command that changes its memory meanwhile gains nothing. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

/* A newer kernel may write more than our headers know. */
union question {
    struct seccomp_notif notif;
    char room[512];
};
union answer {
    struct seccomp_notif_resp resp;
    char room[512];
};

/* The first thread of a process: descriptors can be had of a process only. */
static pid_t process_of(pid_t thread) {
    char path[64], text[1024] = {0};
    snprintf(path, sizeof path, "/proc/%d/status", thread);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    const char *line = n > 0 ? strstr(text, "\nTgid:") : NULL;
    int process = 0;
    return line && sscanf(line, "\nTgid: %d", &process) == 1 ? process : -1;
}

static int take_descriptor(pid_t thread, int number) {
    int pidfd = (int)syscall(SYS_pidfd_open, process_of(thread), 0);
    int fd = pidfd < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, pidfd, number, 0);
    if (pidfd >= 0) close(pidfd);
    return fd;
}

static bool path_of(int fd, char *path, size_t size) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, size - 1);
    path[n < 0 ? 0 : n] = '\0';
    return n > 0;
}

static bool is_in_slot(int fd) {
    char found[4096], root[4096];
    int top = open(slot.root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    bool known = top >= 0 && path_of(top, root, sizeof root) && path_of(fd, found, sizeof found);
    if (top >= 0) close(top);
    size_t length = known ? strlen(root) : 0;
    return known && !strncmp(found, root, length) && found[length] == '/';
}

/* The socket file that a command means, as it would find it from its own folder; -1 with errno. */
static int open_target(pid_t thread, const char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/cwd", thread);
    int folder = open(name, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return -1;
    int fd = openat(folder, path, O_PATH | O_CLOEXEC);
    close(folder);
    if (fd < 0) return -1;
    if (is_in_slot(fd)) return fd;
    close(fd);
    errno = EACCES;
    return -1;
}

/* Only a process in the slot's own Landlock domain reaches the abstract sockets of the slot, and no others. */
static bool abstract_is_scoped(void) { return slot.run_uid > 0 && landlock_scopes_sockets(); }

static int connect_for(const struct seccomp_notif *notif, int listener) {
    struct sockaddr_un address = {0};
    size_t size = (size_t)notif->data.args[2], start = offsetof(struct sockaddr_un, sun_path);
    if (size <= start || size > sizeof address) return EINVAL;
    struct iovec ours = {&address, size}, theirs = {(void *)(uintptr_t)notif->data.args[1], size};
    pid_t thread = (pid_t)notif->pid;
    if (syscall(SYS_process_vm_readv, thread, &ours, 1, &theirs, 1, 0) != (long)size) return EFAULT;
    int sock = take_descriptor(thread, (int)notif->data.args[0]);
    if (sock < 0) return errno;
    bool abstract = !address.sun_path[0];
    if (abstract && !abstract_is_scoped()) return EACCES;
    if (!abstract) {
        char path[sizeof address.sun_path + 1] = {0};
        memcpy(path, address.sun_path, size - start);
        int target = open_target(thread, path);
        if (target < 0) return errno;
        size = start + 1 + (size_t)snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d", target);
    }
    /* Its number may have been given to another process while we looked. */
    if (address.sun_family != AF_UNIX || ioctl(listener, SECCOMP_IOCTL_NOTIF_ID_VALID, &notif->id)) return EINVAL;
    return connect(sock, (struct sockaddr *)&address, (socklen_t)size) ? errno : 0;
}

/* In a process of its own, since a connection may have to wait until the other side accepts. */
void answer_connect(int listener) {
    union question question = {.room = {0}};
    struct pollfd ready = {listener, POLLIN, 0};
    if (poll(&ready, 1, 0) <= 0 || ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &question)) return;
    pid_t pid = fork();
    if (pid > 0) return;
    union answer answer = {.room = {0}};
    answer.resp.id = question.notif.id;
    answer.resp.error = pid < 0 ? -EAGAIN : -connect_for(&question.notif, listener);
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    if (pid == 0) _exit(0);
}
