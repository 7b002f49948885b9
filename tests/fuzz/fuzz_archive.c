/* unpack_tree() on bytes of any kind, and pack_tree() on what came of it. Everything happens below one folder that is
 * emptied each time; a file that appears beside it is a way out. */
#include "archive.c" /* with what it remembers between entries, which lasts as long as a process otherwise */

#include <ftw.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

struct slot_config slot;
static char place[] = "/tmp/hermes-fuzz-XXXXXX";
static int outside;

static int open_up(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info, (void)where;
    return kind == FTW_D || kind == FTW_DNR ? chmod(path, 0700) : 0;
}

static int drop(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info, (void)kind, (void)where;
    return remove(path);
}

static void start_again(void) {
    char path[64];
    snprintf(path, sizeof path, "%s/in", place);
    nftw(path, open_up, 32, FTW_PHYS);
    if (nftw(path, drop, 32, FTW_PHYS | FTW_DEPTH) && errno != ENOENT) abort();
    if (mkdir(path, 0700)) abort();
    for (size_t i = 0; i < firsts_capacity; i++) free(firsts[i].path);
    free(firsts);
    firsts = NULL;
    n_firsts = firsts_capacity = packed_bytes = packed_entries = 0;
}

/* Beside the folder there is one file, which nothing may touch. */
static void check_outside(void) {
    struct stat info;
    if (count_entries(outside) != 2 || fstatat(outside, "canary", &info, AT_SYMLINK_NOFOLLOW)) abort();
    if (info.st_mode != (S_IFREG | 0600) || info.st_size || info.st_nlink != 1 || info.st_mtim.tv_sec != 1) abort();
}

int LLVMFuzzerInitialize(int *count, char ***arguments) {
    (void)count, (void)arguments;
    if (!mkdtemp(place)) abort();
    outside = open(place, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int canary = openat(outside, "canary", O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (canary < 0 || futimens(canary, (struct timespec[2]){{1, 0}, {1, 0}})) abort();
    close(canary);
    struct rlimit largest = {16 << 20, 16 << 20}; /* a promised size is not a file that must be written */
    setrlimit(RLIMIT_FSIZE, &largest);
    signal(SIGXFSZ, SIG_IGN);
    archive_max_bytes = 16 << 20;
    return 0;
}

static int file_of(const uint8_t *data, size_t size) {
    int fd = memfd_create("input", MFD_CLOEXEC);
    if (fd < 0 || !write_all(fd, data, size)) abort();
    lseek(fd, 0, SEEK_SET);
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    bool layer = data[0] & 1;
    start_again();
    int in = file_of(data + 1, size - 1), directory = openat(outside, "in", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    unpack_tree(in, directory, layer);
    close(in);
    close(directory);
    check_outside();
    int out = memfd_create("output", MFD_CLOEXEC);
    directory = openat(outside, "in", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory >= 0) pack_tree(out, directory, ".", layer);
    if (directory >= 0) close(directory);
    close(out);
    check_outside();
    return 0;
}
