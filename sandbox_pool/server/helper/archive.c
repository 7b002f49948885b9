/* Trees as a stream of records, for upload, download and snapshots. One record per entry:
 *   u8 kind (f d l w o end), u32 mode, u32 uid, u32 gid, i64 mtime_ns, u64 size, u16 path length, path, data
 * Numbers are little-endian. Data is the content of a file or the target of a link. `layer` streams also carry what an
 * overlay's writable layer consists of: owners, whiteouts ('w') and opaque directories ('o'). */
#include "slot.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

struct record {
    uint8_t kind;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    uint64_t size;
    uint16_t path_length;
} __attribute__((packed));

/* Which attribute counts depends on how the overlay is mounted; the other one is data that copy-up carries along. */
const char *archive_opaque = "trusted.overlay.opaque";

long archive_owner = -1;

static bool is_opaque(int fd) {
    char value;
    return fgetxattr(fd, archive_opaque, &value, 1) == 1 && value == 'y';
}

static int send_record(int out, char kind, const struct stat *info, const char *path, uint64_t size) {
    struct record record = {(uint8_t)kind, info->st_mode & 07777, info->st_uid, info->st_gid,
                            info->st_mtim.tv_sec * 1000000000LL + info->st_mtim.tv_nsec, size,
                            (uint16_t)strlen(path)};
    return write_all(out, &record, sizeof record) && write_all(out, path, record.path_length) ? 0 : EPIPE;
}

/* The size is promised before the content is read; a file that shrinks meanwhile is filled up with zeros. */
static int send_content(int out, int fd, uint64_t size) {
    static char buffer[65536];
    while (size > 0) {
        size_t part = size < sizeof buffer ? (size_t)size : sizeof buffer;
        ssize_t n = read(fd, buffer, part);
        if (n <= 0) {
            memset(buffer, 0, part);
            n = (ssize_t)part;
        }
        if (!write_all(out, buffer, (size_t)n)) return EPIPE;
        size -= (uint64_t)n;
    }
    return 0;
}

static int pack_entry(int out, int parent, const char *name, const char *path, bool layer);

static int pack_directory(int out, int fd, const char *path, bool layer) {
    DIR *directory = fdopendir(fd);
    if (!directory) return errno;
    int error = 0;
    for (struct dirent *entry; !error && (entry = readdir(directory));) {
        char below[4096];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        int length = snprintf(below, sizeof below, "%s%s%s", path, *path ? "/" : "", entry->d_name);
        if ((size_t)length < sizeof below) error = pack_entry(out, dirfd(directory), entry->d_name, below, layer);
    }
    closedir(directory);
    return error;
}

static int pack_link(int out, int parent, const char *name, const char *path, const struct stat *info) {
    char target[4096];
    ssize_t n = readlinkat(parent, name, target, sizeof target);
    if (n < 0) return 0;
    int error = send_record(out, 'l', info, path, (uint64_t)n);
    return error ? error : write_all(out, target, (size_t)n) ? 0 : EPIPE;
}

/* What vanished, cannot be opened or is neither file, directory nor link is left out. */
static int pack_entry(int out, int parent, const char *name, const char *path, bool layer) {
    struct stat info;
    if (fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW)) return 0;
    if (S_ISLNK(info.st_mode)) return pack_link(out, parent, name, path, &info);
    if (layer && S_ISCHR(info.st_mode) && info.st_rdev == makedev(0, 0)) return send_record(out, 'w', &info, path, 0);
    if (!S_ISDIR(info.st_mode) && !S_ISREG(info.st_mode)) return 0;
    int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return 0;
    if (S_ISDIR(info.st_mode)) {
        int error = send_record(out, layer && is_opaque(fd) ? 'o' : 'd', &info, path, 0);
        if (!error) return pack_directory(out, fd, path, layer);
        close(fd);
        return error;
    }
    int error = send_record(out, 'f', &info, path, (uint64_t)info.st_size);
    if (!error) error = send_content(out, fd, (uint64_t)info.st_size);
    close(fd);
    return error;
}

/* `name` itself is the record with the empty path. */
int pack_tree(int out, int directory, const char *name, bool layer) {
    int error = pack_entry(out, directory, name, "", layer);
    struct record end = {.kind = 'e'};
    if (!error && !write_all(out, &end, sizeof end)) error = EPIPE;
    return error;
}

