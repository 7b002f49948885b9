/* File requests, done by a short-lived process inside the slot with the slot's own rights: a link can lead nowhere the
 * slot could not go itself. Request fields come in the message, bulk data over the same stream socket. */
#include "slot.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* Replies are one line, "ok fields\n" or "error errno\n", then raw bytes. */
static void reply_error(int sock, int error) { dprintf(sock, "error %d\n", error); }

static char kind_of(mode_t mode) {
    return S_ISREG(mode) ? 'f' : S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : 'o';
}

static void print_stat(FILE *stream, const struct stat *info) {
    fprintf(stream, "%c %lld %o %lld", kind_of(info->st_mode), (long long)info->st_size, info->st_mode & 07777,
            (long long)info->st_mtim.tv_sec * 1000000000LL + info->st_mtim.tv_nsec);
}

static void do_stat(int sock, const char *path) {
    struct stat info;
    if (lstat(path, &info)) return reply_error(sock, errno);
    FILE *stream = fdopen(sock, "w");
    fputs("ok ", stream);
    print_stat(stream, &info);
    fputc('\n', stream);
    fclose(stream);
}

/* Only regular files: a FIFO or device would block or never end. */
static int open_regular(const char *path, off_t *size) {
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) return -1;
    struct stat info;
    int error = fstat(fd, &info) ? errno : S_ISDIR(info.st_mode) ? EISDIR : S_ISREG(info.st_mode) ? 0 : EINVAL;
    if (!error) {
        *size = info.st_size;
        return fd;
    }
    close(fd);
    errno = error;
    return -1;
}

static void do_read(int sock, const struct message *request, const char *path) {
    static char buffer[65536];
    off_t size = 0;
    long long offset = message_number(request, "offset", 0), limit = message_number(request, "length", -1);
    int fd = open_regular(path, &size);
    if (fd < 0) return reply_error(sock, errno);
    /* The status and the first part leave together: a small file wakes the server once. */
    size_t filled = (size_t)snprintf(buffer, sizeof buffer, "ok %lld\n", (long long)size);
    /* To the end, not to `size`: files in /proc have size 0. */
    for (ssize_t n = 1; n > 0; filled = 0) {
        size_t part = sizeof buffer - filled;
        if (limit >= 0 && limit < (long long)part) part = (size_t)limit;
        n = pread(fd, buffer + filled, part, offset);
        if (n > 0) offset += n;
        if (n > 0 && limit > 0) limit -= n;
        filled += n > 0 ? (size_t)n : 0;
        if (filled && !write_all(sock, buffer, filled)) break;
    }
    close(fd);
}

static int make_parents(const char *path) {
    char parent[4096];
    if ((size_t)snprintf(parent, sizeof parent, "%s", path) >= sizeof parent) return ENAMETOOLONG;
    char *slash = strrchr(parent, '/');
    if (!slash || slash == parent) return 0;
    *slash = '\0';
    return make_directories(parent, 0755);
}

static int receive_into(int sock, int fd, long long size) {
    static char buffer[65536];
    while (size > 0) {
        ssize_t n = read(sock, buffer, size < (long long)sizeof buffer ? (size_t)size : sizeof buffer);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return ECONNABORTED;
        if (!write_all(fd, buffer, (size_t)n)) return errno;
        size -= n;
    }
    return 0;
}

/* A small file comes with its request; the data of a larger one is asked for. */
static int take_content(int sock, const struct message *request, int fd) {
    if (message_number(request, "inline", 0)) return write_all(fd, request->raw, request->raw_size) ? 0 : errno;
    dprintf(sock, "ok\n");
    return receive_into(sock, fd, message_number(request, "size", 0));
}

/* Through a link to where it points, so that writing to a link behaves like every editor and shell does. */
static const char *final_target(const char *path, char *resolved) {
    struct stat info;
    if (lstat(path, &info) == 0 && S_ISLNK(info.st_mode) && realpath(path, resolved)) return resolved;
    return path;
}

