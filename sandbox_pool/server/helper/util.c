/* Small helpers without a better home. */
#include "slot.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

bool write_all(int fd, const void *data, size_t size) {
    const char *next = data;
    while (size > 0) {
        ssize_t n = write(fd, next, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        next += n;
        size -= (size_t)n;
    }
    return true;
}

bool read_all(int fd, void *data, size_t size) {
    char *next = data;
    while (size > 0) {
        ssize_t n = read(fd, next, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        next += n;
        size -= (size_t)n;
    }
    return true;
}

/* Returns 0 or an errno: kernel control files report what they refuse on write. */
int write_text_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return errno;
    ssize_t n = write(fd, text, strlen(text));
    int error = n < 0 ? errno : 0;
    close(fd);
    return error;
}

int make_directories(const char *path, mode_t mode) {
    char partial[4096];
    if ((size_t)snprintf(partial, sizeof partial, "%s", path) >= sizeof partial) return ENAMETOOLONG;
    for (char *slash = partial + 1;; slash++) {
        if (*slash != '/' && *slash != '\0') continue;
        char kept = *slash;
        *slash = '\0';
        if (mkdir(partial, mode) && errno != EEXIST) return errno;
        if (kept == '\0') return 0;
        *slash = kept;
    }
}

/* Descriptors the shell receives get fixed numbers; what we hold ourselves must stay clear of those. */
int move_high(int fd) {
    if (fd < 0) return fd;
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 300);
    if (high < 0) return fd;
    close(fd);
    return high;
}

void drain_signals(int fd) {
    struct signalfd_siginfo info;
    while (read(fd, &info, sizeof info) > 0) {}
}

long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

size_t count_entries(int directory_fd) {
    int copy = openat(directory_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = copy < 0 ? NULL : fdopendir(copy);
    if (!directory) return 0;
    size_t count = 0;
    for (struct dirent *entry; (entry = readdir(directory));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) count++;
    closedir(directory);
    return count;
}

char *command_line;
size_t command_line_size;

/* For process lists: a slot must not see the host's paths. */
void set_process_name(const char *name) {
    prctl(PR_SET_NAME, name, 0, 0, 0);
    memset(command_line, 0, command_line_size);
    snprintf(command_line, command_line_size, "%s", name);
}
