/* Trees as a stream of records, for upload, download and snapshots. One record per entry:
 *   u8 kind, u32 mode, u32 uid, u32 gid, i64 mtime_ns, u64 size, u16 path length, path, data
 * Numbers are little-endian. PROTOCOL.md lists the kinds. `layer` streams also carry what a fork must have and a download
 * must not: owners, attributes, and what an overlay's writable layer consists of.
 *
 * What is packed was made by an agent. Holes are not read, and a tree over a limit is refused, never cut: `E` ends the
 * stream with the reason. */
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

#define MAX_DEPTH 512
#define MAX_PATH_BYTES 32767
#define MAX_ENTRIES (1u << 20)
#define MAX_EXTENTS (1u << 16)
#define MAX_ATTRIBUTE (64u << 10)

struct record {
    uint8_t kind;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    uint64_t size;
    uint16_t path_length;
} __attribute__((packed));

struct extent {
    uint64_t offset, length;
};

/* Which attribute counts depends on how the overlay is mounted; the other one is data that copy-up carries along. */
const char *archive_opaque = "trusted.overlay.opaque";

long archive_owner = -1;
uint64_t archive_max_bytes = 16ull << 30;
bool archive_root_opaque;

static int out_fd;
static bool packing_layer;
static uint64_t packed_bytes;
static uint32_t packed_entries;

static bool is_opaque(int fd) {
    char value;
    return fgetxattr(fd, archive_opaque, &value, 1) == 1 && value == 'y';
}

static int put(const void *data, size_t size) { return write_all(out_fd, data, size) ? 0 : EPIPE; }

/* An agent may set any time; what does not fit into nanoseconds is as far away as they reach. */
static int64_t nanoseconds(const struct timespec *time) {
    int64_t whole;
    if (__builtin_mul_overflow(time->tv_sec, 1000000000LL, &whole) || __builtin_add_overflow(whole, time->tv_nsec, &whole))
        return time->tv_sec < 0 ? INT64_MIN : INT64_MAX;
    return whole;
}

static int send_record(char kind, const struct stat *info, const char *path, uint64_t size) {
    struct record record = {(uint8_t)kind, info->st_mode & 07777, info->st_uid, info->st_gid,
                            nanoseconds(&info->st_mtim), size, (uint16_t)strlen(path)};
    if ((packed_bytes += size) > archive_max_bytes || ++packed_entries > MAX_ENTRIES) return EFBIG;
    int error = put(&record, sizeof record);
    return error ? error : put(path, record.path_length);
}

/* The first path of every file that has more than one, by its identity. */
struct first {
    dev_t device;
    ino_t inode;
    char *path;
};
static struct first *firsts;
static size_t n_firsts, firsts_capacity;

static struct first *find_first(const struct stat *info) {
    size_t at = (size_t)(info->st_ino * 0x9E3779B97F4A7C15ull >> 16) & (firsts_capacity - 1);
    while (firsts[at].path && (firsts[at].inode != info->st_ino || firsts[at].device != info->st_dev))
        at = (at + 1) & (firsts_capacity - 1);
    return &firsts[at];
}

static void grow_firsts(void) {
    struct first *old = firsts;
    size_t count = firsts_capacity;
    firsts_capacity = count ? count * 2 : 64;
    firsts = calloc(firsts_capacity, sizeof *firsts);
    if (!firsts) _exit(71);
    for (size_t i = 0; i < count; i++)
        if (old[i].path) *find_first(&(struct stat){.st_dev = old[i].device, .st_ino = old[i].inode}) = old[i];
    free(old);
}

/* Where this file was packed already, or NULL. */
static const char *packed_before(const struct stat *info) {
    if (!S_ISREG(info->st_mode) || info->st_nlink < 2 || !firsts_capacity) return NULL;
    return find_first(info)->path;
}

static void remember_first(const struct stat *info, const char *path) {
    if (info->st_nlink < 2) return;
    if (n_firsts * 2 >= firsts_capacity) grow_firsts();
    struct first first = {info->st_dev, info->st_ino, strdup(path)};
    if (!first.path) _exit(71);
    *find_first(info) = first;
    n_firsts++;
}