static void do_write(int sock, const struct message *request, const char *path) {
    char resolved[4096], temporary[4200];
    struct stat info;
    int error = make_parents(path);
    if (error) return reply_error(sock, error);
    path = final_target(path, resolved);
    mode_t mode = 0644;
    if (stat(path, &info) == 0) {
        if (!S_ISREG(info.st_mode)) return reply_error(sock, S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
        mode = info.st_mode & 07777;
    }
    mode = (mode_t)message_number(request, "mode", mode);
    snprintf(temporary, sizeof temporary, "%s.hermes-%d", path, getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) return reply_error(sock, errno);
    error = take_content(sock, request, fd);
    if (!error && fchmod(fd, mode)) error = errno;
    if (close(fd) && !error) error = errno;
    if (!error && rename(temporary, path)) error = errno;
    if (error) {
        unlink(temporary);
        return reply_error(sock, error);
    }
    dprintf(sock, "ok\n");
}

static void do_list(int sock, const char *path) {
    DIR *directory = opendir(path);
    if (!directory) return reply_error(sock, errno);
    FILE *stream = fdopen(sock, "w");
    fputs("ok\n", stream);
    for (struct dirent *entry; (entry = readdir(directory));) {
        struct stat info;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (fstatat(dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW)) continue;
        print_stat(stream, &info);
        fprintf(stream, " %s%c", entry->d_name, '\0');
    }
    closedir(directory);
    fclose(stream);
}

static int remove_tree(int parent, const char *name);

static bool is_self_or_parent(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

/* Removes a child of `top`. What is not empty below it is moved up to `top`, for a later pass: however deep a tree is,
 * few descriptors are open. What an overlay refuses to move lies in a lower layer, which no command has made deep. */
static int remove_child(int top, const char *child) {
    static unsigned long moved;
    if (unlinkat(top, child, 0) == 0) return 0;
    if (errno != EISDIR && errno != EPERM) return errno;
    int fd = openat(top, child, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (!directory) return errno;
    int error = 0;
    for (struct dirent *entry; !error && (entry = readdir(directory));) {
        if (is_self_or_parent(entry->d_name)) continue;
        if (unlinkat(fd, entry->d_name, 0) == 0 || unlinkat(fd, entry->d_name, AT_REMOVEDIR) == 0) continue;
        char other[64];
        snprintf(other, sizeof other, ".hermes-removed-%d-%lu", getpid(), ++moved);
        if (renameat(fd, entry->d_name, top, other)) error = remove_tree(fd, entry->d_name);
    }
    closedir(directory);
    return error ? error : unlinkat(top, child, AT_REMOVEDIR) ? errno : 0;
}

static int remove_children(int top, bool *found) {
    int copy = openat(top, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (!directory) return errno;
    int error = 0;
    for (struct dirent *entry; !error && (entry = readdir(directory));) {
        if (is_self_or_parent(entry->d_name)) continue;
        *found = true;
        error = remove_child(top, entry->d_name);
    }
    closedir(directory);
    return error;
}

static int empty_directory(int top) {
    int error = 0;
    for (bool found = true; found && !error;) {
        found = false;
        error = remove_children(top, &found);
    }
    return error;
}

static int remove_tree(int parent, const char *name) {
    if (unlinkat(parent, name, 0) == 0) return 0;
    if (errno != EISDIR && errno != EPERM) return errno;
    int top = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), error = top < 0 ? errno : 0;
    if (!error) error = empty_directory(top);
    if (top >= 0) close(top);
    return error ? error : unlinkat(parent, name, AT_REMOVEDIR) ? errno : 0;
}

static void do_remove(int sock, const struct message *request, const char *path) {
    int error = 0;
    if (message_number(request, "recursive", 0)) error = remove_tree(AT_FDCWD, path);
    else if (unlink(path) && (errno != EISDIR || rmdir(path))) error = errno;
    if (error) reply_error(sock, error);
    else dprintf(sock, "ok\n");
}

static int bind_unix(int listener, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if ((size_t)snprintf(address.sun_path, sizeof address.sun_path, "%s", path) >= sizeof address.sun_path)
        return ENAMETOOLONG;
    int error = make_parents(path);
    if (error) return error;
    return bind(listener, (struct sockaddr *)&address, sizeof address) ? errno : 0;
}

static int bind_loopback(int listener, long port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    return bind(listener, (struct sockaddr *)&address, sizeof address) ? errno : 0;
}

/* A socket inside the slot, at a path or at a port of its loopback, whose listening descriptor goes to the server. */
static void do_listen(int sock, const struct message *request, const char *path) {
    long port = message_number(request, "port", 0);
    int listener = socket(port ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0) return reply_error(sock, errno);
    int error = port ? bind_loopback(listener, port) : bind_unix(listener, path);
    if (error || listen(listener, 64)) return reply_error(sock, error ? error : errno);
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {"ok\n", 3};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &listener, sizeof(int));
    sendmsg(sock, &header, MSG_NOSIGNAL);
}

static void do_pack(int sock, const struct message *request, const char *path) {
    bool layer = message_number(request, "layer", 0);
    int directory = AT_FDCWD;
    if (layer) directory = *path ? open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : upper_fd;
    if (layer && directory < 0) return reply_error(sock, errno);
    struct stat info;
    if (!layer && lstat(path, &info)) return reply_error(sock, errno);
    if (message_number(request, "fork", 0) && !S_ISDIR(info.st_mode)) return reply_error(sock, ENOTDIR);
    long max_bytes = message_number(request, "max_bytes", 0);
    if (max_bytes > 0) archive_max_bytes = (uint64_t)max_bytes;
    dprintf(sock, "ok\n");
    /* For a fork everything is packed; as a layer of an overlay it is packed with the rights of the helper as well. */
    pack_tree(sock, directory, layer ? "." : path, layer || message_number(request, "fork", 0));
}

static void do_unpack(int sock, const struct message *request, const char *path) {
    bool layer = message_number(request, "layer", 0);
    int error = make_directories(path, 0755);
    int directory = error ? -1 : open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (!error && directory >= 0 && message_number(request, "clear", 0)) error = empty_directory(directory);
    if (directory < 0 || error) return reply_error(sock, error ? error : errno);
    dprintf(sock, "ok\n");
    archive_owner = message_number(request, "owner", -1);
    archive_root_opaque = message_number(request, "opaque", 0);
    error = unpack_tree(sock, directory, layer);
    if (error) reply_error(sock, error);
    else dprintf(sock, "ok\n");
}

void worker_main(int sock, const struct message *request) {
    const char *op = message_get(request, "do"), *path = message_get(request, "path");
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    bool layer = message_number(request, "layer", 0);
    if (message_number(request, "userxattr", 0)) archive_opaque = "user.overlay.opaque";
    if (!layer && become_command(NULL)) return reply_error(sock, EPERM);
    if (!op || !path) return reply_error(sock, EINVAL);
    if (!strcmp(op, "stat")) do_stat(sock, path);
    else if (!strcmp(op, "read")) do_read(sock, request, path);
    else if (!strcmp(op, "write")) do_write(sock, request, path);
    else if (!strcmp(op, "list")) do_list(sock, path);
    else if (!strcmp(op, "remove")) do_remove(sock, request, path);
    else if (!strcmp(op, "listen")) do_listen(sock, request, path);
    else if (!strcmp(op, "pack")) do_pack(sock, request, path);
    else if (!strcmp(op, "unpack")) do_unpack(sock, request, path);
    else reply_error(sock, ENOSYS);
}
