/* Folders and files of the host that a spec puts into its slots.
 *
 * Neither way follows a link: not to the host's folder, whose real path was checked, nor to the place in the slot, where
 * an image or a snapshot decides what there is. */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mount.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MS_RDONLY 1
#define MS_NOSUID 2
#define MS_NODEV 4
#define MS_REMOUNT 32
#define MS_BIND 4096
#define MS_REC 16384
#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif
#define MOVE_BOTH_EMPTY (4 | 0x40) /* MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH */

int mount(const char *, const char *, const char *, unsigned long, const void *);

size_t bound_mounts; /* what attach_mounts() added to the slot's mounts */

static int step_into(int folder, const char *name) {
    struct stat info;
    int next = openat(folder, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (next < 0 || (fstat(next, &info) == 0 && !S_ISLNK(info.st_mode))) return next;
    close(next);
    errno = ELOOP;
    return -1;
}

static int make_step(int folder, const char *name, bool file) {
    if (!file) return mkdirat(folder, name, 0755);
    int fd = openat(folder, name, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
    if (fd >= 0) close(fd);
    return fd < 0 ? -1 : 0;
}

/* What is at `path` below `start`. With `make` what is missing is made: folders, and a file at the end if that is one. */
static int walk(const char *start, const char *path, bool make, bool file) {
    char copy[PATH_MAX], *rest = copy;
    if ((size_t)snprintf(copy, sizeof copy, "%s", path) >= sizeof copy) {
        errno = ENAMETOOLONG;
        return -1;
    }
    int fd = open(start, O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (char *name; fd >= 0 && (name = strsep(&rest, "/"));) {
        if (!*name) continue;
        int next = step_into(fd, name);
        if (next < 0 && errno == ENOENT && make && make_step(fd, name, file && !rest) == 0) next = step_into(fd, name);
        int error = errno;
        close(fd);
        errno = error;
        fd = next;
    }
    return fd;
}

/* Never devices or set-id bits; read-only unless asked otherwise. gVisor has only the older call. */
static int restrict_mount(int fd, bool writable) {
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (writable ? 0 : MOUNT_ATTR_RDONLY)};
    if (syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH | AT_RECURSIVE, &attributes, sizeof attributes) == 0) return 0;
    if (errno != ENOSYS) return -1;
    char path[48];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    unsigned long flags = MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV | (writable ? 0 : MS_RDONLY);
    return mount(NULL, path, NULL, flags, NULL);
}

/* Host side: a detached copy with the slot's own user ids. Mounts below it are not taken along. */
int clone_mount(const struct slot_mount *wanted, int userns) {
    int source = walk("/", wanted->from, false, false);
    if (source < 0) return -1;
    int tree = (int)syscall(SYS_open_tree, source, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | O_CLOEXEC);
    int error = tree < 0 ? errno : 0;
    close(source);
    struct mount_attr ids = {.attr_set = MOUNT_ATTR_IDMAP, .userns_fd = (uint64_t)userns};
    if (!error && syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &ids, sizeof ids)) error = errno;
    if (!error && restrict_mount(tree, wanted->writable)) error = errno;
    if (error && tree >= 0) close(tree);
    errno = error;
    return error ? -1 : tree;
}

static int attach(const struct slot_mount *wanted, int tree) {
    struct stat info;
    int source = tree >= 0 ? tree : walk("/", wanted->from, false, false);
    if (source < 0 || fstat(source, &info)) return -1;
    int target = walk("root", wanted->to, true, !S_ISDIR(info.st_mode));
    if (target < 0) return -1;
    if (tree >= 0) return (int)syscall(SYS_move_mount, tree, "", target, "", MOVE_BOTH_EMPTY);
    char from[48], to[48];
    snprintf(from, sizeof from, "/proc/self/fd/%d", source);
    snprintf(to, sizeof to, "/proc/self/fd/%d", target);
    if (mount(from, to, NULL, MS_BIND | MS_REC, NULL)) return -1;
    int mounted = walk("root", wanted->to, false, false);
    return mounted < 0 ? -1 : restrict_mount(mounted, wanted->writable);
}

/* Slot side, before the host's root is left. `trees` are the copies made outside, or NULL; descriptors are closed with
 * all others of the slot. */
const char *attach_mounts(const int *trees) {
    static char failed[PATH_MAX + 64];
    int before = count_mounts();
    size_t entries = count_entries(upper_fd);
    for (int i = 0; i < slot.n_mounts; i++)
        if (attach(&slot.mounts[i], trees ? trees[i] : -1)) {
            snprintf(failed, sizeof failed, "put %s at %s", slot.mounts[i].from, slot.mounts[i].to);
            return failed;
        }
    bound_mounts = (size_t)(count_mounts() - before);
    part_entries += count_entries(upper_fd) - entries;
    return NULL;
}