/* The size is promised before the content is read; a file that shrinks meanwhile is filled up with zeros. */
static int send_content(int fd, uint64_t offset, uint64_t size) {
    static char buffer[65536];
    while (size > 0) {
        size_t part = size < sizeof buffer ? (size_t)size : sizeof buffer;
        ssize_t n = pread(fd, buffer, part, (off_t)offset);
        if (n <= 0) {
            memset(buffer, 0, part);
            n = (ssize_t)part;
        }
        if (put(buffer, (size_t)n)) return EPIPE;
        size -= (uint64_t)n;
        offset += (uint64_t)n;
    }
    return 0;
}

/* What of a file is data. The last extent takes the rest when there are too many. */
static size_t find_extents(int fd, off_t size, struct extent *extents) {
    size_t count = 0;
    for (off_t data = 0, hole; count < MAX_EXTENTS && (data = lseek(fd, data, SEEK_DATA)) >= 0 && data < size; data = hole) {
        if ((hole = lseek(fd, data, SEEK_HOLE)) < 0 || hole > size || count + 1 == MAX_EXTENTS) hole = size;
        extents[count++] = (struct extent){(uint64_t)data, (uint64_t)(hole - data)};
    }
    return count;
}

static int send_sparse(int fd, const struct stat *info, const char *path) {
    static struct extent extents[MAX_EXTENTS];
    size_t count = find_extents(fd, info->st_size, extents);
    uint64_t total = sizeof(uint64_t), size = (uint64_t)info->st_size;
    for (size_t i = 0; i < count; i++) total += sizeof *extents + extents[i].length;
    int error = send_record('s', info, path, total);
    if (!error) error = put(&size, sizeof size);
    for (size_t i = 0; i < count && !error; i++) {
        error = put(&extents[i], sizeof *extents);
        if (!error) error = send_content(fd, extents[i].offset, extents[i].length);
    }
    return error;
}

static bool carried(const char *name) {
    return (!strncmp(name, "user.", 5) && strncmp(name, "user.overlay.", 13)) || !strncmp(name, "system.posix_acl_", 17);
}

/* Attributes of the entry before: "name NUL value" as the data of a record with its path. */
static int send_attributes(int fd, const struct stat *info, const char *path) {
    static char names[MAX_ATTRIBUTE], value[MAX_ATTRIBUTE];
    ssize_t total = packing_layer ? flistxattr(fd, names, sizeof names) : 0;
    int error = 0;
    for (char *name = names; !error && total > 0 && name < names + total; name += strlen(name) + 1) {
        ssize_t size = carried(name) ? fgetxattr(fd, name, value, sizeof value) : -1;
        if (size < 0) continue;
        error = send_record('x', info, path, strlen(name) + 1 + (uint64_t)size);
        if (!error) error = put(name, strlen(name) + 1);
        if (!error) error = put(value, (size_t)size);
    }
    return error;
}

static int pack_entry(int parent, const char *name, char *path, int depth);

/* One buffer holds the path of the entry at hand; it grows and shrinks on the way through the tree. */
static int pack_directory(int fd, char *path, int depth) {
    DIR *directory = fdopendir(fd);
    if (!directory) return errno;
    size_t length = strlen(path);
    int error = depth >= MAX_DEPTH ? ENAMETOOLONG : 0;
    for (struct dirent *entry; !error && (entry = readdir(directory));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        size_t room = MAX_PATH_BYTES + 1 - length;
        int added = snprintf(path + length, room, "%s%s", length ? "/" : "", entry->d_name);
        error = (size_t)added < room ? pack_entry(dirfd(directory), entry->d_name, path, depth + 1) : ENAMETOOLONG;
        path[length] = '\0';
    }
    closedir(directory);
    return error;
}

static int send_text(char kind, const struct stat *info, const char *path, const char *text, size_t size) {
    int error = send_record(kind, info, path, size);
    return error ? error : put(text, size);
}

static int pack_link(int parent, const char *name, const char *path, const struct stat *info) {
    char target[4096];
    ssize_t n = readlinkat(parent, name, target, sizeof target);
    return n < 0 ? 0 : send_text('l', info, path, target, (size_t)n);
}