/* Opens the directory that holds the last component, never through a link; rejects "..". */
static int open_parent(int directory, char *path, const char **name) {
    int fd = dup(directory);
    char *rest = path;
    for (char *slash; fd >= 0 && (slash = strchr(rest, '/')); rest = slash + 1) {
        *slash = '\0';
        if (!*rest || !strcmp(rest, ".") || !strcmp(rest, "..")) errno = EINVAL;
        int next = *rest && strcmp(rest, ".") && strcmp(rest, "..")
                       ? openat(fd, rest, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        int error = errno;
        close(fd);
        errno = error;
        fd = next;
    }
    if (fd >= 0 && (!strcmp(rest, "..") || !strcmp(rest, "."))) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    *name = *rest ? rest : ".";
    return fd;
}

static int make_file(int in, int parent, const char *name, const struct record *record) {
    static char buffer[65536];
    unlinkat(parent, name, 0);
    int fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int error = fd < 0 ? errno : 0;
    for (uint64_t left = record->size; left > 0;) {
        size_t part = left < sizeof buffer ? (size_t)left : sizeof buffer;
        if (!read_all(in, buffer, part)) return ECONNABORTED;
        if (!error && !write_all(fd, buffer, part)) error = errno;
        left -= part;
    }
    if (fd >= 0) close(fd);
    return error;
}

static int skip(int in, uint64_t size) {
    char buffer[4096];
    for (; size > 0; size -= size < sizeof buffer ? size : sizeof buffer)
        if (!read_all(in, buffer, size < sizeof buffer ? (size_t)size : sizeof buffer)) return ECONNABORTED;
    return 0;
}

static int make_link(int in, int parent, const char *name, const struct record *record) {
    char target[4097];
    if (record->size > 4096) return skip(in, record->size) ? ECONNABORTED : ENAMETOOLONG;
    if (!read_all(in, target, (size_t)record->size)) return ECONNABORTED;
    target[record->size] = '\0';
    unlinkat(parent, name, 0);
    return symlinkat(target, parent, name) ? errno : 0;
}

static int make_directory(int parent, const char *name, bool opaque) {
    if (strcmp(name, ".") && mkdirat(parent, name, 0755) && errno != EEXIST) return errno;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    int error = 0;
    if (opaque && fsetxattr(fd, archive_opaque, "y", 1, 0)) error = errno;
    close(fd);
    return error;
}

static int set_attributes(int parent, const char *name, const struct record *record, bool layer) {
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT},
                                {record->mtime_ns / 1000000000LL, record->mtime_ns % 1000000000LL}};
    bool link = record->kind == 'l';
    uid_t uid = archive_owner >= 0 ? (uid_t)archive_owner : record->uid;
    gid_t gid = archive_owner >= 0 ? (gid_t)archive_owner : record->gid;
    if (layer && geteuid() == 0 && fchownat(parent, name, uid, gid, AT_SYMLINK_NOFOLLOW)) return errno;
    if (!link && fchmodat(parent, name, record->mode & 07777, 0)) return errno;
    utimensat(parent, name, times, AT_SYMLINK_NOFOLLOW);
    return 0;
}

/* Mode and time of a directory are set last: a read-only one must still be filled, and filling it changes its time. */
struct later {
    struct later *next;
    struct record record;
    char path[];
};

static int unpack_entry(int in, int directory, char *path, const struct record *record, bool layer) {
    const char *name;
    int parent = open_parent(directory, path, &name), error = parent < 0 ? errno : 0;
    if (error) return skip(in, record->size) ? ECONNABORTED : error;
    if (record->kind == 'f') error = make_file(in, parent, name, record);
    else if (record->kind == 'l') error = make_link(in, parent, name, record);
    else if (record->kind == 'd' || record->kind == 'o') error = make_directory(parent, name, record->kind == 'o');
    else if (record->kind == 'w' && layer) error = mknodat(parent, name, S_IFCHR, makedev(0, 0)) ? errno : 0;
    else error = ECONNABORTED; /* no record of ours: where the next one starts is unknown */
    if (!error && (record->kind == 'f' || record->kind == 'l')) error = set_attributes(parent, name, record, layer);
    close(parent);
    return error;
}

static struct later *remember(struct later *list, const struct record *record, const char *path) {
    struct later *entry = malloc(sizeof *entry + record->path_length + 1);
    if (!entry) _exit(71);
    entry->next = list;
    entry->record = *record;
    memcpy(entry->path, path, (size_t)record->path_length + 1);
    return entry;
}

static int finish_directories(int directory, struct later *list, bool layer) {
    int first_error = 0;
    for (struct later *next; list; list = next) {
        const char *name;
        int parent = open_parent(directory, list->path, &name);
        int error = parent < 0 ? errno : set_attributes(parent, name, &list->record, layer);
        if (parent >= 0) close(parent);
        if (!first_error) first_error = error;
        next = list->next;
        free(list);
    }
    return first_error;
}

/* Reads to the end even after an error, so that the sender is told instead of cut off. */
int unpack_tree(int in, int directory, bool layer) {
    struct later *directories = NULL;
    int first_error = 0;
    for (;;) {
        struct record record;
        char path[65536];
        if (!read_all(in, &record, sizeof record)) return ECONNABORTED;
        if (record.kind == 'e') break;
        if (!read_all(in, path, record.path_length)) return ECONNABORTED;
        path[record.path_length] = '\0';
        if (record.kind == 'd' || record.kind == 'o') directories = remember(directories, &record, path);
        int error = unpack_entry(in, directory, path, &record, layer);
        if (error == ECONNABORTED) return error;
        if (!first_error) first_error = error;
    }
    int error = finish_directories(directory, directories, layer);
    return first_error ? first_error : error;
}