static int pack_file(int fd, const char *path, const struct stat *info) {
    bool dense = (uint64_t)info->st_blocks * 512 >= (uint64_t)info->st_size;
    remember_first(info, path);
    int error = dense ? send_record('f', info, path, (uint64_t)info->st_size) : send_sparse(fd, info, path);
    if (!error && dense) error = send_content(fd, 0, (uint64_t)info->st_size);
    return error ? error : send_attributes(fd, info, path);
}

/* An owner may take the right to read from itself, and the file is still its own. Its mode is changed through a
 * descriptor: by name, a command that runs meanwhile could put a link there that leads to another file of its user. */
static int open_entry(int parent, const char *name, const struct stat *info) {
    const int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(parent, name, flags | O_NOFOLLOW);
    if (fd >= 0 || errno != EACCES || info->st_uid != geteuid()) return fd;
    int found = openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    struct stat same;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", found);
    if (found >= 0 && fstat(found, &same) == 0 && same.st_ino == info->st_ino && same.st_dev == info->st_dev &&
        chmod(path, (info->st_mode | 0500) & 07777) == 0) {
        fd = open(path, flags);
        chmod(path, info->st_mode & 07777);
    }
    if (found >= 0) close(found);
    return fd;
}

/* What vanished, cannot be opened, or is a device is left out; from a download FIFOs, which block readers, and sockets too. */
static int pack_entry(int parent, const char *name, char *path, int depth) {
    struct stat info;
    if (fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW)) return 0;
    if (S_ISLNK(info.st_mode)) return pack_link(parent, name, path, &info);
    if (packing_layer && S_ISFIFO(info.st_mode)) return send_record('p', &info, path, 0);
    if (packing_layer && S_ISSOCK(info.st_mode)) return send_record('u', &info, path, 0);
    if (packing_layer && S_ISCHR(info.st_mode) && info.st_rdev == makedev(0, 0)) return send_record('w', &info, path, 0);
    if (!S_ISDIR(info.st_mode) && !S_ISREG(info.st_mode)) return 0;
    const char *before = packed_before(&info);
    if (before) return send_text('h', &info, path, before, strlen(before));
    int fd = open_entry(parent, name, &info), error;
    if (fd < 0) return 0;
    if (S_ISDIR(info.st_mode)) {
        error = send_record(packing_layer && is_opaque(fd) ? 'o' : 'd', &info, path, 0);
        if (!error) error = send_attributes(fd, &info, path);
        if (!error) return pack_directory(fd, path, depth);
    } else {
        error = pack_file(fd, path, &info);
    }
    close(fd);
    return error;
}

/* `name` itself is the record with the empty path. */
void pack_tree(int out, int directory, const char *name, bool layer) {
    out_fd = out;
    packing_layer = layer;
    static char path[MAX_PATH_BYTES + 1];
    int error = pack_entry(directory, name, path, 0);
    struct record end = {.kind = error ? 'E' : 'e', .size = (uint64_t)error};
    if (error != EPIPE) put(&end, sizeof end);
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
        *slash = '/';
    }
    if (fd >= 0 && (!strcmp(rest, "..") || !strcmp(rest, "."))) {
        close(fd);
        errno = EINVAL;
        return -1;
    }
    *name = *rest ? rest : ".";
    return fd;
}

static int skip(int in, uint64_t size) {
    char buffer[4096];
    for (; size > 0; size -= size < sizeof buffer ? size : sizeof buffer)
        if (!read_all(in, buffer, size < sizeof buffer ? (size_t)size : sizeof buffer)) return ECONNABORTED;
    return 0;
}

/* Reads `size` bytes to the end, also when they cannot be written; the first thing that failed, or ECONNABORTED. */
static int receive(int in, int fd, uint64_t size, int error) {
    static char buffer[65536];
    for (uint64_t left = size; left > 0;) {
        size_t part = left < sizeof buffer ? (size_t)left : sizeof buffer;
        if (!read_all(in, buffer, part)) return ECONNABORTED;
        if (!error && !write_all(fd, buffer, part)) error = errno;
        left -= part;
    }
    return error;
}

static int receive_sparse(int in, int fd, uint64_t size, int error) {
    uint64_t whole;
    if (size < sizeof whole || !read_all(in, &whole, sizeof whole)) return ECONNABORTED;
    if (!error && ftruncate(fd, (off_t)whole)) error = errno;
    for (size -= sizeof whole; size > 0;) {
        struct extent extent;
        if (size < sizeof extent || !read_all(in, &extent, sizeof extent)) return ECONNABORTED;
        size -= sizeof extent;
        if (extent.length > size || extent.offset > whole || extent.length > whole - extent.offset) return ECONNABORTED;
        if (!error && lseek(fd, (off_t)extent.offset, SEEK_SET) < 0) error = errno;
        error = receive(in, fd, extent.length, error);
        if (error == ECONNABORTED) return error;
        size -= extent.length;
    }
    return error;
}

/* Makes room: for what is there from an earlier unpacking, or an empty folder of a new slot. */
static void clear(int parent, const char *name) {
    if (unlinkat(parent, name, 0)) unlinkat(parent, name, AT_REMOVEDIR);
}

static int make_file(int in, int parent, const char *name, const struct record *record) {
    clear(parent, name);
    int fd = openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    int error = fd < 0 ? errno : 0;
    error = (record->kind == 's' ? receive_sparse : receive)(in, fd, record->size, error);
    if (fd >= 0) close(fd);
    return error;
}

/* The text that is a record's data: a link's target, or the path of a file that has this name too. */
static int read_text(int in, const struct record *record, char text[MAX_PATH_BYTES + 1]) {
    if (record->size > MAX_PATH_BYTES) return skip(in, record->size) ? ECONNABORTED : ENAMETOOLONG;
    if (!read_all(in, text, (size_t)record->size)) return ECONNABORTED;
    text[record->size] = '\0';
    return 0;
}

static int make_link(int in, int parent, const char *name, const struct record *record) {
    char target[MAX_PATH_BYTES + 1];
    int error = read_text(in, record, target);
    if (error) return error;
    clear(parent, name);
    return symlinkat(target, parent, name) ? errno : 0;
}

static int make_hard_link(int in, int directory, int parent, const char *name, const struct record *record) {
    char first[MAX_PATH_BYTES + 1];
    const char *first_name;
    int error = read_text(in, record, first);
    if (error) return error;
    int first_parent = open_parent(directory, first, &first_name);
    if (first_parent < 0) return errno;
    clear(parent, name);
    if (linkat(first_parent, first_name, parent, name, 0)) error = errno;
    close(first_parent);
    return error;
}

static int make_node(int parent, const char *name, mode_t kind) {
    clear(parent, name);
    return mknodat(parent, name, kind | 0600, 0) ? errno : 0;
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

/* What waits until everything is there. A read-only directory must still be filled, and filling it changes its time; what
 * is made below one that has rights for new entries would get those. */
struct later {
    struct later *next;
    struct record record;
    char *attribute; /* its name, NUL, its value; NULL: mode and time of a directory */
    char path[];
};
static struct later *later;
#define MAX_HELD_BACK 4096 /* a hundred users or so: whoever sends the tree decides how many attributes there are */

static void remember(const struct record *record, const char *path, const char *attribute) {
    struct later *entry = malloc(sizeof *entry + record->path_length + 1);
    if (!entry) _exit(71);
    *entry = (struct later){.next = later, .record = *record};
    memcpy(entry->path, path, (size_t)record->path_length + 1);
    if (attribute && !(entry->attribute = malloc((size_t)record->size))) _exit(71);
    if (attribute) memcpy(entry->attribute, attribute, (size_t)record->size);
    later = entry;
}

/* A file system that holds no attributes is no reason to lose the file. */
static void write_attribute(int parent, const char *name, const char *attribute, size_t size) {
    int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return;
    size_t text = strlen(attribute) + 1;
    (void)!fsetxattr(fd, attribute, attribute + text, size - text, 0);
    close(fd);
}

static int set_attribute(int in, int parent, const char *name, const struct record *record, const char *path, bool layer) {
    static char text[2 * MAX_ATTRIBUTE];
    if (!layer || record->size > sizeof text) return skip(in, record->size);
    if (!read_all(in, text, (size_t)record->size)) return ECONNABORTED;
    if (!memchr(text, '\0', (size_t)record->size) || !carried(text)) return 0;
    if (record->size <= MAX_HELD_BACK && !strcmp(text, "system.posix_acl_default")) remember(record, path, text);
    else write_attribute(parent, name, text, (size_t)record->size);
    return 0;
}

static int set_metadata(int parent, const char *name, const struct record *record, bool layer) {
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT},
                                {record->mtime_ns / 1000000000LL, record->mtime_ns % 1000000000LL}};
    struct stat found;
    uid_t uid = archive_owner >= 0 ? (uid_t)archive_owner : record->uid;
    gid_t gid = archive_owner >= 0 ? (gid_t)archive_owner : record->gid;
    if (times[1].tv_nsec < 0) { /* before 1970 */
        times[1].tv_sec--;
        times[1].tv_nsec += 1000000000L;
    }
    if (layer && geteuid() == 0 && fchownat(parent, name, uid, gid, AT_SYMLINK_NOFOLLOW)) return errno;
    /* A folder's turn comes at the end, when a later record may have put a link in its place: chmod would follow it. */
    if (fstatat(parent, name, &found, AT_SYMLINK_NOFOLLOW)) return errno;
    if (!S_ISLNK(found.st_mode) && fchmodat(parent, name, record->mode & 07777, 0)) return errno;
    utimensat(parent, name, times, AT_SYMLINK_NOFOLLOW);
    return 0;
}

static int unpack_entry(int in, int directory, char *path, const struct record *record, bool layer) {
    const char *name;
    int parent = open_parent(directory, path, &name), error = parent < 0 ? errno : 0;
    if (error) return skip(in, record->size) ? ECONNABORTED : error;
    switch (record->kind) {
    case 'f':
    case 's': error = make_file(in, parent, name, record); break;
    case 'l': error = make_link(in, parent, name, record); break;
    case 'h': error = make_hard_link(in, directory, parent, name, record); break;
    case 'p':
    case 'u': error = make_node(parent, name, record->kind == 'p' ? S_IFIFO : S_IFSOCK); break;
    case 'x': error = set_attribute(in, parent, name, record, path, layer); break;
    case 'd':
    case 'o': error = make_directory(parent, name, record->kind == 'o' || (archive_root_opaque && !*path)); break;
    case 'w': error = layer ? (mknodat(parent, name, S_IFCHR, makedev(0, 0)) ? errno : 0) : ECONNABORTED; break;
    default: error = ECONNABORTED; /* no record of ours: where the next one starts is unknown */
    }
    if (!error && strchr("fslpu", record->kind)) error = set_metadata(parent, name, record, layer);
    close(parent);
    return error;
}

static int finish(int directory, bool layer) {
    int first_error = 0;
    for (struct later *entry; (entry = later);) {
        const char *name;
        int parent = open_parent(directory, entry->path, &name), error = parent < 0 ? errno : 0;
        if (!error && entry->attribute) write_attribute(parent, name, entry->attribute, (size_t)entry->record.size);
        else if (!error) error = set_metadata(parent, name, &entry->record, layer);
        if (parent >= 0) close(parent);
        if (!first_error) first_error = error;
        later = entry->next;
        free(entry->attribute);
        free(entry);
    }
    return first_error;
}

/* Reads to the end even after an error, so that the sender is told instead of cut off. */
static int unpack_records(int in, int directory, bool layer) {
    for (int first_error = 0;;) {
        struct record record;
        char path[65536];
        if (!read_all(in, &record, sizeof record)) return ECONNABORTED;
        if (record.kind == 'e') return first_error;
        if (record.kind == 'E') return record.size ? (int)record.size : EIO;
        if (!read_all(in, path, record.path_length)) return ECONNABORTED;
        path[record.path_length] = '\0';
        if (record.kind == 'd' || record.kind == 'o') remember(&record, path, NULL);
        int error = unpack_entry(in, directory, path, &record, layer);
        if (error == ECONNABORTED) return error;
        if (!first_error) first_error = error;
    }
}

int unpack_tree(int in, int directory, bool layer) {
    int first_error = unpack_records(in, directory, layer);
    int error = finish(directory, layer);
    return first_error ? first_error : error;
}
